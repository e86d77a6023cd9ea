package main

import (
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// A Service that the API server refuses with what Landfall adds to it is tried again when it has changed, and
// after minUnwritable up to maxUnwritable.
const (
	minUnwritable = time.Second
	maxUnwritable = 5 * time.Minute
)

// unwritable are the Services that the API server refuses with what Landfall adds to them.
type unwritable map[lb.Key]*unwritten

type unwritten struct {
	wait
	uid, version string // of the Service
	backoff      loop.Backoff
}

// refused takes note of a refusal, and reports whether it is the first one of that Service.
func (u unwritable) refused(s lb.Service, now time.Time) (first bool) {
	return u.failed(s, now, loop.Backoff{Min: minUnwritable, Max: maxUnwritable})
}

// failed is refused with other waits.
func (u unwritable) failed(s lb.Service, now time.Time, backoff loop.Backoff) (first bool) {
	of := u[s.Key]
	if first = of == nil || of.uid != s.UID; first {
		of = &unwritten{uid: s.UID, backoff: backoff}
		u[s.Key] = of
	}
	of.version, of.until, of.waiting = s.Version, now.Add(of.backoff.Next()), true
	return first
}

// allow reports whether a Service may be written.
func (u unwritable) allow(s lb.Service) bool {
	of := u[s.Key]
	return of == nil || !of.waiting || of.version != s.Version
}
