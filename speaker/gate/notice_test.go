package gate

import (
	"bufio"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The proxy is told of dead nodes, again after a new connection, and nothing while there is nothing to say.
func TestTheProxyIsToldOfDeadNodes(t *testing.T) {
	conns := make(chan net.Conn)
	f := NewFeed(Options{Log: slog.New(slog.DiscardHandler), Changed: func([]netip.Addr) {}, Dial: func(ctx context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		select {
		case conns <- theirs:
			return ours, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	heard := func(in *bufio.Reader, want string) {
		t.Helper()
		if line, err := in.ReadString('\n'); err != nil || line != want+"\n" {
			t.Errorf("the proxy hears %q, %v; want %q", line, err, want)
		}
	}
	proxy := <-conns
	in := bufio.NewReader(proxy)
	f.Tell(lb.FeedNotice{})
	f.Tell(lb.FeedNotice{Dead: []string{"a", "b"}})
	heard(in, `{"dead":["a","b"]}`)
	f.Tell(lb.FeedNotice{Dead: []string{"b"}})
	heard(in, `{"dead":["b"]}`)
	proxy.Close()
	proxy = <-conns
	in = bufio.NewReader(proxy)
	heard(in, `{"dead":["b"]}`)
	f.Tell(lb.FeedNotice{})
	heard(in, `{"dead":null}`)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
