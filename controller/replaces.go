package main

import (
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Two programs that write addresses into the status of the same Service replace each other's for
// ever. Replacements of one Service are at least minReplace apart, up to maxReplace as they go on;
// after forgetReplace without one they begin anew.
const (
	minReplace    = time.Second
	maxReplace    = 5 * time.Minute
	forgetReplace = 2 * maxReplace
)

// replaces says when an address that another program wrote may be replaced again, by Service.
type replaces map[lb.Key]*replace

type replace struct {
	backoff loop.Backoff
	next    time.Time
	waiting bool
}

// allow reports whether the Service's status may be replaced now, and takes note of it.
func (r replaces) allow(key lb.Key, now time.Time) bool {
	last := r[key]
	if last == nil || now.Sub(last.next) > forgetReplace {
		last = &replace{backoff: loop.Backoff{Min: minReplace, Max: maxReplace}}
		r[key] = last
	}
	if last.waiting = now.Before(last.next); last.waiting {
		return false
	}
	last.next = now.Add(last.backoff.Next())
	return true
}

// due calls yield for the Services that have waited long enough, and returns how long the next has
// to wait; 0 if none does.
func (r replaces) due(now time.Time, yield func(lb.Key)) (again time.Duration) {
	for key, last := range r {
		switch left := last.next.Sub(now); {
		case !last.waiting:
		case left <= 0:
			last.waiting = false
			yield(key)
			again = time.Millisecond
		default:
			again = soonest(again, left)
		}
	}
	return again
}
