// Package report is the actor that writes to Services whether their addresses are announced, and
// from where: the conditions Announced and Serving, and an Event when they change. It writes a
// change once it has lasted, and never the same twice.
package report

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

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
	// writeTimeout bounds one write.
	writeTimeout = 10 * time.Second
	// minRetry and maxRetry are the waits after a failure, whatever else there is to write.
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// Options of a Reporter.
type Options struct {
	Log *slog.Logger
	// Service returns a Service as last seen.
	Service func(lb.Key) (lb.Service, bool)
	// Write sets conditions on a Service, in one write, and tells whether there was anything to write.
	Write func(context.Context, lb.Service, ...lb.Condition) (wrote bool, err error)
	// Event reports a change on a Service; good ones and those that somebody may want to do something
	// about.
	Event func(s lb.Service, good bool, reason lb.Reason, message string)
}

// Reporter is the actor.
type Reporter struct {
	opts   Options
	runner *loop.Runner

	mu     sync.Mutex
	wanted map[lb.Key]*item

	// Only apply touches these.
	retryAt time.Time
	retry   time.Duration
}

// item is what shall be written to one Service.
type item struct {
	condition lb.Condition
	since     time.Time // the condition is the same since then
	due       bool      // may differ from what the Service shows
	written   time.Time // last write
	quiet     time.Duration
}

// New returns a Reporter that reports nothing.
func New(opts Options) *Reporter {
	r := &Reporter{opts: opts, wanted: map[lb.Key]*item{}}
	r.runner = loop.New(func(ctx context.Context) (time.Duration, error) { return r.apply(ctx, time.Now()), nil },
		loop.Options{Gap: 50 * time.Millisecond})
	return r
}

// Set says what this node reports of a Service: a condition, or nil when another node does. Saying
// the same again makes sure that the Service still shows it.
func (r *Reporter) Set(key lb.Key, condition *lb.Condition) {
	r.set(time.Now(), key, condition)
	r.runner.Poke()
}

func (r *Reporter) set(now time.Time, key lb.Key, condition *lb.Condition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if condition == nil {
		delete(r.wanted, key)
		return
	}
	i := r.wanted[key]
	if i == nil {
		i = &item{since: now, condition: *condition}
		r.wanted[key] = i
	}
	if i.condition != *condition {
		i.condition, i.since = *condition, now
	}
	i.due = true
}

// Run writes until ctx ends.
func (r *Reporter) Run(ctx context.Context) error { return r.runner.Run(ctx) }

// apply writes what is due and returns when there is more to do; 0 means not before something is
// set.
func (r *Reporter) apply(ctx context.Context, now time.Time) time.Duration {
	if now.Before(r.retryAt) {
		return r.retryAt.Sub(now)
	}
	var errs []error
	var next time.Time
	for _, key := range r.keys() {
		if ctx.Err() != nil {
			return 0
		}
		condition, at, ok := r.next(key)
		if !ok {
			continue
		}
		if at.After(now) {
			if next.IsZero() || at.Before(next) {
				next = at
			}
			continue
		}
		if err := r.write(ctx, now, key, condition); err != nil {
			errs = append(errs, fmt.Errorf("report on %s: %w", key, err))
			if errors.Is(err, context.DeadlineExceeded) {
				break // the API server is away; the others would wait as long
			}
		}
	}
	if err := errors.Join(errs...); err != nil && ctx.Err() == nil {
		r.fail(now, err)
		return r.retry
	}
	r.retry = 0
	if next.IsZero() {
		return 0
	}
	return max(next.Sub(now), time.Millisecond)
}

// fail puts off all writes for a while. A row of failures is logged once.
func (r *Reporter) fail(now time.Time, err error) {
	level := slog.LevelDebug
	if r.retry == 0 {
		level = slog.LevelWarn
	}
	r.opts.Log.Log(context.Background(), level,
		"cannot write whether addresses are announced; trying again until it works", "error", err)
	r.retry = min(max(2*r.retry, minRetry), maxRetry)
	r.retryAt = now.Add(r.retry)
}

func (r *Reporter) keys() []lb.Key {
	r.mu.Lock()
	defer r.mu.Unlock()
	var keys []lb.Key
	for key, i := range r.wanted {
		if i.due {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, lb.Key.Compare)
	return keys
}

// next returns what is to be written to a Service and when; ok is false when there is nothing to
// do.
func (r *Reporter) next(key lb.Key) (c lb.Condition, at time.Time, ok bool) {
	service, exists := r.opts.Service(key)
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.wanted[key]
	if i == nil || !i.due {
		return c, at, false
	}
	if !exists || shows(service, i.condition) {
		i.due = false
		return c, at, false
	}
	at = i.since.Add(settleBad)
	if i.condition.Status {
		at = i.since.Add(settleGood)
	}
	if free := i.written.Add(i.quiet); free.After(at) {
		at = free
	}
	return i.condition, at, true
}

func (r *Reporter) write(ctx context.Context, now time.Time, key lb.Key, condition lb.Condition) error {
	service, exists := r.opts.Service(key)
	if !exists {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	wrote, err := r.opts.Write(ctx, service, condition, lb.Serving(condition))
	if err != nil {
		return err
	}
	r.mu.Lock()
	if i := r.wanted[key]; i != nil {
		if i.condition == condition {
			i.due = false
		}
		if wrote {
			if now.Sub(i.written) > calm {
				i.quiet = 0
			}
			i.written, i.quiet = now, min(max(2*i.quiet, quiet), maxQuiet)
		}
	}
	r.mu.Unlock()
	if before := find(service, condition.Type); wrote && worthAnEvent(before, condition) {
		r.opts.Event(service, condition.Status && condition.Reason != lb.ReasonContested, condition.Reason, condition.Message)
	}
	return nil
}

// worthAnEvent leaves out that a reason has found other words.
func worthAnEvent(before *lb.Condition, now lb.Condition) bool {
	if before == nil {
		return true
	}
	return before.Status != now.Status || before.Reason != now.Reason || now.Status && before.Message != now.Message
}

// shows tells whether a Service shows a condition, and the one that goes with it.
func shows(s lb.Service, c lb.Condition) bool {
	return slices.Contains(s.Conditions, c) && slices.Contains(s.Conditions, lb.Serving(c))
}

func find(s lb.Service, conditionType string) *lb.Condition {
	i := slices.IndexFunc(s.Conditions, func(c lb.Condition) bool { return c.Type == conditionType })
	if i < 0 {
		return nil
	}
	return &s.Conditions[i]
}
