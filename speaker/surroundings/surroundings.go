// Package surroundings tells the controller which addresses of this node's networks no Service can
// have: its gateways, and the network and broadcast addresses of the subnets that they are in. Only
// a node knows them.
package surroundings

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the actor.
const (
	gap = time.Second
	// lookEvery is the time between looks at the routes, whose changes nobody tells of.
	lookEvery  = 30 * time.Second
	maxBackoff = 5 * time.Minute
)

// Options of an actor.
type Options struct {
	Node string
	// Gateways asks the kernel for the next hops of the default routes.
	Gateways func() ([]links.Gateway, error)
	// Interfaces are those of this node, and whether they are known.
	Interfaces func() ([]lb.Interface, bool)
	// Shown is what all nodes tell at present, and whether that is known.
	Shown func() (map[string]string, bool)
	// Exists tells whether there is a Node of that name; nil while it is not known.
	Exists func() func(node string) bool
	// Write sets what nodes tell; nil removes an entry.
	Write func(ctx context.Context, entries map[string]*string) error
	Log   *slog.Logger
}

// Surroundings is the actor.
type Surroundings struct {
	opts   Options
	runner *loop.Runner
	said   string // the last failure
}

// New returns an actor; nothing is asked before Run.
func New(opts Options) *Surroundings {
	s := &Surroundings{opts: opts}
	s.runner = loop.New(s.apply, loop.Options{Gap: gap, MaxBackoff: maxBackoff})
	return s
}

// Poke has the actor look again: what Options tell of has changed.
func (s *Surroundings) Poke() { s.runner.Poke() }

// Run looks and writes until ctx ends.
func (s *Surroundings) Run(ctx context.Context) error {
	s.Poke()
	return s.runner.Run(ctx)
}

// apply writes what this node tells if it is not shown. An empty ConfigMap entry and none are the
// same.
func (s *Surroundings) apply(ctx context.Context) (time.Duration, error) {
	interfaces, known := s.opts.Interfaces()
	shown, shows := s.opts.Shown()
	if !known || !shows {
		return gap, nil
	}
	gateways, err := s.opts.Gateways()
	if err != nil {
		return 0, s.report(ctx, err) // unknown is not absent: what was told stays
	}
	text := lb.FormatUnassignable(Unassignable(gateways, interfaces))
	if text == shown[s.opts.Node] {
		s.said = ""
		return lookEvery, nil
	}
	entries := map[string]*string{s.opts.Node: &text}
	if exists := s.opts.Exists(); exists != nil {
		for node := range shown {
			if node != s.opts.Node && !exists(node) {
				entries[node] = nil // whoever writes takes away what nobody else will
			}
		}
	}
	if err := s.opts.Write(ctx, entries); err != nil {
		return 0, s.report(ctx, err)
	}
	s.opts.Log.Info("told the controller which addresses around this node no Service can have", "addresses", text)
	return lookEvery, nil
}

func (s *Surroundings) report(ctx context.Context, err error) error {
	if err.Error() != s.said && ctx.Err() == nil {
		s.said = err.Error()
		s.opts.Log.Warn("cannot tell the controller which addresses around this node no Service can have, trying again",
			"error", err)
	}
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
			add(g.Addr, "the gateway")
		}
	}
	for _, g := range gateways {
		for _, i := range interfaces {
			for _, subnet := range i.Addresses {
				if i.Index == g.Interface && subnet.Contains(g.Addr) && subnet.Addr().Is4() && subnet.Bits() < 31 {
					add(subnet.Masked().Addr(), "the network address")
					add(broadcast(subnet), "the broadcast address")
				}
			}
		}
	}
	return all
}

// broadcast returns the last address of an IPv4 subnet.
func broadcast(subnet netip.Prefix) netip.Addr {
	last := subnet.Addr().As4()
	for bit := subnet.Bits(); bit < 32; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(last)
}
