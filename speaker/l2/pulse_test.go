package l2

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// hanging are Stats that take no dropped packet until it is closed.
type hanging struct {
	noStats
	until chan struct{}
}

func (h hanging) Dropped(string, Drop, int) { <-h.until }

// TestAReaderThatHangsIsSeen has a reader hang at a frame, and not while it waits for one.
func TestAReaderThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := newSegment(), hanging{until: make(chan struct{})}
		a := New(Options{Log: slog.New(slog.DiscardHandler), Listen: s.Listen, Stats: h})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		a.Set(desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}))
		time.Sleep(time.Hour)
		want := func(what string, busy time.Duration) {
			t.Helper()
			synctest.Wait()
			if got := a.Busy(); got != busy {
				t.Errorf("%s: busy for %v, want %v", what, got, busy)
			}
		}
		want("nothing comes", 0)
		s.open["eth0"].in <- []byte("x")
		time.Sleep(time.Hour)
		want("it hangs at a frame", time.Hour)
		close(h.until)
		want("it goes on", 0)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
