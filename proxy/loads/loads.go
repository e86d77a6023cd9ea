// Package loads counts the open connections that each backend has through this node, for Services
// whose scheduler chooses by that, and tells the counts at a bounded rate.
//
// The kernel's connection tracking says when a connection is assured and when it ends. So a flood of
// openings that nobody answers, or that come from forged addresses, changes no count. What is missed
// is made good by a listing of all connections. docs/design/counting.md has more.
package loads

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// The connections are listed when some may be unknown, as new destinations have come or events were
// lost, and every so often in any case: connections from before the watch may end without an event
// (nf_conntrack_events=2). A listing takes at most one part in listShare of the time.
const (
	listEvery  = time.Minute
	listAtOnce = time.Second
	listShare  = 50
)

// Source is the kernel's connection tracking.
type Source interface {
	// Each passes on what happens, and calls lost when something was missed. It returns when ctx ends.
	Each(ctx context.Context, each func(plan.Tracked), lost func()) error
	// Filter limits what Each passes on to some addresses, and to some ports at any address.
	Filter(addresses []netip.Addr, ports []uint16) error
	// List passes on all connections that are open.
	List(each func(plan.Tracked)) error
	// Close must not be called before Each has returned.
	Close()
}

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	Now func() time.Time
	// Open opens the source. It is open only while there is something to count.
	Open func() (Source, error)
	// Tell is told loads. It must not block.
	Tell func(map[lb.Key]plan.Load)
}

// Counts are what the actor has done so far.
type Counts struct {
	// Open are the connections that are counted now.
	Open int
	// Events are what the kernel has said of connections, Lost how often it had to leave something
	// out, Listings how often all connections were listed, and Loads how many were told.
	Events, Lost, Listings, Loads uint64
}

// Actor counts.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	heard  loop.Pulse // while it takes in what the kernel tells
	wanted actor.Inbox[lb.Key, plan.Service]

	mu     sync.Mutex
	tally  *tally
	counts Counts
	// unsure is set while there may be connections that are not known, or known ones that have ended.
	unsure bool

	// The rest belongs to the goroutine of the runner.
	pace pace
	// addresses and ports are where connections are counted.
	addresses []netip.Addr
	ports     []uint16
	watch     *watch
	listed    time.Time // when the last listing ended
	took      time.Duration
	failures  loop.Failures
}

// watch is an open source with the goroutine that reads it.
type watch struct {
	Source
	stop func()
	done chan struct{}
	err  error // why it has ended, once done is closed
	// addresses and ports are what it is limited to.
	addresses []netip.Addr
	ports     []uint16
}

var _ actor.Updater[lb.Key, plan.Service] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, tally: newTally()}
	a.runner = loop.New(a.step, loop.Options{})
	return a
}

// Begin says what the kernel is confirmed to have for all Services. It never blocks.
func (a *Actor) Begin(all map[lb.Key]plan.Service) {
	a.wanted.Begin(all)
	a.runner.Poke()
}

// Update says what the kernel is confirmed to have now for the Services that it names; a plan without
// ports stands for nothing. It never blocks.
func (a *Actor) Update(changes map[lb.Key]plan.Service) {
	a.wanted.Update(changes)
	a.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return max(a.runner.Busy(), a.heard.Busy()) }

// Counts returns what the actor has done so far.
func (a *Actor) Counts() Counts {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.Open = len(a.tally.open)
	return a.counts
}

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error {
	err := a.runner.Run(ctx)
	a.close()
	return err
}

// step takes in what has changed, lists connections when that is due, and tells the loads that are.
func (a *Actor) step(ctx context.Context) (again time.Duration, err error) {
	changes, ok := a.wanted.Take()
	if !ok {
		return 0, nil
	}
	err = a.follow(ctx, changes)
	a.failures.Log(a.deps.Log, "cannot count connections; schedulers that count go by the last counts",
		"counting connections again", err)
	if a.watch == nil {
		return 0, err
	}
	now := a.deps.Now()
	a.mu.Lock()
	loads, at := a.pace.due(a.tally, now)
	a.counts.Loads += uint64(len(loads))
	next := a.nextListing()
	a.mu.Unlock()
	if len(loads) > 0 {
		a.deps.Tell(loads)
	}
	if at.IsZero() || next.Before(at) {
		at = next
	}
	return max(at.Sub(now), time.Millisecond), err
}

// follow takes in changes, and has the source tell of what is to be counted.
func (a *Actor) follow(ctx context.Context, changes map[lb.Key]plan.Service) error {
	a.mu.Lock()
	for key, s := range changes {
		if a.tally.set(key, s) {
			a.unsure = true
		}
	}
	if len(changes) > 0 {
		a.addresses, a.ports = a.tally.destinations()
	}
	a.mu.Unlock()
	if a.watch != nil {
		select {
		case <-a.watch.done:
			err := a.watch.err
			a.close()
			return err
		default:
		}
	}
	if len(a.addresses)+len(a.ports) == 0 {
		a.close()
		return nil
	}
	if a.watch == nil {
		if err := a.open(ctx); err != nil {
			return err
		}
	}
	if w := a.watch; !slices.Equal(w.addresses, a.addresses) || !slices.Equal(w.ports, a.ports) {
		if err := w.Filter(a.addresses, a.ports); err != nil {
			return err
		}
		w.addresses, w.ports = a.addresses, a.ports
	}
	return a.list()
}

// open opens the source and has a goroutine read it.
func (a *Actor) open(ctx context.Context) error {
	source, err := a.deps.Open()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	w := &watch{Source: source, stop: stop, done: make(chan struct{})}
	a.mu.Lock()
	a.unsure = true
	a.mu.Unlock()
	go func() {
		defer close(w.done)
		var reading reading
		each := func(c plan.Tracked) {
			a.take(c)
			if wait := reading.next(a.deps.Now()); wait > 0 {
				select {
				case <-ctx.Done():
				case <-time.After(wait):
				}
			}
		}
		if w.err = w.Each(ctx, each, a.lost); w.err == nil && ctx.Err() == nil {
			w.err = errors.New("the source has ended")
		}
		a.runner.Poke()
	}()
	a.watch = w
	return nil
}

// close closes the source, and forgets all connections.
func (a *Actor) close() {
	if a.watch == nil {
		return
	}
	a.watch.stop()
	<-a.watch.done
	a.watch.Close()
	a.watch = nil
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tally.clear()
}

func (a *Actor) take(c plan.Tracked) {
	defer a.heard.Begin()()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.Events++
	if a.tally.take(c) {
		a.runner.Poke()
	}
}

func (a *Actor) lost() {
	defer a.heard.Begin()()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.Lost++
	a.unsure = true
	a.runner.Poke()
}

// nextListing returns when connections are to be listed.
func (a *Actor) nextListing() time.Time {
	wait := listEvery
	if a.unsure {
		wait = listAtOnce
	}
	return a.listed.Add(max(wait, listShare*a.took))
}

// list lists all connections if that is due. What happens meanwhile waits in the source, so that no
// count misses it.
func (a *Actor) list() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	began := a.deps.Now()
	if began.Before(a.nextListing()) {
		return nil
	}
	a.unsure = false
	err := a.tally.renew(a.watch.List)
	if err != nil {
		a.unsure = true
	}
	a.counts.Listings++
	a.listed = a.deps.Now()
	a.took = a.listed.Sub(began)
	return err
}
