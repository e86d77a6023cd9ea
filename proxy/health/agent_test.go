package health

import (
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// HAProxy's agent-check gets one line, and nothing else.
func TestContract4Agent(t *testing.T) {
	b := newBench(t)
	ask := func(address string) (answer string) {
		b.ns.Do(t, func() error {
			conn, err := net.Dial("tcp", address)
			if err != nil {
				return err
			}
			defer conn.Close()
			fmt.Fprint(conn, "GET /haproxy-agent HTTP/1.0\r\n\r\n")
			text, err := io.ReadAll(conn)
			answer = string(text)
			return err
		})
		return answer
	}
	leaving, stale, gone := state(2), state(2), state(0)
	leaving.Leaving = lb.ReasonNodeLeaving
	stale.Unapplied[lb.IPv6] = b.now.Add(-Stale)
	gone.Leaving = lb.ReasonNodeLeaving
	for _, tt := range []struct {
		name          string
		state         State
		address, want string
	}{
		{"a ready pod", state(1), "127.0.0.1:32000", "up 100%\n"},
		{"three", state(3), "127.0.0.1:32000", "up 300%\n"},
		{"the other family has its own count", state(3), "[::1]:32000", "up 400%\n"},
		{"none", state(0), "127.0.0.1:32000", "down #no ready pod on this node\n"},
		{"the node leaves", leaving, "127.0.0.1:32000", "up 0%\n"},
		{"the node leaves, with no pod", gone, "127.0.0.1:32000", "down #no ready pod on this node\n"},
		{"changes wait for too long", stale, "127.0.0.1:32000", "fail #changes wait for the kernel\n"},
	} {
		b.set(tt.state)
		if got := ask(tt.address); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	if n := b.ofServices.Len(); n > 0 {
		t.Errorf("%d connections of agents are still open", n)
	}
}
