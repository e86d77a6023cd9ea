// Package conntrack cuts UDP flows that still go to backends which are gone. UDP has no end of a connection that would do it: a
// client that keeps its port, such as a DNS resolver, would go on hitting a dead address.
package conntrack

import (
	"context"
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
	"github.com/landfall-lb/landfall/proxy/plan"
)

// gap is the least time between two passes, as each reads the whole table.
const gap = time.Second

// Flow is one UDP flow: where the client sent, and who answers.
type Flow struct {
	To, From netip.AddrPort
}

// Table is the kernel's table of flows.
type Table interface {
	// DeleteUDP deletes the UDP flows of a family for which gone is true, and returns how many.
	DeleteUDP(family lb.Family, gone func(Flow) bool) (int, error)
}

// Deps are what an Actor needs.
type Deps struct {
	Log   *slog.Logger
	Table Table
	// Local returns the node's own addresses, where node ports are reached.
	Local func() ([]netip.Addr, error)
	// Deleted is told how many flows a pass has cut; may be nil.
	Deleted func(int)
}

// Actor cuts flows.
type Actor struct {
	deps   Deps
	runner *loop.Runner

	mu sync.Mutex
	// applied are the UDP frontends of each Service, by are the Services of each UDP frontend with the addresses that may answer.
	applied map[lb.Key]map[frontend][]netip.AddrPort
	by      map[frontend]map[lb.Key][]netip.AddrPort
	// suspect are the frontends to which there may be flows that have to go, since the last pass that succeeded.
	suspect map[frontend]bool
}

// frontend is a UDP frontend; without an address it is a node port.
type frontend struct {
	family lb.Family
	at     netip.AddrPort
}

// New returns an Actor.
func New(deps Deps) *Actor {
	a := &Actor{
		deps: deps, applied: map[lb.Key]map[frontend][]netip.AddrPort{}, by: map[frontend]map[lb.Key][]netip.AddrPort{},
		suspect: map[frontend]bool{},
	}
	a.runner = loop.New(func(context.Context) (time.Duration, error) { return 0, a.apply() }, loop.Options{Gap: gap})
	return a
}

// Set says what the kernel is confirmed to hold for the Services that it names; a plan without ports stands for nothing. It never blocks.
func (a *Actor) Set(applied map[lb.Key]plan.Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, now := range applied {
		before, after := a.applied[key], frontends(now)
		for f, allowed := range before {
			if still, ok := after[f]; !ok || lost(allowed, still) {
				a.suspect[f] = true
			}
			delete(a.by[f], key)
			if len(a.by[f]) == 0 {
				delete(a.by, f)
			}
		}
		for f, allowed := range after {
			// Where nobody answered before, packets may have gone out as they were, and would go on doing so.
			if len(before[f]) == 0 {
				a.suspect[f] = true
			}
			if a.by[f] == nil {
				a.by[f] = map[lb.Key][]netip.AddrPort{}
			}
			a.by[f][key] = allowed
		}
		if len(after) == 0 {
			delete(a.applied, key)
		} else {
			a.applied[key] = after
		}
	}
	if len(a.suspect) > 0 {
		a.runner.Poke()
	}
}

// lost tells whether something of before is not in now.
func lost(before, now []netip.AddrPort) bool {
	return slices.ContainsFunc(before, func(at netip.AddrPort) bool { return !slices.Contains(now, at) })
}

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

// frontends returns the UDP frontends of a plan, each with the addresses that may answer.
func frontends(s plan.Service) map[frontend][]netip.AddrPort {
	all := map[frontend][]netip.AddrPort{}
	for _, p := range s.Ports {
		if p.Protocol != lb.UDP {
			continue
		}
		for _, f := range p.Frontends {
			all[frontend{p.Family, netip.AddrPortFrom(f.Addr, f.Port)}] = p.Serving
		}
	}
	return all
}

// apply makes one pass.
func (a *Actor) apply() error {
	a.mu.Lock()
	suspect := a.suspect
	a.suspect = map[frontend]bool{}
	allowed := make(map[frontend][]netip.AddrPort, len(suspect))
	for f := range suspect {
		allowed[f] = nil
		for _, by := range a.by[f] { // another Service may have taken over what one has left
			allowed[f] = slices.Concat(allowed[f], by)
		}
	}
	a.mu.Unlock()
	if len(suspect) == 0 {
		return nil
	}
	err := a.cut(allowed)
	if err != nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		maps.Copy(a.suspect, suspect)
		a.deps.Log.Warn("cannot cut UDP flows to backends that are gone; trying again", "error", err)
	}
	return err
}

// cut deletes the flows to frontends in allowed that nobody answers who may.
func (a *Actor) cut(allowed map[frontend][]netip.AddrPort) error {
	local := map[netip.Addr]bool{}
	addrs, err := a.deps.Local()
	if err != nil {
		return fmt.Errorf("list the node's addresses: %w", err)
	}
	for _, addr := range addrs {
		local[addr] = true
	}
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if !concerns(allowed, family) {
			continue
		}
		n, err := a.deps.Table.DeleteUDP(family, func(f Flow) bool {
			by, ok := allowed[frontend{family, f.To}]
			if !ok && local[f.To.Addr()] {
				by, ok = allowed[frontend{family, netip.AddrPortFrom(netip.Addr{}, f.To.Port())}]
			}
			return ok && !slices.Contains(by, f.From)
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
		if n > 0 {
			a.deps.Log.Info("cut UDP flows to backends that are gone", "family", family, "flows", n)
			if a.deps.Deleted != nil {
				a.deps.Deleted(n)
			}
		}
	}
	return errors.Join(errs...)
}

func concerns(allowed map[frontend][]netip.AddrPort, family lb.Family) bool {
	for f := range allowed {
		if f.family == family {
			return true
		}
	}
	return false
}
