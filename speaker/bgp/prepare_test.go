package bgp

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// TestRoutesWaitUntilTheNodeIsPrepared has the routes and the end of the RIB wait for what Prepare
// returns, each time that the session comes up, while the session goes on.
func TestRoutesWaitUntilTheNodeIsPrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, asked := newFakePeer(t), make(chan chan struct{}, 1)
		a := New(Options{Log: slog.New(slog.DiscardHandler), Dial: p.dial, Prepare: func() <-chan struct{} {
			prepared := make(chan struct{})
			asked <- prepared
			return prepared
		}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- a.Run(ctx) }()
		open := routerOpen()
		open.capabilities = append(open.capabilities, bgp.NewCapGracefulRestart(false, false, 120, nil))
		want := func(n int) {
			set(a, external(func(d *plan.BGPSession) { d.GracefulRestart, d.Routes = true, vips(n, false) }))
		}
		for range 2 {
			want(1)
			p.establish(open)
			prepared := <-asked
			want(2)                       // which counts, too
			p.want(bgp.BGP_MSG_KEEPALIVE) // after three seconds, and nothing before
			if s := status(a); s.State != Established || s.Synced {
				t.Errorf("%v, synced: %v; want an established session that owes its routes", s.State, s.Synced)
			}
			close(prepared)
			updates, _ := p.readUpdates()
			if up, _ := content(updates); len(up) != 2 || len(updates) != 2 {
				t.Errorf("%v in %d UPDATEs, want two routes and the end of the RIB", up, len(updates))
			}
			if s := status(a); !s.Synced {
				t.Error("not synced with all routes on the wire")
			}
			want(1)
			updates, _ = p.readUpdates()
			if _, down := content(updates); len(down) != 1 || len(updates) != 1 {
				t.Errorf("a change later on: %d withdrawn in %d UPDATEs", len(down), len(updates))
			}
			p.conn.Close()
		}
		p.establish(open)
		<-asked
		cancel() // an end does not wait
		p.wantClosed()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
	})
}
