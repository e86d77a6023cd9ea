package pulse

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Whoever asks first after a freeze is told of it, before the beat goes on.
func TestAFreezeIsNoticedByWhoeverAsksFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var frozen time.Duration // what the clock has gained while the process did not run
		told := 0
		const limit = 400 * time.Millisecond
		p := &Pulse{limit: limit, changed: func() { told++ },
			clock: func() time.Duration { return time.Since(began) + frozen }}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		want := func(what string, wakes uint64) {
			t.Helper()
			got, woke := p.Wakes()
			if got != wakes || told != int(wakes) || wakes > 0 && woke.IsZero() {
				t.Errorf("%s: %d wakes, last at %s, told %d times; want %d", what, got, woke, told, wakes)
			}
		}
		time.Sleep(time.Hour)
		want("all the time awake", 0)
		frozen += limit - every
		want("away for a moment", 0)
		time.Sleep(time.Second)
		frozen += 8 * time.Second
		want("frozen", 1)
		want("once each time", 1)
		time.Sleep(time.Hour)
		want("awake again", 1)
		frozen += limit + 1
		time.Sleep(every)
		synctest.Wait()
		want("the beat notices it too", 2)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestTheClockGoesOn(t *testing.T) {
	p := New(time.Second, func() {})
	before := p.clock()
	time.Sleep(time.Millisecond)
	if after := p.clock(); after <= before || before == 0 {
		t.Errorf("%s, then %s", before, after)
	}
}
