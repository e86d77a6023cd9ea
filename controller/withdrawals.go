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
	wait
	uid string // of the Service
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
		w[key] = &withdrawal{uid: uid, wait: wait{until: now.Add(withdrawWithin)}}
	}
	w[key].waiting = now.Before(w[key].until)
	return !w[key].waiting
}
