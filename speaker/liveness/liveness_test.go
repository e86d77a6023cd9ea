package liveness

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// running starts an Actor whose probes are answered while there is set.
func running(t *testing.T) (a *Actor, there *atomic.Bool, changes *atomic.Int64) {
	t.Helper()
	there, changes = new(atomic.Bool), new(atomic.Int64)
	a = New(Options{Self: "m", Hold: hold, Log: slog.New(slog.DiscardHandler),
		Changed: func() { changes.Add(1) },
		Probe: func(ctx context.Context, _ netip.AddrPort) bool {
			select {
			case <-ctx.Done():
			case <-time.After(answerTimeout):
			}
			return there.Load()
		}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return a, there, changes
}

// A node that goes down after its speaker is noticed at the next probe, and a hold ends by itself.
func TestActorProbesAndKeepsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, there, changes := running(t)
		there.Store(true)
		z := process("z1")
		z.Heard = plan.Point{Born: 1, Seq: 1}
		a.Joined(z)
		want := func(what string, held uint64, live []string, dead []string) {
			t.Helper()
			synctest.Wait()
			standings := a.Sight().Standings
			seen := a.Sight()
			if standings["z"].Held != held || !slices.Equal(seen.Live, live) || !slices.Equal(seen.Dead, dead) {
				t.Errorf("%s: %+v, %+v", what, standings, seen)
			}
		}
		both, alone := []string{"m", "z"}, []string{"m"}
		want("it has joined", 0, both, nil)
		a.Lost(z)
		want("it is suspect", 0, both, nil)
		time.Sleep(answerTimeout)
		want("its kernel answers", 1, both, nil)
		time.Sleep(hold - time.Millisecond)
		want("at the end of the hold", 1, both, nil)
		before := changes.Load()
		time.Sleep(probeEvery)
		want("after the hold", 0, alone, nil)
		if changes.Load() == before {
			t.Error("the end of the hold was not announced")
		}

		z.Born, z.Heard.Born = 2, 2
		a.Joined(z)
		a.Lost(z)
		time.Sleep(answerTimeout)
		want("the next one crashes, too", 2, both, nil)
		there.Store(false)
		time.Sleep(probeEvery + answerTimeout)
		want("its node follows", 0, alone, []string{"z"})
		a.Set(map[string][]netip.Addr{})
		want("it was removed from the cluster", 0, alone, nil)
	})
}

// The end of this program must not look like the death of a node.
func TestAProbeThatIsCutShortShowsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(Options{Self: "m", Hold: hold, Log: slog.New(slog.DiscardHandler), Changed: func() {},
			Probe: func(ctx context.Context, _ netip.AddrPort) bool { <-ctx.Done(); return false }})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- a.Run(ctx) }()
		z := process("z1")
		a.Joined(z)
		a.Lost(z)
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if seen := a.Sight(); len(seen.Dead) > 0 || !slices.Equal(seen.Live, []string{"m", "z"}) {
			t.Errorf("%+v", seen)
		}
	})
}

// The first to lose its path to a node needs another one's word, and has it from a neighbor on the ring that
// was told, asked the kernel, and whose own watch ends before it would have lost the path as well.
func TestANeighborAttests(t *testing.T) {
	for _, tc := range []struct {
		ring int
		want int32
	}{{1, 1}, {0, 0}} {
		synctest.Test(t, func(t *testing.T) {
			var reports atomic.Int32
			a := New(Options{Self: "m", Hold: hold, Log: slog.New(slog.DiscardHandler), Changed: func() {}, Ring: tc.ring,
				Probe: func(_ context.Context, addr netip.AddrPort) bool { return addr != process("z1").Addr },
				Report: func(node string, _ uint64) {
					if node == "z" {
						reports.Add(1)
					}
				}})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- a.Run(ctx) }()
			a.Joined(process("n1")) // of three nodes, all are neighbors
			a.Joined(process("z1"))
			a.Alarmed("z", process("z1").Born, "n")
			synctest.Wait()
			if reports.Load() > 0 {
				t.Error("reported when the kernel had been silent once")
			}
			time.Sleep(probeEvery + time.Second)
			synctest.Wait()
			if seen := a.Sight(); !slices.Equal(seen.Dead, []string{"z"}) || reports.Load() != tc.want {
				t.Errorf("ring of %d: %v dead, %d reports; want %d", tc.ring, seen.Dead, reports.Load(), tc.want)
			}
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// A node that is cut off loses the others one by one. At no moment does it see a majority and a dead node,
// and so it takes nothing from any of them.
func TestContract11ANodeThatIsCutOffBuriesNoneBeforeTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a *Actor
		changed := func() {
			if seen := a.Sight(); len(seen.Dead) > 0 || len(seen.Missing) > 0 && seen.Majority {
				t.Errorf("%+v", seen)
			}
		}
		a = New(Options{Self: "m", Hold: hold, Log: slog.New(slog.DiscardHandler), Changed: func() { changed() },
			Probe: func(context.Context, netip.AddrPort) bool { time.Sleep(answerTimeout); return false }})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- a.Run(ctx) }()
		for _, name := range []string{"a1", "b1", "c1", "d1"} {
			a.Joined(process(name))
		}
		for _, name := range []string{"a1", "b1", "c1", "d1"} {
			a.Lost(process(name))
			time.Sleep(130 * time.Millisecond) // between two rounds of probes, and in the middle of one
		}
		synctest.Wait()
		if seen := a.Sight(); seen.Majority || !seen.Alone {
			t.Errorf("in the end: %+v", seen)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
