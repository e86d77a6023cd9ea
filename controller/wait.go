package main

import (
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// wait is until when something about a Service waits.
type wait struct {
	until   time.Time
	waiting bool
}

func (w *wait) of() *wait { return w }

// pause is a wait that grows.
type pause struct {
	wait
	backoff loop.Backoff
}

// due calls yield for the Services that have waited long enough, and returns how long the next has to wait;
// 0 if none does.
func due[M ~map[lb.Key]W, W interface{ of() *wait }](all M, now time.Time, yield func(lb.Key)) (again time.Duration) {
	for key, each := range all {
		w := each.of()
		switch left := w.until.Sub(now); {
		case !w.waiting:
		case left <= 0:
			w.waiting = false
			yield(key)
			again = time.Millisecond
		default:
			again = soonest(again, left)
		}
	}
	return again
}
