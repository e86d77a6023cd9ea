// Package report is the actor that writes to Services whether their addresses are announced, and
// from where: the conditions Announced and Serving, the same as data in an annotation, and an Event
// when it changes. It writes a change once it has lasted, and never the same twice.
package report

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the actor.
const (
	// settleGood and settleBad are how long a report must stay the same before it is written: an owner
	// that changes twice in a moment is written once, and a gap while one hands over to another is not
	// written at all.
	settleGood = 300 * time.Millisecond
	settleBad  = 2 * time.Second
	// quiet is the least time between two writes to one Service; it doubles with each up to maxQuiet,
	// and starts anew after calm: two nodes that disagree, as in a partition, must not write against
	// each other all the time.
	quiet    = time.Second
	maxQuiet = time.Minute
	calm     = 5 * time.Minute
	// maxOwnQuiet is the most while the Service still shows what this node wrote last: nobody disagrees,
	// and the longer it waits, the longer the Service says what is so no more.
	maxOwnQuiet = 8 * time.Second
	// writeTimeout bounds one write.
	writeTimeout = 10 * time.Second
	// minRetry and maxRetry are the waits after a failure, whatever else there is to write. Services say
	// what is so no more for as long as the last of them once the API server is back.
	minRetry = time.Second
	maxRetry = 8 * time.Second
)

// Options of a Reporter.
type Options struct {
	Log *slog.Logger
	// Service returns a Service as last seen.
	Service func(lb.Key) (lb.Service, bool)
	// Write writes a status to a Service, in one write, and reports whether there was anything to
	// write.
	Write func(context.Context, lb.Service, lb.AnnouncedStatus) (wrote bool, err error)
	// Refused reports whether an error of Write is about that Service alone.
	Refused func(error) bool
	// Event reports a change on a Service; good ones and those that somebody may want to do something
	// about.
	Event func(s lb.Service, good bool, reason lb.Reason, message string)
}

// Reporter is the actor. The value for a Service on which another node reports is nil.
type Reporter struct {
	opts   Options
	runner *loop.Runner
	inbox  actor.Inbox[lb.Key, *lb.AnnouncedStatus]

	// Only apply touches these.
	wanted   map[lb.Key]*item
	retry    loop.Backoff
	retryAt  time.Time
	failures loop.Failures
}

var _ actor.Updater[lb.Key, *lb.AnnouncedStatus] = (*Reporter)(nil)

// item is what shall be written to one Service.
type item struct {
	status  lb.AnnouncedStatus
	since   time.Time // the status is the same since then
	due     bool      // may differ from what the Service shows
	written time.Time // last write
	wrote   *lb.AnnouncedStatus
	quiet   time.Duration
	// failures are refusals of this Service.
	failures loop.Failures
}

// New returns a Reporter that reports nothing.
func New(opts Options) *Reporter {
	r := &Reporter{opts: opts, wanted: map[lb.Key]*item{}, retry: loop.Backoff{Min: minRetry, Max: maxRetry}}
	r.runner = loop.New(func(ctx context.Context) (time.Duration, error) { return r.apply(ctx), nil },
		loop.Options{Gap: 50 * time.Millisecond})
	return r
}

// Begin takes all that this node reports at first.
func (r *Reporter) Begin(all map[lb.Key]*lb.AnnouncedStatus) {
	r.inbox.Begin(all)
	r.runner.Poke()
}

// Update takes what this node reports of some Services: a status, or nil where another node
// reports. The same status again makes sure that the Service still shows it.
func (r *Reporter) Update(changes map[lb.Key]*lb.AnnouncedStatus) {
	r.inbox.Update(changes)
	r.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (r *Reporter) Busy() time.Duration { return r.runner.Busy() }

// Run writes until ctx ends.
func (r *Reporter) Run(ctx context.Context) error { return r.runner.Run(ctx) }

// apply writes what is due and returns when there is more to do; 0 means not before the next
// update.
func (r *Reporter) apply(ctx context.Context) time.Duration {
	r.take()
	if wait := time.Until(r.retryAt); wait > 0 {
		return wait
	}
	var errs []error
	var next time.Time
	for _, key := range r.due() {
		if ctx.Err() != nil {
			return 0
		}
		r.take() // thousands of writes take minutes: what came meanwhile counts
		service, at, ok := r.next(key)
		if !ok {
			continue
		}
		if at.After(time.Now()) {
			if next.IsZero() || at.Before(next) {
				next = at
			}
			continue
		}
		err := r.write(ctx, service, r.wanted[key])
		if err != nil && r.opts.Refused(err) {
			if at = r.wanted[key].refused(r.opts.Log, key, err); next.IsZero() || at.Before(next) {
				next = at
			}
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("report on Service %s: %w", key, err))
			if errors.Is(err, context.DeadlineExceeded) {
				break // the API server is away; the others would wait as long
			}
		}
	}
	if ctx.Err() != nil {
		return 0
	}
	err := errors.Join(errs...)
	r.failures.Log(r.opts.Log, "cannot write to Services whether their addresses are announced; trying again",
		"writing to Services again whether their addresses are announced", err)
	if err != nil {
		wait := r.retry.Next()
		r.retryAt = time.Now().Add(wait)
		return wait
	}
	r.retry.Reset()
	if next.IsZero() {
		return 0
	}
	return max(time.Until(next), time.Millisecond)
}

// take takes in what came since the last time.
func (r *Reporter) take() {
	changes, _ := r.inbox.Take()
	for key, status := range changes {
		r.set(time.Now(), key, status)
	}
}

// due returns the Services that may have to be written, in order.
func (r *Reporter) due() []lb.Key {
	var keys []lb.Key
	for key, i := range r.wanted {
		if i.due {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, lb.Key.Compare)
	return keys
}

// set notes what is wanted of one Service.
func (r *Reporter) set(now time.Time, key lb.Key, status *lb.AnnouncedStatus) {
	if status == nil {
		delete(r.wanted, key)
		return
	}
	i := r.wanted[key]
	if i == nil {
		i = &item{since: now, status: *status}
		r.wanted[key] = i
	}
	if i.status != *status {
		i.status, i.since = *status, now
	}
	i.due = true
}

// next returns the Service as it is to be written, and when; ok is false when there is nothing to
// do.
func (r *Reporter) next(key lb.Key) (service lb.Service, at time.Time, ok bool) {
	i := r.wanted[key]
	if i == nil || !i.due {
		return service, at, false
	}
	service, exists := r.opts.Service(key)
	if !exists || i.status.ShownBy(service) {
		i.due = false
		return service, at, false
	}
	at = i.since.Add(settleBad)
	if i.status.Condition.Status {
		at = i.since.Add(settleGood)
	}
	wait := i.quiet
	if i.wrote != nil && i.wrote.ShownBy(service) {
		wait = min(wait, maxOwnQuiet)
	}
	if free := i.written.Add(wait); free.After(at) {
		at = free
	}
	return service, at, true
}

func (r *Reporter) write(ctx context.Context, service lb.Service, i *item) error {
	defer loop.Progress(ctx)
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	wrote, err := r.opts.Write(ctx, service, i.status)
	if err != nil {
		return err
	}
	said := i.status
	i.due, i.wrote = false, &said
	i.failures.Log(r.opts.Log, "", "wrote to a Service at last whether its addresses are announced", nil, "service",
		service.Key)
	if !wrote {
		return nil
	}
	i.pause()
	c := i.status.Condition
	if worthAnEvent(find(service, c.Type), c) {
		r.opts.Event(service, c.Status && c.Reason != lb.ReasonContested, c.Reason, c.Message)
	}
	return nil
}

// refused takes note that the API server refuses the write to this Service, and returns when to try again.
func (i *item) refused(log *slog.Logger, key lb.Key, err error) time.Time {
	i.failures.Log(log, "cannot write to a Service whether its addresses are announced; trying again", "", err,
		"service", key)
	i.pause()
	return i.written.Add(i.quiet)
}

// pause lets some time pass before the next write.
func (i *item) pause() {
	now := time.Now()
	if now.Sub(i.written) > calm {
		i.quiet = 0
	}
	i.written, i.quiet = now, min(max(2*i.quiet, quiet), maxQuiet)
}

// worthAnEvent leaves out that a reason has found other words.
func worthAnEvent(before *lb.Condition, now lb.Condition) bool {
	if before == nil {
		return true
	}
	return before.Status != now.Status || before.Reason != now.Reason || now.Status && before.Message != now.Message
}

func find(s lb.Service, conditionType string) *lb.Condition {
	i := slices.IndexFunc(s.Conditions, func(c lb.Condition) bool { return c.Type == conditionType })
	if i < 0 {
		return nil
	}
	return &s.Conditions[i]
}
