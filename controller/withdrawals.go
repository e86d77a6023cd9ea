package main

import (
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A deleted Service loses its finalizer once the speakers report that nobody announces it, and
// after withdrawWithin in any case: a speaker that has died reports nothing, and no deletion may
// hang for ever.
const withdrawWithin = 10 * time.Second

// withdrawals says until when to wait for the speakers, by Service. Each end of a Service has a wait
// of its own.
type withdrawals map[lb.Key]*withdrawal

type withdrawal struct {
	uid     string // of the Service
	until   time.Time
	waiting bool
}

// announced reports whether a Service shows that somebody announces it.
func announced(s lb.Service) bool {
	return s.Announcements != "" || slices.ContainsFunc(s.Conditions, func(c lb.Condition) bool {
		return c.Type == lb.ConditionAnnounced && c.Status
	})
}

// allow reports whether the wait for a Service is over, and begins it with the first call since the
// Service was ours.
func (w withdrawals) allow(key lb.Key, uid string, now time.Time) bool {
	if w[key] == nil || w[key].uid != uid {
		w[key] = &withdrawal{uid: uid, until: now.Add(withdrawWithin)}
	}
	w[key].waiting = now.Before(w[key].until)
	return !w[key].waiting
}

// due calls yield for the Services that have waited long enough, and returns how long the next has
// to wait; 0 if none does.
func (w withdrawals) due(now time.Time, yield func(lb.Key)) (again time.Duration) {
	for key, of := range w {
		switch left := of.until.Sub(now); {
		case !of.waiting:
		case left <= 0:
			of.waiting = false
			yield(key)
			again = time.Millisecond
		default:
			again = soonest(again, left)
		}
	}
	return again
}
