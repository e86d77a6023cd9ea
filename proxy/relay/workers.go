package relay

import "sync"

// maxIdle is how many goroutines wait for the next connection at most.
const maxIdle = 128

// workers run functions at once, each in a goroutine. One whose function has ended waits for the next, as its stack has
// grown to what a connection needs: a new one's would have to be copied again and again.
type workers struct {
	next  chan func()
	group sync.WaitGroup

	mu   sync.Mutex
	idle int
}

func newWorkers() *workers { return &workers{next: make(chan func())} }

// run runs a function. It must not be called after close.
func (w *workers) run(f func()) {
	select {
	case w.next <- f:
	default:
		w.group.Go(func() { w.work(f) })
	}
}

func (w *workers) work(f func()) {
	for ok := true; ok; {
		f()
		if !w.rest(1) {
			return
		}
		f, ok = <-w.next
		w.rest(-1)
	}
}

// rest counts those that wait, and reports whether one more may.
func (w *workers) rest(change int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.idle+change > maxIdle {
		return false
	}
	w.idle += change
	return true
}

// close waits for all that run.
func (w *workers) close() {
	close(w.next)
	w.group.Wait()
}
