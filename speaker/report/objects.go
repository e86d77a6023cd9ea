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
// changing. A write that hangs or fails holds up none to another object.
type Objects struct {
	log    *slog.Logger
	runner *loop.Runner
	lanes  *loop.Lanes // by object

	mu       sync.Mutex
	wanted   map[string]*task
	asked    map[string]bool // a write waits for its turn, or is under way
	written  map[string]writing
	rests    rests // by object
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
	o := &Objects{log: log, lanes: loop.NewLanes(maxWrites, 1), wanted: map[string]*task{}, asked: map[string]bool{},
		written: map[string]writing{}, rests: rests{}}
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
func (o *Objects) Run(ctx context.Context) error {
	defer o.lanes.Wait()
	return o.runner.Run(ctx)
}

// apply has written what is due and returns when there is more to do; 0 means not before something is set, or the end
// of a write.
func (o *Objects) apply(ctx context.Context, now time.Time) (next time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.forget(now)
	for _, id := range slices.Sorted(maps.Keys(o.wanted)) {
		if o.asked[id] {
			continue
		}
		if wait := o.due(id).Sub(now); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			continue
		}
		o.asked[id] = true
		o.lanes.Do(id, func() error { return o.turn(ctx, id) })
	}
	return next
}

// forget forgets what was written or has failed long ago.
func (o *Objects) forget(now time.Time) {
	o.rests.forget(now)
	maps.DeleteFunc(o.written, func(id string, w writing) bool {
		return o.wanted[id] == nil && now.Sub(w.at) > objectCalm
	})
}

// due returns when what is wanted of an object may be written.
func (o *Objects) due(id string) time.Time {
	t := o.wanted[id]
	at := t.since.Add(settleGood)
	if until := o.rests.until(id); until.After(at) {
		at = until
	}
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

// turn writes to an object what is wanted by now. Its error is for the object's lane.
func (o *Objects) turn(ctx context.Context, id string) error {
	job, err := o.dueJob(id), errUnwanted
	if job.Do != nil && ctx.Err() == nil {
		err = job.write(ctx)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.runner.Poke()
	delete(o.asked, id)
	now := time.Now()
	failed := o.rests.ended(id, now, err)
	switch {
	case errors.Is(err, errUnwanted):
		return failed
	case err != nil:
		err = fmt.Errorf("%s: %w", id, err)
	default:
		o.written[id] = o.written[id].followedBy(job.Content, now)
	}
	if err != nil || len(o.rests) == 0 {
		o.failures.Log(o.log, "cannot write the status of objects; trying again", "writing the status of objects again", err)
	}
	return failed
}

// dueJob returns what is to be written to an object now; without Do, nothing.
func (o *Objects) dueJob(id string) (job Job) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t := o.wanted[id]; t != nil && !time.Now().Before(o.due(id)) {
		job = t.Job
	}
	return job
}

func (j Job) write(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return j.Do(ctx)
}

// followedBy returns what was last written after one more write.
func (w writing) followedBy(content string, now time.Time) writing {
	if now.Sub(w.at) > objectCalm {
		w.quiet = 0
	}
	return writing{content: content, at: now, quiet: min(max(2*w.quiet, quiet), objectQuiet)}
}
