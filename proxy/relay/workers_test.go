package relay

import (
	"sync"
	"testing"
	"testing/synctest"
)

// Each function runs at once, however many do, and a bounded number of goroutines waits for the next ones.
func TestWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorkers()
		for range 3 {
			var running sync.WaitGroup
			goOn := make(chan struct{})
			for range 2 * maxIdle {
				running.Add(1)
				w.run(func() { running.Done(); <-goOn })
			}
			running.Wait()
			close(goOn)
			synctest.Wait()
			if w.idle != maxIdle {
				t.Errorf("%d goroutines wait, want %d", w.idle, maxIdle)
			}
		}
		w.close()
	})
}
