// Package liveness finds out what has become of the speakers that gossip has lost: whether a
// speaker has crashed, hangs or is cut off while its node still forwards, so that its addresses are
// reserved for it, or whether the whole node is dead.
//
// State decides, as a value; Actor probes nodes and keeps the time.
package liveness

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// probeEvery is how often a node is probed that has not answered, or that is waited for: see heldEvery.
const probeEvery = 200 * time.Millisecond

// Options of an Actor.
type Options struct {
	Self string // this node's name
	// Hold is how long the addresses that a crashed speaker announced are reserved for it, while its
	// node is still there; 0 for not at all.
	Hold time.Duration
	// ProbeInterval is the time between two probes of gossip by one node; 0 for 100 ms.
	ProbeInterval time.Duration
	Log           *slog.Logger
	// Changed is called after Sight differs. It must not block, and may be called from
	// any goroutine.
	Changed func()
	// Ring is how many successors, and as many predecessors, on a ring of all nodes this one watches; 0
	// for none.
	Ring int
	// Report tells all others that this node has lost its path to a process. Back is called when a node
	// answers again that gossip had not lost. They must not block; nil for nobody.
	Report func(node string, born uint64)
	Back   func(node string)
	// Probe reports whether the kernel of a node answers; nil stands for Answers.
	Probe func(ctx context.Context, addr netip.AddrPort) bool
	// Ping reports whether the speaker of a node answers gossip. Those that gossip knows are asked that, too, as
	// a packet filter may drop what a probe sends; nil for not at all.
	Ping func(node string, addr netip.AddrPort) bool
}

// Actor probes the nodes whose speakers gossip has lost.
type Actor struct {
	opts   Options
	runner *loop.Runner

	mu    sync.Mutex
	state *State
	// What follows from state, until it changes or the time is over; nil when it is out of date.
	standings map[string]plan.Standing
	until     time.Time
	// buried are the neighbors on the ring that an alarm has shown to be dead, until their kernels have been
	// asked again, a while later.
	buried map[string]burial
}

// burial is of which process, and when.
type burial struct {
	born uint64
	at   time.Time
}

var _ actor.Setter[map[string][]netip.Addr] = (*Actor)(nil)

// New returns an Actor that has met no other node.
func New(opts Options) *Actor {
	if opts.Probe == nil {
		opts.Probe = Answers
	}
	interval := cmp.Or(opts.ProbeInterval, 100*time.Millisecond)
	a := &Actor{opts: opts, state: NewState(opts.Self, opts.Hold, interval), buried: map[string]burial{}}
	a.state.ring = opts.Ring
	a.runner = loop.New(func(ctx context.Context) (time.Duration, error) { return a.apply(ctx), nil }, loop.Options{})
	return a
}

// Set says which other nodes the cluster has, by name.
func (a *Actor) Set(nodes map[string][]netip.Addr) {
	a.change(func(s *State, now time.Time) { s.Keep(nodes, now) })
}

// Joined takes in that a process takes part in gossip. Gossip calls it, like the methods after it,
// in the order of events.
func (a *Actor) Joined(p plan.Process) {
	a.change(func(s *State, now time.Time) { s.Joined(p, now) })
	a.opts.Changed()
}

// Lost takes in that gossip has lost a process, and reports whether that has left as planned. If not, its node counts
// as live until it has been probed.
func (a *Actor) Lost(p plan.Process) (left bool) {
	a.change(func(s *State, now time.Time) { left = s.Lost(p, now) })
	if left {
		a.opts.Changed()
	}
	return left
}

// Farewell takes in that a process ends as planned, and reports whether that is news.
func (a *Actor) Farewell(node string, born uint64) (news bool) {
	left := false
	a.change(func(s *State, now time.Time) { news, left = s.Farewell(node, born, now) })
	if left {
		a.opts.Changed()
	}
	return news
}

// ConfirmAfter has the kernels of all dead nodes asked once more, after the given moment, if they were not. Sight
// tells when they were.
func (a *Actor) ConfirmAfter(after time.Time) {
	a.mu.Lock()
	news := a.state.ConfirmAfter(after)
	a.mu.Unlock()
	if news {
		a.runner.Poke()
	}
}

// Recalled takes in that other nodes reserve what an earlier process of this node has announced.
func (a *Actor) Recalled(born uint64) {
	a.change(func(s *State, now time.Time) { s.Recalled(born, now) })
	a.opts.Changed()
}

// Alarmed takes in that a node, which may be this one, has lost its path to a process. It reports
// whether that is news.
func (a *Actor) Alarmed(node string, born uint64, by string) bool {
	a.mu.Lock()
	now := time.Now()
	news := a.state.Alarmed(node, born, by, now)
	var verdict Verdict
	var watched uint64
	if news {
		watched = a.state.watched(node, now)
		verdict = a.state.judge(a.state.nodes[node], now)
		a.standings = nil
	}
	a.mu.Unlock()
	a.announce(verdict, node)
	a.bury(verdict, node, watched)
	if news {
		a.runner.Poke()
	}
	return news
}

// PathLost takes in that BFD has lost the path to a neighbor on the ring.
func (a *Actor) PathLost(node string) {
	a.mu.Lock()
	born := a.state.born(node)
	a.mu.Unlock()
	if born == 0 {
		return
	}
	if a.opts.Report != nil {
		a.opts.Report(node, born)
	}
	a.Alarmed(node, born, a.opts.Self)
}

// Ring returns where the neighbors of this node on the ring are, by their addresses.
func (a *Actor) Ring() map[netip.Addr]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state.Ring(time.Now())
}

// announce makes a verdict known.
func (a *Actor) announce(verdict Verdict, node string) {
	if verdict == Unchanged {
		return
	}
	a.opts.Log.Info(string(verdict), "member", node)
	if verdict == NodeBack && a.opts.Back != nil {
		a.opts.Back(node)
	}
	a.opts.Changed()
}

// bury notes that this node takes a neighbor on the ring for dead.
func (a *Actor) bury(verdict Verdict, node string, born uint64) {
	if verdict != NodeDead || born == 0 {
		return
	}
	a.mu.Lock()
	a.buried[node] = burial{born, time.Now()}
	a.mu.Unlock()
}

// attest has the others know of a neighbor that this node has buried whether its kernel is silent still.
func (a *Actor) attest(node string, born uint64, answered bool) {
	a.mu.Lock()
	b := a.buried[node]
	late := b.born == born && !time.Now().Before(b.at.Add(probeEvery))
	if late || answered {
		delete(a.buried, node)
	}
	a.mu.Unlock()
	if late && !answered && a.opts.Report != nil {
		a.opts.Report(node, born)
	}
}

// change updates the state and has the actor look at it.
func (a *Actor) change(f func(s *State, now time.Time)) {
	a.mu.Lock()
	f(a.state, time.Now())
	a.standings = nil
	a.mu.Unlock()
	a.runner.Poke()
}

// Sight returns what this node knows of the cluster's speakers.
func (a *Actor) Sight() plan.Sight {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if a.standings == nil || !a.until.IsZero() && !now.Before(a.until) {
		a.standings, a.until = a.state.Standings(now), a.state.Next(now)
	}
	return plan.Sight{Speakers: a.state.Speakers(now), Standings: a.standings, Previous: a.state.Previous(now)}
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run probes nodes until ctx ends.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

// apply probes the nodes that are due at once, ends what has lasted long enough, and returns when
// to look again; 0 for not before something happens.
func (a *Actor) apply(ctx context.Context) time.Duration {
	a.mu.Lock()
	probes := a.state.Probes(time.Now())
	a.mu.Unlock()
	answers := a.round(ctx, probes)
	if ctx.Err() == nil { // a probe that was cut short shows nothing
		a.settle(answers)
	}

	a.mu.Lock()
	now := time.Now()
	changed := a.state.Expire(now)
	if changed {
		a.standings = nil
	}
	var again time.Duration
	if next := a.state.Next(now); !next.IsZero() {
		again = next.Sub(now)
	}
	if wait := a.state.due(now); wait > 0 {
		again = plan.Sooner(again, wait)
	}
	a.mu.Unlock()
	if changed {
		a.opts.Changed()
	}
	return again
}

// round asks all at once, but those who are late only after a node has not answered for a quarter of gossip's
// interval, or at all: while the nodes that are waited for answer, nobody else is asked.
func (a *Actor) round(ctx context.Context, probes []Probe) (all []Answer) {
	answers := make(chan Answer, len(probes))
	asked := 0
	ask := func(late bool) {
		for _, p := range probes {
			if p.late == late {
				asked++
				go func() { answers <- Answer{p, a.ask(ctx, p)} }()
			}
		}
	}
	ask(false)
	wait := time.NewTimer(a.state.interval / 4)
	defer wait.Stop()
	for waits := true; len(all) < asked; {
		silent := false
		select {
		case one := <-answers:
			all = append(all, one)
			silent = !one.Answered
		case <-wait.C:
			silent = true
		}
		if silent && waits {
			waits = false
			ask(true)
		}
	}
	return all
}

// ask reports whether the kernel of a node answers, or of a witness the speaker.
func (a *Actor) ask(ctx context.Context, p Probe) bool {
	if !p.witness || a.opts.Ping == nil {
		return a.opts.Probe(ctx, p.Addr)
	}
	var pinged bool
	var group sync.WaitGroup
	group.Go(func() { pinged = a.opts.Ping(p.Node, p.Addr) })
	answered := a.opts.Probe(ctx, p.Addr)
	group.Wait()
	return answered || pinged
}

// settle takes in the answers to probes that were asked at once. They change the state at one moment: what
// follows from the silence of all does not follow from that of the first.
func (a *Actor) settle(answers []Answer) {
	a.mu.Lock()
	now := time.Now()
	watched := map[string]uint64{}
	for _, p := range answers {
		if !p.alarm.IsZero() {
			watched[p.Node] = a.state.watched(p.Node, now)
		}
	}
	confirmed := a.state.confirmed
	verdicts := a.state.Probed(answers, now)
	a.standings = nil
	news := a.state.confirmed.After(confirmed)
	a.mu.Unlock()
	for node, verdict := range verdicts {
		a.announce(verdict, node)
		a.bury(verdict, node, watched[node])
	}
	for _, p := range answers {
		if p.condemned != 0 {
			a.attest(p.Node, p.condemned, p.Answered)
		}
	}
	if news {
		a.opts.Changed()
	}
}
