package bgp

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// TestASessionThatHangsIsSeen has a session hang when it tells of its state, and not while it waits
// for a peer that sends, or reads, nothing.
func TestASessionThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, hang := newFakePeer(t), make(chan struct{})
		var hangs atomic.Bool
		a := New(Options{Log: slog.New(slog.DiscardHandler), Dial: p.dial, Changed: func() {
			if hangs.Load() {
				<-hang
			}
		}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		want := func(what string, busy time.Duration) {
			t.Helper()
			synctest.Wait()
			if got := a.Busy(); got != busy {
				t.Errorf("%s: busy for %v, want %v", what, got, busy)
			}
		}
		open := routerOpen()
		open.hold = 0
		d := external(func(d *plan.BGPSession) { d.HoldTime, d.Routes = 0, nil })
		set(a, d)
		p.establish(open)
		time.Sleep(time.Hour)
		want("a quiet peer", 0)
		d.Routes = routes("192.0.2.1/32")
		set(a, d)
		time.Sleep(writeTime / 2)
		want("a peer that does not read", 0)
		hangs.Store(true)
		p.conn.Close()
		time.Sleep(time.Hour)
		want("it hangs", time.Hour)
		hangs.Store(false)
		close(hang)
		want("it goes on", 0)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
