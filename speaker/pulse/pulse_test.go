package pulse

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Whoever asks first after a freeze is told of it, before the beat goes on.
func TestAFreezeIsNoticedByWhoeverAsksFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var frozen, told atomic.Int64 // what the clock has gained while the process did not run, and how often it was told
		const limit = 400 * time.Millisecond
		p := &Pulse{limit: limit, changed: func() { told.Add(1) },
			clock: func() time.Duration { return time.Since(began) + time.Duration(frozen.Load()) }}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		want := func(what string, wakes uint64) {
			t.Helper()
			got, woke := p.Wakes()
			if got != wakes || told.Load() != int64(wakes) || wakes > 0 && woke.IsZero() {
				t.Errorf("%s: %d wakes, last at %s, told %d times; want %d", what, got, woke, told.Load(), wakes)
			}
		}
		time.Sleep(time.Hour)
		want("all the time awake", 0)
		frozen.Add(int64(limit - every))
		want("away for a moment", 0)
		time.Sleep(time.Second)
		frozen.Add(int64(8 * time.Second))
		want("frozen", 1)
		want("once each time", 1)
		time.Sleep(time.Hour)
		want("awake again", 1)
		frozen.Add(int64(limit + 1))
		time.Sleep(every)
		synctest.Wait()
		want("the beat notices it too", 2)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestAFreezeIsNoticedWhereverItFalls freezes the process between any two looks at the clock.
func TestAFreezeIsNoticedWhereverItFalls(t *testing.T) {
	for before := 2; before < 8; before++ { // the first look is the start: what was before counts as awake
		synctest.Test(t, func(t *testing.T) {
			began, looks, told := time.Now(), 0, 0
			var frozen time.Duration
			p := &Pulse{limit: time.Second, changed: func() { told++ }, clock: func() time.Duration {
				if looks++; looks == before {
					frozen = time.Minute
				}
				return time.Since(began) + frozen
			}}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := p.Run(ctx); err != nil || told != 1 {
				t.Errorf("frozen before look %d: told %d times, want once; error %v", before, told, err)
			}
		})
	}
}

func TestTheClockGoesOn(t *testing.T) {
	p := New(time.Second, func() {})
	before := p.clock()
	time.Sleep(time.Millisecond)
	if after := p.clock(); after <= before || before == 0 {
		t.Errorf("%s, then %s", before, after)
	}
}
