// Package senders finds out the MAC addresses of other nodes, by which rules tell packets that a node has
// handed over from those of clients.
package senders

import (
	"context"
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

// How often the actor asks the kernel: more often at first for an address that it knows nothing of.
const (
	lookEvery = 5 * time.Second
	lookSoon  = 50 * time.Millisecond
	soonLooks = 10
)

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	// Look returns the MAC addresses that the kernel knows, and has it ask for the others.
	Look func(nodes []netip.Addr) (map[netip.Addr]lb.MAC, error)
	// Changed is called when Known has changed; it must not block.
	Changed func()
}

// Actor keeps the MAC addresses of nodes.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	failed loop.Failures
	// looks counts how often the addresses were looked up. It belongs to the goroutine that runs step.
	looks int

	mu    sync.Mutex
	nodes []netip.Addr
	fresh bool // nodes has changed since the last look
	known map[netip.Addr]lb.MAC
}

// New returns an Actor without nodes.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, known: map[netip.Addr]lb.MAC{}}
	a.runner = loop.New(a.step, loop.Options{Gap: lookSoon})
	return a
}

// Set takes the addresses of the nodes, in order. It never blocks.
func (a *Actor) Set(nodes []netip.Addr) {
	a.mu.Lock()
	same := slices.Equal(nodes, a.nodes)
	if !same {
		a.nodes, a.fresh = slices.Clone(nodes), true
	}
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

// Known returns the known MAC addresses of the nodes, in order.
func (a *Actor) Known() []lb.MAC {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := slices.SortedFunc(maps.Values(a.known), func(a, b lb.MAC) int { return slices.Compare(a[:], b[:]) })
	return slices.Compact(all)
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

func (a *Actor) step(context.Context) (time.Duration, error) {
	a.mu.Lock()
	nodes := a.nodes
	if a.fresh {
		a.fresh, a.looks = false, 0
	}
	a.mu.Unlock()
	found, err := map[netip.Addr]lb.MAC(nil), error(nil)
	if len(nodes) > 0 {
		found, err = a.deps.Look(nodes)
	}
	a.failed.Log(a.deps.Log, "cannot look up the MAC addresses of nodes; trying again",
		"can look up the MAC addresses of nodes again", err)
	if err != nil {
		return 0, fmt.Errorf("look up the MAC addresses of nodes: %w", err)
	}
	a.looks++
	switch {
	case len(nodes) == 0:
		a.take(nodes, found)
		return 0, nil
	case !a.take(nodes, found) && a.looks < soonLooks:
		return lookSoon, nil
	}
	return lookEvery, nil
}

// take takes what was found, and reports whether all nodes are known. A node of which the kernel knows
// nothing any more keeps the address that it had.
func (a *Actor) take(nodes []netip.Addr, found map[netip.Addr]lb.MAC) (all bool) {
	now := make(map[netip.Addr]lb.MAC, len(nodes))
	a.mu.Lock()
	for _, node := range nodes {
		if mac, ok := found[node]; ok {
			now[node] = mac
		} else if mac, ok := a.known[node]; ok {
			now[node] = mac
		}
	}
	changed := !maps.Equal(now, a.known)
	a.known = now
	a.mu.Unlock()
	if changed {
		a.deps.Changed()
	}
	return len(now) == len(nodes)
}
