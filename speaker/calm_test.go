package main

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Memory is given back while little is allocated, and not while Services come.
func TestMemoryIsGivenBackWhileItIsCalm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var freed []time.Duration
		perSecond := func() uint64 { // more for a minute
			since := uint64(time.Since(began) / time.Second)
			return since*100<<10 + min(max(since, 60)-60, 60)*(2<<20)
		}
		c := calm{allocated: perSecond, free: func() { freed = append(freed, time.Since(began)) }}
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute-time.Second)
		defer cancel()
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
		want := []time.Duration{20 * time.Second, 40 * time.Second, time.Minute, 140 * time.Second, 160 * time.Second}
		if !slices.Equal(freed, want) {
			t.Errorf("given back after %s, want %s", freed, want)
		}
	})
}

func TestAllocationsAreCounted(t *testing.T) {
	c := newCalm()
	before := c.allocated()
	kept := make([]byte, 8<<20)
	if got := c.allocated() - before; got < uint64(len(kept)) {
		t.Errorf("%d bytes were counted, and %d allocated", got, len(kept))
	}
}
