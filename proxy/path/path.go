// Package path knows to which endpoints the kernel of this node has a way: a route that is not the
// default one, over an interface with a carrier, with forwarding on, and room for connections. The
// kernel's own lookup decides, over all tables and rules. It is asked about the endpoints of
// Services, once and again where a change may concern them.
package path

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Times of the actor.
const (
	// settle is how long after a message about an interface the kernel may still take its routes away:
	// it says so before it does, and no message says which. Its routes are looked up at once, after soon,
	// and then after pauses that double, up to settle.
	settle = 20 * time.Millisecond
	soon   = time.Millisecond
	// resync looks everything up again, as some changes have no message.
	resync = time.Minute
	// every is how often the table of connections is looked at, of which the kernel tells nothing.
	every = time.Second
)

// maxChanges bounds the changes that wait; more of them count as a change of everything.
const maxChanges = 4096

// How many targets one step looks up at most: part of those that messages name, part of those that wait, and partOfAll
// of a look at all, or part in a hurry. A look takes some 20 µs.
const (
	part      = 1024
	partOfAll = 256
)

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	Now func() time.Time
	// Node is the name of this node, Addresses returns those of its Node object.
	Node      string
	Addresses func() []netip.Addr
	// Look returns the kernel's route to an address.
	Look func(netip.Addr) (links.Way, error)
	// Watch calls changed for each batch of changes, and with All at first, until ctx ends or it fails.
	Watch func(ctx context.Context, changed func([]links.RouteChange)) error
	// Interfaces are those of the node, if they are known.
	Interfaces func() ([]lb.Interface, bool)
	// Conntrack returns how many connections the kernel's table has, and for how many there is room; 0 if
	// that is unknown.
	Conntrack func() (count, most int)
	// DefaultRoute has the default route count as a way to pods.
	DefaultRoute bool
	// Changed is called when Take may return something. It must not block.
	Changed func()
}

// Actor keeps what the kernel reaches. It is told the endpoints of each Service; none for one that
// is gone.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	heard  loop.Pulse // while it takes in what the kernel tells
	inbox  actor.Inbox[lb.Key, []plan.Target]

	mu      sync.Mutex
	changes []links.RouteChange
	news    News
	known   bool

	// What follows belongs to the step.
	entries map[plan.Target]*entry
	of      map[lb.Key][]plan.Target
	sorted  []plan.Target // by address; nil if entries came or went since
	// waiting are those that are new, and what messages name beyond a part.
	waiting map[plan.Target]bool
	// round is what a look at all has left, each once, hurried if messages were lost. What it looks up until unsettled
	// is looked up once more.
	round     []*entry
	hurried   bool
	unsettled time.Time
	// begun is set once the first endpoints are known, ready once all of these were looked up: first are left.
	begun, ready bool
	first        int
	settling     map[plan.Target]bool
	settled      time.Time     // when settling is due next
	pause        time.Duration // before that
	held         map[plan.Target]bool
	retry        map[plan.Target]bool
	retried      time.Time
	synced       time.Time
	looked       time.Time // at the table of connections
	table        table
	view         view
	off          *lb.Refusal // as told
	failures     loop.Failures
}

// News is what has changed since the last Take.
type News struct {
	// Lost says for endpoints why the kernel does not reach them; nil where it does again.
	Lost plan.Lost
	// Services are those that have such endpoints.
	Services map[lb.Key]bool
	// Off says why the kernel delivers nothing at all; nil if it does.
	Off *lb.Refusal
}

// entry is an endpoint's address, as one or the other kind of target: what a Service says of an address does not
// concern the others that have it.
type entry struct {
	target  plan.Target
	users   map[lb.Key]struct{} // thousands may share a pod
	way     links.Way
	known   bool // way
	inRound bool
	flap    flap
	told    *lb.Refusal
}

var _ actor.Updater[lb.Key, []plan.Target] = (*Actor)(nil)

// New returns an Actor. Run starts it.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, entries: map[plan.Target]*entry{}, of: map[lb.Key][]plan.Target{},
		waiting: map[plan.Target]bool{}, settling: map[plan.Target]bool{}, held: map[plan.Target]bool{},
		retry: map[plan.Target]bool{}}
	a.runner = loop.New(a.step, loop.Options{Gap: soon, Rest: 1, MaxRest: settle, MaxBackoff: time.Second})
	return a
}

// Begin says the endpoints of all Services. It never blocks.
func (a *Actor) Begin(all map[lb.Key][]plan.Target) {
	a.inbox.Begin(all)
	a.runner.Poke()
}

// Update says the endpoints of the named Services. It never blocks.
func (a *Actor) Update(changes map[lb.Key][]plan.Target) {
	a.inbox.Update(changes)
	a.runner.Poke()
}

// Poke says that the interfaces have changed.
func (a *Actor) Poke() { a.runner.Poke() }

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return max(a.runner.Busy(), a.heard.Busy()) }

// Take returns what has changed since it was last called; known is false before everything was
// looked up for the first time.
func (a *Actor) Take() (news News, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	news = a.news
	a.news = News{Off: news.Off}
	return news, a.known
}

// Run looks until ctx ends.
func (a *Actor) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { return a.runner.Run(ctx) })
	group.Go(func() error {
		var failures loop.Failures
		return loop.Retry(ctx, loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second},
			func(ctx context.Context) (worked bool) {
				err := a.deps.Watch(ctx, func(changes []links.RouteChange) {
					worked = true
					a.note(changes)
				})
				if ctx.Err() == nil {
					failures.Log(a.deps.Log, "cannot watch routes; trying again", "watching routes again", err)
				}
				return worked
			})
	})
	return group.Wait()
}

func (a *Actor) note(changes []links.RouteChange) {
	defer a.heard.Begin()()
	a.mu.Lock()
	if a.changes = append(a.changes, changes...); len(a.changes) > maxChanges {
		a.changes = []links.RouteChange{{All: true}}
	}
	a.mu.Unlock()
	a.runner.Poke()
}

// step looks up a part of what is new or may have changed, and tells what that means.
func (a *Actor) step(ctx context.Context) (time.Duration, error) {
	now, named := a.deps.Now(), map[plan.Target]bool{}
	begun := a.track(a.waiting)
	a.concerned(now, named)
	if begun && !a.begun { // what comes later puts off none of these
		a.again()
		clear(a.waiting)
		a.begun, a.first = true, len(a.round)
	}
	due := a.part(now, named)
	if err := a.look(ctx, due); err != nil || len(a.retry) == 0 {
		a.failures.Log(a.deps.Log, "cannot look up routes; what was known stays", "looked up routes again", err)
	}
	off := a.full(now)
	if a.begun && !a.ready && a.first == 0 {
		a.ready = true
		for t := range a.entries {
			due[t] = true
		}
	}
	if a.ready {
		a.judge(ctx, now, due, off)
	}
	return a.next(now), nil
}

// track takes in which endpoints there are, and adds new ones to what is due. It reports whether
// they are known.
func (a *Actor) track(due map[plan.Target]bool) (begun bool) {
	changes, ok := a.inbox.Take()
	for key, targets := range changes {
		named := make(map[plan.Target]bool, len(targets))
		for _, t := range targets { // first, as most of them are those of before
			e := a.entries[t]
			if e == nil {
				e = &entry{target: t, users: map[lb.Key]struct{}{}}
				a.entries[t], a.sorted = e, nil
				due[t] = true
			}
			named[t], e.users[key] = true, struct{}{}
		}
		for _, t := range a.of[key] {
			if named[t] {
				continue
			}
			e := a.entries[t]
			if delete(e.users, key); len(e.users) == 0 {
				a.forget(t)
			}
		}
		if a.of[key] = targets; len(targets) == 0 {
			delete(a.of, key)
		}
	}
	return ok
}

// forget drops what is remembered of a target that no Service has.
func (a *Actor) forget(t plan.Target) {
	if a.entries[t].told != nil {
		a.tell(plan.Lost{t: nil}, map[lb.Key]bool{}, a.off)
	}
	delete(a.entries, t)
	a.sorted = nil
	delete(a.waiting, t)
	delete(a.settling, t)
	delete(a.held, t)
	delete(a.retry, t)
}
