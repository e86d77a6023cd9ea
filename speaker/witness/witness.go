// Package witness is the actor by which speakers that a partition has separated hear of one
// another: those that see a majority renew a Lease while they miss another speaker, and those that
// do not see one read it.
package witness

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the actor.
const (
	// tellEvery is how often the Lease is renewed, as often as those of leader elections are; what is
	// news is told after tellSoon.
	tellEvery = 2 * time.Second
	tellSoon  = 500 * time.Millisecond
	// stepIn is how long after a renewal is due the next in rank renews the Lease instead of the
	// first, which may not reach the API server.
	stepIn = time.Second
	// heedEvery is how often the Lease is read, and lasts how long a renewal counts: the third in rank
	// may notice it tellEvery late, and steps in tellEvery + 2*stepIn after that. Until it is read, those
	// who are cut off must not take the pause for the end of the majority.
	heedEvery = time.Second
	lasts     = 4 * tellEvery
	// timeout bounds one request.
	timeout = 2 * time.Second
)

// Desired is what the node makes of the Lease. The zero value leaves it alone.
type Desired struct {
	// Tell has the node renew the Lease, unless one before it in rank does: 0 is the first.
	Tell bool
	Rank int
	Says lb.Witness
	// Heed has it read the Lease.
	Heed bool
}

// Lease is where witnesses write.
type Lease interface {
	Read(context.Context) (said lb.Witness, version string, err error)
	Write(ctx context.Context, says lb.Witness, version string) (newVersion string, err error)
}

// Options of an Actor.
type Options struct {
	Lease Lease
	Log   *slog.Logger
	// Changed is called after Outcome differs, from the actor's goroutine.
	Changed func()
}

// Actor keeps the Lease.
type Actor struct {
	opts   Options
	runner *loop.Runner

	mu      sync.Mutex
	desired Desired
	outcome lb.Witness
	fresh   bool
	asked   time.Time     // when the last request began that was answered
	took    time.Duration // how long that one took

	// Only apply touches these.
	state    State
	failures loop.Failures
}

var _ actor.Setter[Desired] = (*Actor)(nil)

// New returns an Actor that leaves the Lease alone.
func New(opts Options) *Actor {
	a := &Actor{opts: opts}
	a.runner = loop.New(func(ctx context.Context) (time.Duration, error) { return a.apply(ctx, time.Now()), nil },
		loop.Options{Gap: 100 * time.Millisecond})
	return a
}

// Set replaces what the node makes of the Lease.
func (a *Actor) Set(d Desired) {
	a.mu.Lock()
	same := a.desired.Tell == d.Tell && a.desired.Rank == d.Rank && a.desired.Heed == d.Heed && a.desired.Says.Same(d.Says)
	a.desired = d
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

// Outcome returns what those say that see a majority, if they have said it lately and the node is
// to heed it.
func (a *Actor) Outcome() (said lb.Witness, fresh bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.outcome, a.fresh
}

// Contact returns when the last request began that the API server answered, and how long that took.
func (a *Actor) Contact() (asked time.Time, took time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.asked, a.took
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run keeps the Lease until ctx ends.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

// apply does what is due and returns when there is more; 0 means not before something is set.
func (a *Actor) apply(ctx context.Context, now time.Time) time.Duration {
	a.mu.Lock()
	d := a.desired
	a.mu.Unlock()
	var next time.Duration
	switch {
	case d.Heed:
		err := a.read(ctx, now, d)
		a.report(err)
		a.note(now, err)
		next = heedEvery
	case d.Tell:
		next = a.tell(ctx, now, d)
	default:
		a.state.Rest()
	}
	a.publish(a.state.Outcome(now, d))
	return next
}

// read notes what the Lease says.
func (a *Actor) read(ctx context.Context, now time.Time, d Desired) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	said, version, err := a.opts.Lease.Read(ctx)
	if err != nil {
		return err
	}
	a.state.Saw(now, d, said, version)
	return nil
}

// tell renews the Lease when it is this node's turn, and returns when to look again.
func (a *Actor) tell(ctx context.Context, now time.Time, d Desired) time.Duration {
	if wait := a.state.Due(now, d); wait > 0 {
		return wait
	}
	err := a.read(ctx, now, d)
	a.note(now, err)
	if err != nil {
		a.report(err)
		return tellEvery
	}
	if wait := a.state.Turn(now, d); wait > 0 {
		return min(wait, tellEvery)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	says := d.Says
	says.At = now
	version, err := a.opts.Lease.Write(ctx, says, a.state.Version())
	a.report(err)
	a.state.Tried(now)
	if err == nil {
		a.state.Wrote(now, says, version)
	}
	return tellEvery
}

// note takes in how a request has ended that began at a time.
func (a *Actor) note(began time.Time, err error) {
	if err != nil {
		return
	}
	a.mu.Lock()
	a.asked, a.took = began, time.Since(began)
	a.mu.Unlock()
	if a.opts.Changed != nil {
		a.opts.Changed()
	}
}

// report logs how an attempt to use the Lease has ended.
func (a *Actor) report(err error) {
	a.failures.Log(a.opts.Log, "cannot use the Lease by which the two sides of a partition hear of one another; retrying",
		"using the Lease for partitions again", err)
}

// publish makes known what was read.
func (a *Actor) publish(said lb.Witness, fresh bool) {
	a.mu.Lock()
	same := a.fresh == fresh && (!fresh || a.outcome.Same(said))
	a.fresh, a.outcome = fresh, said
	a.mu.Unlock()
	if !same && a.opts.Changed != nil {
		a.opts.Changed()
	}
}
