// Package probe asks backends whether they answer, over the same way of this node's kernel that
// connections to Services take. It tells which do not: on this node only, whatever others see.
package probe

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// DefaultInterval is the time between two questions to one backend.
const DefaultInterval = 100 * time.Millisecond

// gap folds the answers that come at a time. One that failed does not wait for it.
const gap = 5 * time.Millisecond

// Deps are what an Actor needs.
type Deps struct {
	Now func() time.Time
	// Dial connects to a backend.
	Dial func(ctx context.Context, to netip.AddrPort) (net.Conn, error)
	// Interval is the time between two questions to one backend, as far as [plan.Probing.Interval] has it.
	Interval time.Duration
	// Phase returns a time from 0 to below d, at random, so that nodes and backends do not ask and are not
	// asked all at once.
	Phase func(d time.Duration) time.Duration
	// Agent is the User-Agent of requests.
	Agent string
	// Counted is told what became of each question. It is called from several goroutines.
	Counted func(Result)
	// Changed is called when Take returns something. It must not block.
	Changed func()
}

// Actor asks. It is told the endpoints of each Service; none for one that is not to be asked. What several
// Services ask of one endpoint is one question.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	inbox  actor.Inbox[lb.Key, plan.Probing]
	asks   sync.WaitGroup

	mu      sync.Mutex
	answers []answer
	news    map[lb.Key]plan.LeftOut

	// What follows belongs to the step.
	services map[lb.Key]*service
	entries  map[target]*entry
	// places has how many entries the Services of each namespace have at an address.
	places map[netip.Addr]map[string]int
	// underway counts the questions of each Service without an answer, with those to endpoints that are
	// gone: a Service whose probe changes all the time has no more of them than endpoints.
	underway map[lb.Key]int
}

// service is a Service whose endpoints are asked.
type service struct {
	plan.Probing
	entries map[netip.AddrPort]*entry
}

// target is what a question is about.
type target struct {
	probe lb.Probe
	to    netip.AddrPort
}

// entry is a target of some Services. It is asked one question at a time.
type entry struct {
	target
	users  map[lb.Key]bool
	record plan.Record
	due    time.Time // the next question
	asked  bool      // and not answered
	by     lb.Key    // the Service that the question counts for
}

// gone reports whether no Service has the entry any more.
func (e *entry) gone() bool { return len(e.users) == 0 }

// answer is what became of a question.
type answer struct {
	*entry
	plan.Answer
}

var _ actor.Updater[lb.Key, plan.Probing] = (*Actor)(nil)

// New returns an Actor. Run starts it.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, services: map[lb.Key]*service{}, entries: map[target]*entry{},
		places: map[netip.Addr]map[string]int{}, underway: map[lb.Key]int{}}
	a.runner = loop.New(a.step, loop.Options{Gap: gap})
	return a
}

// Begin says what to ask of all Services. It never blocks.
func (a *Actor) Begin(all map[lb.Key]plan.Probing) {
	a.inbox.Begin(all)
	a.runner.Poke()
}

// Update says what to ask of the named Services. It never blocks.
func (a *Actor) Update(changes map[lb.Key]plan.Probing) {
	a.inbox.Update(changes)
	a.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Take returns the Services of which it has changed which endpoints do not answer, with all of those.
func (a *Actor) Take() map[lb.Key]plan.LeftOut {
	a.mu.Lock()
	defer a.mu.Unlock()
	news := a.news
	a.news = nil
	return news
}

// Run asks until ctx ends.
func (a *Actor) Run(ctx context.Context) error {
	err := a.runner.Run(ctx)
	a.asks.Wait()
	return err
}

// step takes in what is to be asked and what was answered, and asks what is due.
func (a *Actor) step(ctx context.Context) (time.Duration, error) {
	now := a.deps.Now()
	changed := map[lb.Key]bool{}
	a.track(now, changed)
	a.hear(now, changed)
	a.tell(changed)
	return a.ask(ctx, now), nil
}

// track takes in which endpoints there are. What is known of those that stay is kept.
func (a *Actor) track(now time.Time, changed map[lb.Key]bool) {
	changes, _ := a.inbox.Take()
	var fresh []*entry
	for key, wanted := range changes {
		before := a.services[key]
		if before == nil {
			before = &service{}
		}
		after := &service{wanted, make(map[netip.AddrPort]*entry, len(wanted.Targets))}
		for _, to := range wanted.Targets {
			at := target{wanted.Probe, to}
			e := a.entries[at]
			if e == nil {
				e = &entry{target: at, users: map[lb.Key]bool{}}
				a.entries[at] = e
				fresh = append(fresh, e)
			}
			if !e.users[key] {
				a.place(e, key, 1)
				e.users[key] = true
				changed[key] = changed[key] || e.record.Out != ""
			}
			after.entries[to] = e
		}
		for to, e := range before.entries {
			if after.entries[to] != e {
				delete(e.users, key)
				a.place(e, key, -1)
				changed[key] = changed[key] || e.record.Out != ""
			}
			if e.gone() {
				delete(a.entries, e.target)
			}
		}
		if a.services[key] = after; len(after.entries) == 0 {
			delete(a.services, key)
		}
	}
	for _, e := range fresh {
		if !e.gone() {
			e.due = now.Add(a.deps.Phase(a.interval(e)))
		}
	}
}

// place counts that the first Service of a namespace comes to an entry, or that the last one has left.
func (a *Actor) place(e *entry, key lb.Key, n int) {
	for user := range e.users {
		if user.Namespace == key.Namespace {
			return
		}
	}
	at := a.places[e.to.Addr()]
	if at == nil {
		at = map[string]int{}
		a.places[e.to.Addr()] = at
	}
	if at[key.Namespace] += n; at[key.Namespace] == 0 {
		delete(at, key.Namespace)
	}
	if len(at) == 0 {
		delete(a.places, e.to.Addr())
	}
}

// interval returns the time between two questions to an entry: the shortest of what its Services may
// have. Namespaces share what an address is asked equally, and so do the entries of each.
func (a *Actor) interval(e *entry) (shortest time.Duration) {
	at := a.places[e.to.Addr()]
	for key := range e.users {
		d := a.services[key].Interval(a.deps.Interval, len(a.entries), len(at)*at[key.Namespace])
		if shortest == 0 || d < shortest {
			shortest = d
		}
	}
	return shortest
}

// hear takes in what became of questions.
func (a *Actor) hear(now time.Time, changed map[lb.Key]bool) {
	a.mu.Lock()
	answers := a.answers
	a.answers = nil
	a.mu.Unlock()
	for _, n := range answers {
		e := n.entry
		if a.underway[e.by]--; a.underway[e.by] == 0 {
			delete(a.underway, e.by)
		}
		if e.asked = false; e.gone() {
			continue
		}
		before := e.record
		e.record = before.After(now, n.Answer)
		if (before.Out == "") != (e.record.Out == "") {
			for key := range e.users {
				changed[key] = true
			}
		}
		// From when it was due, so that delays of the loop do not add up.
		if e.due = e.due.Add(e.record.Wait(a.interval(e))); e.due.Before(now) {
			e.due = now
		}
	}
}

// tell offers which endpoints of the changed Services do not answer.
func (a *Actor) tell(changed map[lb.Key]bool) {
	if len(changed) == 0 {
		return
	}
	a.mu.Lock()
	for key := range changed {
		left := plan.LeftOut{}
		if s := a.services[key]; s != nil {
			for to, e := range s.entries {
				if e.record.Out != "" {
					left[to.Addr()] = e.record.Out
				}
			}
		}
		if a.news == nil {
			a.news = map[lb.Key]plan.LeftOut{}
		}
		a.news[key] = left
	}
	a.mu.Unlock()
	a.deps.Changed()
}

// ask asks what is due, and returns when something is due again.
func (a *Actor) ask(ctx context.Context, now time.Time) (again time.Duration) {
	for key, s := range a.services {
		for _, e := range s.entries {
			if e.asked {
				continue
			}
			if wait := e.due.Sub(now); wait > 0 {
				if again == 0 || wait < again {
					again = wait
				}
				continue
			}
			if a.underway[key] >= len(s.entries) {
				break // the next answer makes room
			}
			a.underway[key]++
			e.asked, e.by = true, key
			q := question{to: e.to, probe: e.probe, within: plan.ConnectTime(a.interval(e)), agent: a.deps.Agent,
				dial: a.deps.Dial, now: a.deps.Now}
			a.asks.Go(func() {
				got, result := q.ask(ctx)
				a.answered(e, got, result)
			})
		}
	}
	return again
}

// answered notes what became of a question.
func (a *Actor) answered(e *entry, got plan.Answer, result Result) {
	a.deps.Counted(result)
	a.mu.Lock()
	a.answers = append(a.answers, answer{e, got})
	a.mu.Unlock()
	if got.Failed != "" {
		a.runner.PokeNow()
	} else {
		a.runner.Poke()
	}
}
