// Package across finds out which nodes behind routers take what is handed over to them for direct forwarding: it
// asks them through the tunnel, and their kernels answer, so that a proxy that is being replaced there is not
// missed (docs/design/direct.md).
package across

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

const (
	// every is how often a node that answers is asked, so that it is soon noticed when packets to it are lost. It is asked
	// again without an answer after patience. A node that does not answer is asked only each rarely-th time: many may not.
	every    = 250 * time.Millisecond
	patience = 100 * time.Millisecond
	rarely   = 4
	// soon is when the first answers are looked for.
	soon = 20 * time.Millisecond
	// MaxNodes is how many addresses of nodes are asked at most.
	MaxNodes = 256
)

// Line is the way to other nodes.
type Line interface {
	// Ask sends a question through the tunnel. The error is errNoTunnel while there is none, and errDiverted while what
	// is handed over to the node would leave another way.
	Ask(self, node netip.Addr, nonce Nonce) error
	// Answers returns what has come since the last call.
	Answers(family lb.Family) ([]Answer, error)
}

// Answer is what a node has sent.
type Answer struct {
	Node  netip.Addr
	Nonce Nonce
}

// Deps are what an Actor needs.
type Deps struct {
	Log  *slog.Logger
	Line Line
	Now  func() time.Time
	// Changed is called when States has changed; it must not block.
	Changed func()
}

// Actor asks nodes.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	failed loop.Failures

	mu     sync.Mutex
	nodes  Nodes
	states map[netip.Addr]State

	// The rest belongs to the goroutine that runs step.
	tallies map[netip.Addr]*tally
	due     time.Time
	rounds  int // how often it was due
}

// New returns an Actor without nodes.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, tallies: map[netip.Addr]*tally{}}
	a.runner = loop.New(a.step, loop.Options{Gap: soon})
	return a
}

// Set takes the nodes, the others in order; of more than MaxNodes the last are not asked. It never blocks.
func (a *Actor) Set(nodes Nodes) {
	nodes = Nodes{slices.Clone(nodes.Self), slices.Clone(nodes.Others[:min(len(nodes.Others), MaxNodes)])}
	a.mu.Lock()
	same := slices.Equal(nodes.Self, a.nodes.Self) && slices.Equal(nodes.Others, a.nodes.Others)
	a.nodes = nodes
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

// States returns what is known of the nodes. It must not be changed.
func (a *Actor) States() map[netip.Addr]State {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.states
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

func (a *Actor) step(context.Context) (time.Duration, error) {
	a.mu.Lock()
	nodes := a.nodes
	a.mu.Unlock()
	maps.DeleteFunc(a.tallies, func(node netip.Addr, _ *tally) bool { return !slices.Contains(nodes.Others, node) })
	errs := []error{a.listen(nodes.Others)}
	now := a.deps.Now()
	due := !now.Before(a.due)
	if due {
		a.due = now.Add(every)
		a.rounds++
	}
	next := a.due
	for _, node := range nodes.Others {
		t := a.tallies[node]
		ask := due && a.rounds%rarely == 0
		if t != nil && t.state == Answers {
			ask = due
			if t.late() {
				ask = !now.Before(t.at.Add(patience))
			}
		}
		if t == nil || ask {
			errs = append(errs, a.ask(nodes.Self, node, now))
		}
		if t = a.tallies[node]; t.late() && t.at.Add(patience).Before(next) {
			next = t.at.Add(patience)
		}
	}
	a.publish()
	err := errors.Join(errs...)
	a.failed.Log(a.deps.Log, "cannot ask nodes behind routers whether they take what is handed over; trying again",
		"can ask nodes behind routers again", err)
	switch {
	case len(nodes.Others) == 0:
		return 0, nil
	case slices.ContainsFunc(slices.Collect(maps.Values(a.tallies)), (*tally).missing):
		return soon, nil
	}
	return max(next.Sub(a.deps.Now()), time.Millisecond), nil
}

// listen takes the answers that have come.
func (a *Actor) listen(nodes []netip.Addr) error {
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if !slices.ContainsFunc(nodes, func(n netip.Addr) bool { return lb.FamilyOf(n) == family }) {
			continue
		}
		answers, err := a.deps.Line.Answers(family)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
		for _, answer := range answers {
			if t := a.tallies[answer.Node]; t != nil {
				t.answer(answer.Nonce)
			}
		}
	}
	return errors.Join(errs...)
}

// ask asks one node. A question that this node cannot send has no answer.
func (a *Actor) ask(self []netip.Addr, node netip.Addr, now time.Time) error {
	t := a.tallies[node]
	if t == nil {
		t = &tally{}
		a.tallies[node] = t
	}
	var nonce Nonce
	_, _ = rand.Read(nonce[:]) // never fails
	t.ask(nonce, now)
	i := slices.IndexFunc(self, func(own netip.Addr) bool { return lb.FamilyOf(own) == lb.FamilyOf(node) })
	if i < 0 {
		return nil
	}
	err := a.deps.Line.Ask(self[i], node, nonce)
	switch {
	case errors.Is(err, errNoTunnel):
		return nil // it is about to be made, or the Event TunnelUnavailable says why not
	case errors.Is(err, errDiverted):
		t.divert()
		return nil
	case err != nil:
		return fmt.Errorf("ask %s: %w", node, err)
	}
	return nil
}

func (a *Actor) publish() {
	now := make(map[netip.Addr]State, len(a.tallies))
	for node, t := range a.tallies {
		now[node] = t.state
	}
	a.mu.Lock()
	changed := !maps.Equal(now, a.states)
	a.states = now
	a.mu.Unlock()
	if changed {
		a.deps.Changed()
	}
}

var (
	// errNoTunnel is for a node that has none.
	errNoTunnel = errors.New("there is no tunnel")
	// errDiverted is for an alias to which the kernel has another route.
	errDiverted = errors.New("the route leads elsewhere")
)
