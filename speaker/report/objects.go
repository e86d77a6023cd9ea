package report

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of Objects.
const (
	// rewrite is how long a write may take to show before it is repeated.
	rewrite = 10 * time.Second
	// objectQuiet is the most that quiet grows to. It is short as people who try things look at these
	// objects, and each node writes a part of its own.
	objectQuiet = 4 * time.Second
	objectCalm  = 30 * time.Second
)

// Job is something to write into an object's status.
type Job struct {
	// Content identifies what Do writes: two jobs with the same content write the same.
	Content string
	Do      func(context.Context) error
}

// Objects writes into the status of objects that are not Services. It writes content once
// it has lasted, to one object not more often than once a second, and every few seconds if it keeps
// changing.
type Objects struct {
	log    *slog.Logger
	runner *loop.Runner

	mu     sync.Mutex
	wanted map[string]*task

	// Only apply touches these.
	written  map[string]writing
	retry    loop.Backoff
	retryAt  time.Time
	failures loop.Failures
}

var _ actor.Setter[map[string]Job] = (*Objects)(nil)

type task struct {
	Job
	since time.Time
}

// writing is what was last written to an object.
type writing struct {
	content string
	at      time.Time
	quiet   time.Duration
}

// NewObjects returns an Objects with nothing to write.
func NewObjects(log *slog.Logger) *Objects {
	o := &Objects{log: log, wanted: map[string]*task{}, written: map[string]writing{},
		retry: loop.Backoff{Min: minRetry, Max: maxRetry}}
	o.runner = loop.New(func(ctx context.Context) (time.Duration, error) { return o.apply(ctx, time.Now()), nil },
		loop.Options{Gap: 50 * time.Millisecond})
	return o
}

// Set says all that is to be written, by what names the part of the object that each job writes.
// What is not named any more is left as it is.
func (o *Objects) Set(jobs map[string]Job) {
	now := time.Now()
	o.mu.Lock()
	changed := false
	next := make(map[string]*task, len(jobs))
	for id, job := range jobs {
		t := o.wanted[id]
		if t == nil || t.Content != job.Content {
			t = &task{since: now}
			changed = true
		}
		t.Job = job
		next[id] = t
	}
	o.wanted = next
	o.mu.Unlock()
	if changed {
		o.runner.Poke()
	}
}

// Idle reports whether there is nothing left that Set has asked for.
func (o *Objects) Idle() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.wanted) == 0
}

// Busy returns for how long the actor has been at one thing.
func (o *Objects) Busy() time.Duration { return o.runner.Busy() }

// Run writes until ctx ends.
func (o *Objects) Run(ctx context.Context) error { return o.runner.Run(ctx) }

// apply writes what is due and returns when there is more to do; 0 means not before something is
// set.
func (o *Objects) apply(ctx context.Context, now time.Time) time.Duration {
	if now.Before(o.retryAt) {
		return o.retryAt.Sub(now)
	}
	o.mu.Lock()
	tasks := make(map[string]task, len(o.wanted))
	for id, t := range o.wanted {
		tasks[id] = *t
	}
	o.mu.Unlock()
	maps.DeleteFunc(o.written, func(id string, w writing) bool {
		_, wanted := tasks[id]
		return !wanted &&
			now.Sub(w.at) > objectCalm
	})
	var next time.Duration
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(tasks)) {
		if wait := o.due(id, tasks[id]).Sub(now); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			continue
		}
		if err := o.write(ctx, now, id, tasks[id].Job); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", id, err))
			if errors.Is(err, context.DeadlineExceeded) {
				break // the API server is away; the others would wait as long
			}
		}
		if next == 0 || rewrite < next {
			next = rewrite
		}
	}
	if ctx.Err() != nil {
		return 0
	}
	err := errors.Join(errs...)
	o.failures.Log(o.log, "cannot write the status of objects; trying again", "writing the status of objects again", err)
	if err != nil {
		wait := o.retry.Next()
		o.retryAt = now.Add(wait)
		return wait
	}
	o.retry.Reset()
	return next
}

// due returns when a task may be written.
func (o *Objects) due(id string, t task) time.Time {
	at := t.since.Add(settleGood)
	before, ok := o.written[id]
	if !ok {
		return at
	}
	wait := before.quiet
	if before.content == t.Content {
		wait = max(wait, rewrite) // it should show by now
	}
	if free := before.at.Add(wait); free.After(at) {
		at = free
	}
	return at
}

func (o *Objects) write(ctx context.Context, now time.Time, id string, job Job) error {
	defer loop.Progress(ctx)
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if err := job.Do(ctx); err != nil {
		return err
	}
	before := o.written[id]
	if now.Sub(before.at) > objectCalm {
		before.quiet = 0
	}
	o.written[id] = writing{content: job.Content, at: now, quiet: min(max(2*before.quiet, quiet), objectQuiet)}
	return nil
}
