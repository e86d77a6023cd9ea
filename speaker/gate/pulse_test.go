package gate

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestAFeedThatHangsIsSeen stops what takes in the proxy's messages, and what tells the proxy.
func TestAFeedThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang, ours := make(chan struct{}), make(chan net.Conn, 1)
		f := NewFeed(Options{Hold: time.Hour, Log: slog.New(slog.DiscardHandler),
			Changed: func([]netip.Addr) { <-hang },
			Dial: func(context.Context) (net.Conn, error) {
				near, far := net.Pipe()
				ours <- far
				return near, nil
			}})
		want := func(what string, busy time.Duration) {
			t.Helper()
			synctest.Wait()
			if got := f.Busy(); got != busy {
				t.Errorf("%s: busy for %v, want %v", what, got, busy)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		proxy := <-ours
		time.Sleep(writeTimeout - 1)
		want("the proxy does not listen", writeTimeout-1)
		proxy.Close()
		proxy = <-ours
		go func() { _, _ = io.Copy(io.Discard, proxy) }()
		time.Sleep(time.Hour)
		want("nothing comes", 0)
		if err := json.NewEncoder(proxy).Encode(lb.FeedMessage{Complete: true}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		want("a message is not taken in", time.Hour)
		close(hang)
		want("it is in the end", 0)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
