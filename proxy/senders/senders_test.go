package senders

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The actor looks soon for a node that it does not know, keeps the address of one that the kernel has
// forgotten, goes on after a failure, takes a new address of a node, and forgets nodes that are gone.
func TestSenders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
		var kernel sync.Mutex
		changes, looks := 0, 0
		found, failure := map[netip.Addr]lb.MAC{}, error(nil)
		answer := func(macs map[netip.Addr]lb.MAC, err error) {
			kernel.Lock()
			defer kernel.Unlock()
			found, failure = macs, err
		}
		looked := func() int {
			kernel.Lock()
			defer kernel.Unlock()
			return looks
		}
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Changed: func() { changes++ },
			Look: func([]netip.Addr) (map[netip.Addr]lb.MAC, error) {
				kernel.Lock()
				defer kernel.Unlock()
				looks++
				return found, failure
			}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		want := func(what string, wantChanges int, macs ...lb.MAC) {
			t.Helper()
			synctest.Wait()
			if got := a.Known(); !slices.Equal(got, macs) || changes != wantChanges {
				t.Errorf("%s: knows %v after %d changes, want %v after %d", what, got, changes, macs, wantChanges)
			}
		}
		synctest.Wait()
		if n := looked(); n != 0 {
			t.Errorf("%d looks for no node", n)
		}
		a.Set([]netip.Addr{one, two})
		want("at first", 0)
		answer(map[netip.Addr]lb.MAC{two: {2}, one: {1}}, nil)
		time.Sleep(2 * lookSoon)
		want("both answer", 1, lb.MAC{1}, lb.MAC{2})
		answer(map[netip.Addr]lb.MAC{two: {3}}, nil)
		time.Sleep(lookEvery)
		want("one is forgotten, one has another card", 2, lb.MAC{1}, lb.MAC{3})
		answer(nil, errors.New("no"))
		time.Sleep(lookEvery)
		want("a look fails", 2, lb.MAC{1}, lb.MAC{3})
		answer(map[netip.Addr]lb.MAC{two: {4}}, nil)
		time.Sleep(2 * lookEvery)
		want("it works again", 3, lb.MAC{1}, lb.MAC{4})
		a.Set([]netip.Addr{two})
		time.Sleep(lookSoon)
		want("one is gone", 4, lb.MAC{4})
		a.Set(nil)
		time.Sleep(lookSoon)
		want("all are gone", 5)
		before := looked()
		time.Sleep(time.Hour)
		if n := looked() - before; n != 0 {
			t.Errorf("%d looks for no node", n)
		}
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
