// Package report is the actor that writes to Services whether their addresses are announced, and
// from where: the conditions Announced and Serving, the same as data in an annotation, and an Event
// when it changes. It writes a change once it has lasted, and never the same twice.
package report

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the actor.
const (
	// settleGood and settleBad are how long a report must stay the same, whatever its words, before it is
	// written: an owner that changes twice in a moment is written once, and a gap while one hands over to
	// another is not written at all.
	settleGood = 300 * time.Millisecond
	settleBad  = 2 * time.Second
	// quiet is the least time between two writes to one Service; it doubles with each up to maxQuiet,
	// and starts anew after calm: two nodes that disagree, as in a partition, must not write against
	// each other all the time.
	quiet    = time.Second
	maxQuiet = time.Minute
	calm     = 5 * time.Minute
	// maxOwnQuiet is the most while the Service still shows what this node wrote last: nobody disagrees,
	// and the longer it waits, the longer the Service says what is so no more. It is not for other words:
	// a device that makes up MAC addresses must not have thousands of Services written all the time.
	maxOwnQuiet = 8 * time.Second
	// writeTimeout bounds one write.
	writeTimeout = 10 * time.Second
	// maxWrites is how many writes there are at once, and maxOfNamespace how many for Services of one namespace: an
	// admission webhook may hang for those.
	maxWrites, maxOfNamespace = 4, 1
	// minRetry and maxRetry are the waits after a failure, whatever else there is to write in that namespace. Services
	// say what is so no more for as long as the last of them once the API server is back.
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
	lanes  *loop.Lanes // by namespace

	mu    sync.Mutex
	asked map[lb.Key]lb.AnnouncedStatus // what waits for its turn to be written, and is still wanted
	ended []attempt
	rests rests // by namespace

	// Only apply touches these.
	wanted   map[lb.Key]*item
	failing  map[lb.Key]time.Time // when the last write of a Service failed, but for refusals
	failures loop.Failures
}

var _ actor.Updater[lb.Key, *lb.AnnouncedStatus] = (*Reporter)(nil)

// item is what shall be written to one Service.
type item struct {
	status  lb.AnnouncedStatus
	since   time.Time // the status is the same since then, whatever its words
	due     bool      // may differ from what the Service shows
	writing bool      // a write waits for its turn, or is under way
	written time.Time // last write
	wrote   *lb.AnnouncedStatus
	quiet   time.Duration
	// failures are refusals of this Service.
	failures loop.Failures
}

// New returns a Reporter that reports nothing.
func New(opts Options) *Reporter {
	r := &Reporter{opts: opts, lanes: loop.NewLanes(maxWrites, maxOfNamespace), asked: map[lb.Key]lb.AnnouncedStatus{},
		rests: rests{}, wanted: map[lb.Key]*item{}, failing: map[lb.Key]time.Time{}}
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
	r.withdraw(changes)
	r.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (r *Reporter) Busy() time.Duration { return r.runner.Busy() }

// Run writes until ctx ends.
func (r *Reporter) Run(ctx context.Context) error {
	defer r.lanes.Wait()
	return r.runner.Run(ctx)
}

// apply has written what is due and returns when there is more to do; 0 means not before the next update, or the end of
// a write. A write that hangs holds up none of another namespace.
func (r *Reporter) apply(ctx context.Context) time.Duration {
	r.note()
	r.take()
	now := time.Now()
	r.forgetRests(now)
	var next time.Time
	var ready []lb.Key
	for _, key := range r.due() {
		at, ok := r.next(key)
		switch {
		case !ok:
		case !at.After(now):
			ready = append(ready, key)
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	r.ask(ctx, ready)
	if ctx.Err() != nil || next.IsZero() {
		return 0
	}
	return max(time.Until(next), time.Millisecond)
}

// take takes in what came since the last time, and returns it.
func (r *Reporter) take() map[lb.Key]*lb.AnnouncedStatus {
	changes, _ := r.inbox.Take()
	for key, status := range changes {
		r.set(time.Now(), key, status)
	}
	return changes
}

// due returns the Services that may have to be written, in order; those whose last write failed come last, or one that
// hangs would always hold up those behind it in its namespace.
func (r *Reporter) due() []lb.Key {
	var keys []lb.Key
	for key, i := range r.wanted {
		if i.due && !i.writing {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b lb.Key) int {
		return cmp.Or(r.failing[a].Compare(r.failing[b]), a.Compare(b))
	})
	return keys
}

// set notes what is wanted of one Service.
func (r *Reporter) set(now time.Time, key lb.Key, status *lb.AnnouncedStatus) {
	if status == nil {
		delete(r.wanted, key)
		delete(r.failing, key)
		return
	}
	i := r.wanted[key]
	if i == nil {
		i = &item{since: now, status: *status}
		r.wanted[key] = i
	}
	if !alike(i.status, *status) {
		i.since = now
	}
	i.status, i.due = *status, true
}

// next returns when a Service is to be written; ok is false when there is nothing to do.
func (r *Reporter) next(key lb.Key) (at time.Time, ok bool) {
	i := r.wanted[key]
	service, exists := r.opts.Service(key)
	if !exists || i.status.ShownBy(service) {
		i.due = false
		delete(r.failing, key)
		return at, false
	}
	at = i.since.Add(settleBad)
	if i.status.Condition.Status {
		at = i.since.Add(settleGood)
	}
	wait := i.quiet
	if i.wrote != nil && i.wrote.ShownBy(service) && !alike(*i.wrote, i.status) {
		wait = min(wait, maxOwnQuiet)
	}
	for _, free := range []time.Time{i.written.Add(wait), r.restsUntil(key.Namespace)} {
		if free.After(at) {
			at = free
		}
	}
	return at, true
}

// pause lets some time pass after a write before the next one.
func (i *item) pause(now time.Time) {
	if now.Sub(i.written) > calm {
		i.quiet = 0
	}
	i.written, i.quiet = now, min(max(2*i.quiet, quiet), maxQuiet)
}

// alike reports whether two statuses say the same, if in other words.
func alike(a, b lb.AnnouncedStatus) bool {
	a.Condition.Message, b.Condition.Message = "", ""
	return a == b
}

// worthAnEvent leaves out that a reason has found other words.
func worthAnEvent(s lb.Service, now lb.AnnouncedStatus) bool {
	before, c := find(s, now.Condition.Type), now.Condition
	switch {
	case before == nil || before.Status != c.Status || before.Reason != c.Reason:
		return true
	case c.Reason == lb.ReasonContested: // a device may make up MAC addresses
		return s.Announcements != now.Announcements
	}
	return c.Status && before.Message != c.Message
}

func find(s lb.Service, conditionType string) *lb.Condition {
	i := slices.IndexFunc(s.Conditions, func(c lb.Condition) bool { return c.Type == conditionType })
	if i < 0 {
		return nil
	}
	return &s.Conditions[i]
}
