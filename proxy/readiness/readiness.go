// Package readiness opens the readiness gates of pods.
package readiness

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const (
	// writeTimeout bounds one request.
	writeTimeout = 10 * time.Second
	// maxWrites is how many requests there are at once, and maxOfNamespace how many for pods of one namespace: an
	// admission webhook may hang for those.
	maxWrites, maxOfNamespace = 16, 4
	// A gate that could not be opened is tried again after minRetry, up to maxRetry.
	minRetry, maxRetry = 100 * time.Millisecond, 10 * time.Second
)

// Gate is a gate that shall be open.
type Gate struct {
	UID string // of the pod
	plan.Opening
}

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	// Write opens the gate of a pod.
	Write func(ctx context.Context, pod lb.Key, gate Gate) error
	// Gone reports whether an error of Write says that there is no such pod any more.
	Gone func(error) bool
	// Opened counts gates, by the reason.
	Opened func(lb.Reason)
}

// Actor opens gates.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	lanes  *loop.Lanes // by namespace

	mu     sync.Mutex
	wanted map[lb.Key]Gate
	ended  []attempt

	// What follows only the step uses. written are the pods whose gates were opened, while they are wanted, and writing
	// those of which a request is under way.
	written  map[lb.Key]string
	writing  map[lb.Key]bool
	retries  map[lb.Key]*retry
	failures loop.Failures
}

// attempt is what became of a request.
type attempt struct {
	pod  lb.Key
	gate Gate
	err  error
}

// retry is when a gate that could not be opened is tried again.
type retry struct {
	uid     string
	backoff loop.Backoff
	at      time.Time
}

var _ actor.Setter[map[lb.Key]Gate] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, lanes: loop.NewLanes(maxWrites, maxOfNamespace), written: map[lb.Key]string{},
		writing: map[lb.Key]bool{}, retries: map[lb.Key]*retry{}}
	a.runner = loop.New(a.step, loop.Options{})
	return a
}

// Set says which gates shall be open. It never blocks. What it has said before does not have the actor try again
// sooner what has failed.
func (a *Actor) Set(wanted map[lb.Key]Gate) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !maps.Equal(a.wanted, wanted) {
		a.wanted = wanted
		a.runner.Poke()
	}
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error {
	defer a.lanes.Wait()
	return a.runner.Run(ctx)
}

// step has each gate opened once. One that fails, or hangs, holds up none of another namespace.
func (a *Actor) step(ctx context.Context) (again time.Duration, err error) {
	a.mu.Lock()
	wanted, ended := a.wanted, a.ended
	a.ended = nil
	a.mu.Unlock()
	var failed error
	for _, attempt := range ended {
		delete(a.writing, attempt.pod)
		if errors.Is(attempt.err, errUnwanted) {
			continue
		}
		if err := a.note(attempt); err != nil {
			failed = err
		}
	}
	isOther := func(pod lb.Key, uid string) bool { return wanted[pod].UID != uid }
	maps.DeleteFunc(a.written, isOther)
	maps.DeleteFunc(a.retries, func(pod lb.Key, r *retry) bool { return isOther(pod, r.uid) })
	if ctx.Err() == nil && (failed != nil || len(a.retries) == 0) {
		a.failures.Log(a.deps.Log, "cannot open readiness gates; trying again", "opening readiness gates again", failed)
	}
	for pod, gate := range wanted {
		if a.written[pod] == gate.UID || a.writing[pod] {
			continue
		}
		if r := a.retries[pod]; r != nil {
			if wait := time.Until(r.at); wait > 0 {
				if again == 0 || wait < again {
					again = wait
				}
				continue
			}
		}
		a.writing[pod] = true
		a.lanes.Do(pod.Namespace, func() error { return a.open(ctx, pod, gate) })
	}
	return again, nil
}

// note takes note of what became of a request, and returns the error if it is to be tried again.
func (a *Actor) note(of attempt) error {
	switch {
	case of.err == nil:
		a.deps.Opened(of.gate.Reason)
	case !a.deps.Gone(of.err):
		r := a.retries[of.pod]
		if r == nil || r.uid != of.gate.UID {
			r = &retry{uid: of.gate.UID, backoff: loop.Backoff{Min: minRetry, Max: maxRetry}}
			a.retries[of.pod] = r
		}
		r.at = time.Now().Add(r.backoff.Next())
		return of.err
	}
	delete(a.retries, of.pod)
	a.written[of.pod] = of.gate.UID
	return nil
}

// errUnwanted is for a gate that shall not be open any more when it is its turn.
var errUnwanted = errors.New("not wanted any more")

// open opens a gate, unless it waited for that until it was wanted no more, and has the step hear of it.
func (a *Actor) open(ctx context.Context, pod lb.Key, gate Gate) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	a.mu.Lock()
	err := errUnwanted
	wanted := a.wanted[pod].UID == gate.UID
	a.mu.Unlock()
	if wanted {
		err = a.deps.Write(ctx, pod, gate)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = append(a.ended, attempt{pod, gate, err})
	a.runner.Poke()
	if a.deps.Gone(err) {
		return nil
	}
	return err
}
