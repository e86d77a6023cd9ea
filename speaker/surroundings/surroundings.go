// Package surroundings tells the controller which addresses of this node's networks no Service can
// have: its gateways, and the network and broadcast addresses of the subnets that they are in. Only
// a node knows them.
package surroundings

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the actor.
const (
	gap = time.Second
	// lookEvery is the time between looks at the routes, whose changes are not watched.
	lookEvery  = 30 * time.Second
	maxBackoff = 5 * time.Minute
)

// Options of an actor.
type Options struct {
	Node string
	// Gateways asks the kernel for the next hops of the default routes.
	Gateways func() ([]links.Gateway, error)
	// Shown is what all nodes tell at present, and whether that is known.
	Shown func() (map[string]string, bool)
	// Write sets what this node tells.
	Write func(ctx context.Context, text string) error
	Log   *slog.Logger
}

// Surroundings is the actor.
type Surroundings struct {
	opts     Options
	runner   *loop.Runner
	failures loop.Failures // only apply touches it

	mu         sync.Mutex
	interfaces []lb.Interface
	known      bool
}

var _ actor.Setter[[]lb.Interface] = (*Surroundings)(nil)

// New returns an actor; nothing is asked before Run.
func New(opts Options) *Surroundings {
	s := &Surroundings{opts: opts}
	s.runner = loop.New(s.apply, loop.Options{Gap: gap, MaxBackoff: maxBackoff})
	return s
}

// Set replaces the interfaces that this node has. Before, nothing is told.
func (s *Surroundings) Set(interfaces []lb.Interface) {
	s.mu.Lock()
	s.interfaces, s.known = interfaces, true
	s.mu.Unlock()
	s.Poke()
}

// Poke has the actor look again: what Shown or Exists return has changed.
func (s *Surroundings) Poke() { s.runner.Poke() }

// Busy returns for how long the actor has been at one thing.
func (s *Surroundings) Busy() time.Duration { return s.runner.Busy() }

// Run looks and writes until ctx ends.
func (s *Surroundings) Run(ctx context.Context) error {
	s.Poke()
	return s.runner.Run(ctx)
}

// apply writes what this node tells if it is not shown. An empty ConfigMap entry and none are the
// same.
func (s *Surroundings) apply(ctx context.Context) (time.Duration, error) {
	s.mu.Lock()
	interfaces, known := s.interfaces, s.known
	s.mu.Unlock()
	shown, shows := s.opts.Shown()
	if !known || !shows {
		return gap, nil
	}
	gateways, err := s.opts.Gateways()
	if err != nil {
		return 0, s.report(err) // unknown is not absent: what was told stays
	}
	text := lb.FormatUnassignable(Unassignable(gateways, interfaces))
	if text == shown[s.opts.Node] {
		return lookEvery, s.report(nil)
	}
	if err := s.opts.Write(ctx, text); err != nil {
		return 0, s.report(err)
	}
	s.opts.Log.Info("told the controller which addresses of this node's networks no Service can have", "addresses", text)
	return lookEvery, s.report(nil)
}

// report logs how an attempt has ended, and returns err.
func (s *Surroundings) report(err error) error {
	s.failures.Log(
		s.opts.Log, "cannot tell the controller which addresses of this node's networks no Service can have; retrying",
		"the controller knows again which addresses of this node's networks no Service can have", err)
	return err
}

// Unassignable returns the gateways, and of the IPv4 subnets that have one the network and the
// broadcast address, each address once. Link-local gateways are left out, as no pool has such
// addresses.
func Unassignable(gateways []links.Gateway, interfaces []lb.Interface) []lb.Unassignable {
	var all []lb.Unassignable
	add := func(addr netip.Addr, what string) {
		if !slices.ContainsFunc(all, func(n lb.Unassignable) bool { return n.Addr == addr }) {
			all = append(all, lb.Unassignable{Addr: addr, What: what})
		}
	}
	for _, g := range gateways {
		if !g.Addr.IsLinkLocalUnicast() {
			add(g.Addr, lb.TheGateway)
		}
	}
	for _, g := range gateways {
		for _, i := range interfaces {
			for _, subnet := range i.Addresses {
				if i.Index != g.Interface || !subnet.Contains(g.Addr) {
					continue
				}
				for _, n := range lb.HostlessOf(subnet) {
					add(n.Addr, n.What)
				}
			}
		}
	}
	return all
}
