package election

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/seeds"
)

// TestManyCandidates has 20 candidates lead one after the other, or 1,000 in a long run. Those that have ended leave
// nothing behind.
func TestManyCandidates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		a, b := o.run(t.Context(), "a", 0), o.run(t.Context(), "b", time.Second)
		goroutines := 0
		for turn := range seeds.Of(20, 1000) {
			time.Sleep(time.Minute)
			o.core.ClearActions()
			synctest.Wait()
			if a.leading.Load() == b.leading.Load() {
				t.Fatalf("turn %d: a leads: %v, b leads: %v", turn, a.leading.Load(), b.leading.Load())
			}
			if turn == 1 {
				goroutines = runtime.NumGoroutine()
			}
			if n := runtime.NumGoroutine(); turn > 1 && n > goroutines {
				t.Fatalf("turn %d: %d goroutines, before %d", turn, n, goroutines)
			}
			a.end(t)
			a, b = b, o.run(t.Context(), fmt.Sprint("candidate-", turn), 0)
		}
		a.end(t)
		b.end(t)
		if o.most.Load() != 1 {
			t.Errorf("%d led at a time", o.most.Load())
		}
	})
}
