// Package readiness opens the readiness gates of pods.
package readiness

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// writeTimeout bounds one request.
const writeTimeout = 10 * time.Second

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

	mu     sync.Mutex
	wanted map[lb.Key]Gate

	// written are the pods whose gates were opened, while they are wanted; only the step uses it.
	written  map[lb.Key]string
	failures loop.Failures
}

var _ actor.Setter[map[lb.Key]Gate] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, written: map[lb.Key]string{}}
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
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

// step opens each gate once. One that fails holds up no other.
func (a *Actor) step(ctx context.Context) (time.Duration, error) {
	a.mu.Lock()
	wanted := a.wanted
	a.mu.Unlock()
	for pod := range a.written {
		if _, ok := wanted[pod]; !ok {
			delete(a.written, pod)
		}
	}
	var failed error
	for pod, gate := range wanted {
		if a.written[pod] == gate.UID {
			continue
		}
		loop.Progress(ctx)
		err := a.write(ctx, pod, gate)
		switch {
		case err == nil:
			a.deps.Opened(gate.Reason)
		case !a.deps.Gone(err):
			failed = err
			continue
		}
		a.written[pod] = gate.UID
	}
	if ctx.Err() == nil {
		a.failures.Log(a.deps.Log, "cannot open readiness gates; trying again", "opening readiness gates again", failed)
	}
	return 0, failed
}

func (a *Actor) write(ctx context.Context, pod lb.Key, gate Gate) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return a.deps.Write(ctx, pod, gate)
}
