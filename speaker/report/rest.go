package report

import (
	"errors"
	"maps"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
)

// rests are those of owners whose last write failed: of namespaces with Services, or of other objects.
type rests map[string]*rest

// rest is for how long nothing is written for an owner after a failure.
type rest struct {
	backoff loop.Backoff
	until   time.Time
}

// until returns when something may be written for an owner; zero for at once.
func (r rests) until(owner string) (until time.Time) {
	if its := r[owner]; its != nil {
		until = its.until
	}
	return until
}

// ended takes note of the end of a write for an owner, and returns the error for the owner's lane. A failure begins a
// rest or prolongs it, and a success ends it. A write that was not wanted does neither: while its owner rests, the lane
// is told that the owner fails still.
func (r rests) ended(owner string, at time.Time, err error) error {
	its := r[owner]
	switch {
	case errors.Is(err, errUnwanted):
		if its == nil {
			return nil
		}
	case err == nil:
		delete(r, owner)
	default:
		if its == nil {
			its = &rest{backoff: loop.Backoff{Min: minRetry, Max: maxRetry}}
			r[owner] = its
		}
		its.until = at.Add(its.backoff.Next())
	}
	return err
}

// forget forgets failures of long ago: the owner may be gone.
func (r rests) forget(now time.Time) {
	maps.DeleteFunc(r, func(_ string, its *rest) bool { return now.Sub(its.until) > calm })
}
