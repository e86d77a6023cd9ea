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
type replaces map[lb.Key]*pause

// allow reports whether the Service's status may be replaced now.
func (r replaces) allow(key lb.Key, now time.Time) bool {
	last := r[key]
	if last == nil {
		return true
	}
	last.waiting = now.Before(last.until)
	return !last.waiting
}

// note takes note of a replacement that was written.
func (r replaces) note(key lb.Key, now time.Time) {
	last := r.of(key, now)
	last.until = now.Add(last.backoff.Next())
}

// missed takes note of one that has not taken place. It has replaced nothing, and so makes no pause longer.
func (r replaces) missed(key lb.Key, now time.Time) { r.of(key, now).until = now.Add(minReplace) }

// of returns the pause of a Service, or a new one.
func (r replaces) of(key lb.Key, now time.Time) *pause {
	last := r[key]
	if last == nil || now.Sub(last.until) > forgetReplace {
		last = &pause{backoff: loop.Backoff{Min: minReplace, Max: maxReplace}}
		r[key] = last
	}
	return last
}
