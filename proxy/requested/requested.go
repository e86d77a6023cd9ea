// Package requested writes into the condition AsRequested of Services which of their requests nodes do not follow.
package requested

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
	// maxWrites is how many requests there are at once, and maxOfNamespace how many for Services of one namespace: an
	// admission webhook may hang for those.
	maxWrites, maxOfNamespace = 4, 2
	// rest is how long a node does not write to a Service after a write, whatever became of it: who changes a Service,
	// or removes the condition, again and again shall not have all nodes write as often. It doubles with each failure
	// up to maxRest: what is refused is refused to all nodes.
	rest, maxRest = 10 * time.Second, 30 * time.Minute
)

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	Now func() time.Time
	// Write writes the condition of a Service.
	Write func(ctx context.Context, service lb.Key, write plan.ConditionWrite) error
	// Gone reports whether an error of Write says that there is no such Service any more.
	Gone func(error) bool
}

// Actor writes conditions.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	lanes  *loop.Lanes // by namespace

	mu     sync.Mutex
	wanted map[lb.Key]plan.ConditionWrite
	ended  []attempt

	// What follows only the step uses. since is when each write was first wanted, rests what follows the last one of a
	// Service.
	since    map[lb.Key]asked
	rests    map[lb.Key]pause
	writing  map[lb.Key]bool
	written  map[lb.Key]plan.ConditionWrite
	failures loop.Failures
}

// asked is what was wanted since a time.
type asked struct {
	write plan.ConditionWrite
	since time.Time
}

// pause is for how long a node does not write to a Service.
type pause struct {
	began time.Time
	lasts time.Duration
}

func (p pause) left(now time.Time) time.Duration { return p.lasts - now.Sub(p.began) }

// attempt is what became of a write.
type attempt struct {
	service lb.Key
	write   plan.ConditionWrite
	err     error
}

var _ actor.Setter[map[lb.Key]plan.ConditionWrite] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, lanes: loop.NewLanes(maxWrites, maxOfNamespace), since: map[lb.Key]asked{},
		rests: map[lb.Key]pause{}, writing: map[lb.Key]bool{}, written: map[lb.Key]plan.ConditionWrite{}}
	a.runner = loop.New(a.step, loop.Options{})
	return a
}

// Set says what is to be written. It never blocks, and keeps the map.
func (a *Actor) Set(wanted map[lb.Key]plan.ConditionWrite) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wanted = wanted
	a.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error {
	defer a.lanes.Wait()
	return a.runner.Run(ctx)
}

// step begins the writes whose time has come. One that hangs holds up none of another namespace.
func (a *Actor) step(ctx context.Context) (again time.Duration, err error) {
	a.mu.Lock()
	wanted, ended := a.wanted, a.ended
	a.ended = nil
	a.mu.Unlock()
	a.note(ctx, ended)
	now := a.deps.Now()
	maps.DeleteFunc(a.since, func(key lb.Key, was asked) bool { return wanted[key] != was.write })
	maps.DeleteFunc(a.written, func(key lb.Key, was plan.ConditionWrite) bool { return wanted[key] != was })
	maps.DeleteFunc(a.rests, func(key lb.Key, p pause) bool {
		_, ok := wanted[key]
		return !ok && p.left(now) <= 0
	})
	for key, write := range wanted {
		if a.writing[key] || a.written[key] == write {
			continue
		}
		if _, ok := a.since[key]; !ok {
			a.since[key] = asked{write, now}
		}
		if wait := max(write.Turn-now.Sub(a.since[key].since), a.rests[key].left(now)); wait > 0 {
			if again == 0 || wait < again {
				again = wait
			}
			continue
		}
		a.writing[key], a.rests[key] = true, pause{now, max(rest, a.rests[key].lasts)}
		a.lanes.Do(key.Namespace, func() error { return a.write(ctx, key, write) })
	}
	return again, nil
}

// note takes note of what became of writes.
func (a *Actor) note(ctx context.Context, ended []attempt) {
	var failed error
	for _, of := range ended {
		delete(a.writing, of.service)
		p := a.rests[of.service]
		switch {
		case errors.Is(of.err, errUnwanted):
			p.began = time.Time{}
		case of.err == nil || a.deps.Gone(of.err):
			p.lasts = rest
			a.written[of.service] = of.write // until the watch shows it
		default:
			p.lasts = min(2*p.lasts, maxRest)
			failed = of.err
		}
		a.rests[of.service] = p
	}
	if ctx.Err() == nil && len(ended) > 0 {
		a.failures.Log(a.deps.Log, "cannot write to Services that they are not served as requested; trying again",
			"writing to Services again", failed)
	}
}

// errUnwanted is for a write that is not wanted any more when it is its turn.
var errUnwanted = errors.New("not wanted any more")

// write writes, unless that waited until it was wanted no more, and has the step hear of it.
func (a *Actor) write(ctx context.Context, key lb.Key, write plan.ConditionWrite) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	a.mu.Lock()
	err := errUnwanted
	wanted := a.wanted[key] == write
	a.mu.Unlock()
	if wanted {
		err = a.deps.Write(ctx, key, write)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = append(a.ended, attempt{key, write, err})
	a.runner.Poke()
	if errors.Is(err, errUnwanted) || a.deps.Gone(err) {
		return nil
	}
	return err
}
