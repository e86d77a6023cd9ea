package relayfeed

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// TestALoopThatHangsIsSeen stops each loop of the actor in turn, which hang in what they call.
func TestALoopThatHangsIsSeen(t *testing.T) {
	for _, c := range []struct {
		name string
		hang func(d *Deps, wait func())
	}{
		{"the lease", func(d *Deps, wait func()) {
			d.Renew = func(plan.RelayWay, netip.AddrPort, time.Duration) error { wait(); return nil }
		}},
		{"what hears a relay", func(d *Deps, wait func()) {
			d.Original = func(f wire.Flow) (from, to netip.AddrPort, ok bool, err error) {
				wait()
				return f.Client, f.At, true, nil
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hang := make(chan struct{})
				deps := Deps{Log: slog.New(slog.DiscardHandler), Busy: func() time.Duration { return 0 },
					Renew:     func(plan.RelayWay, netip.AddrPort, time.Duration) error { return nil },
					End:       func(plan.RelayWay) error { return nil },
					Original:  func(wire.Flow) (from, to netip.AddrPort, ok bool, err error) { return from, to, false, nil },
					Answering: func([]netip.AddrPort) {}}
				c.hang(&deps, func() { <-hang })
				a := New(deps)
				a.SetAddresses(own, nil)
				a.Begin(nil)
				want := func(what string, busy time.Duration) {
					t.Helper()
					synctest.Wait()
					if got := a.Busy(); got < busy || busy == 0 && got != 0 {
						t.Errorf("%s: busy for %v, want %v", what, got, busy)
					}
				}
				ctx, cancel := context.WithCancel(t.Context())
				var loops sync.WaitGroup
				loops.Go(func() { a.keep(ctx) })
				time.Sleep(time.Hour)
				want("without a relay", 0)
				ours, theirs := net.Pipe()
				loops.Go(func() { a.serveRelay(ctx, ours) })
				loops.Go(func() { _, _ = io.Copy(io.Discard, theirs) })
				says := hello(7)
				says.Flows = []wire.Flow{{Client: netip.MustParseAddrPort("192.0.2.9:9"),
					At: netip.AddrPortFrom(own[lb.IPv4], 7)}}
				loops.Go(func() {
					for encoder := json.NewEncoder(theirs); encoder.Encode(says) == nil; time.Sleep(wire.Beat) {
					}
				})
				time.Sleep(10 * time.Minute)
				want("it hangs", 9*time.Minute)
				close(hang)
				time.Sleep(time.Minute)
				want("it goes on", 0)
				cancel()
				theirs.Close()
				loops.Wait()
			})
		})
	}
}
