package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/readiness"
)

// gates has this node's rules deliver to pods whose readiness waits for that, and for nothing else.
type gates struct {
	pods map[lb.Key]*gatedPod
	// of has the pods with each of their addresses: those in the node's network share its own.
	of map[netip.Addr]map[lb.Key]bool
	// naming are the Services that name an address of this node as an endpoint that is not ready, and unready
	// those addresses by Service.
	naming  map[netip.Addr]map[lb.Key]bool
	unready map[lb.Key][]netip.Addr
	told    int // how many gates the actor was told to open
}

// gatedPod is a pod that waits for its gate, or did so a moment ago.
type gatedPod struct {
	lb.GatedPod
	// since is since when only the gate keeps it from being ready, opened when the gate was seen to be open;
	// zero if it was not.
	since, opened time.Time
	// opening is why the gate shall open; nil if it shall not yet.
	opening *plan.Opening
}

func newGates() gates {
	return gates{pods: map[lb.Key]*gatedPod{}, of: map[netip.Addr]map[lb.Key]bool{},
		naming: map[netip.Addr]map[lb.Key]bool{}, unready: map[lb.Key][]netip.Addr{}}
}

// markGated notes that a pod with a gate has changed. It never blocks.
func (p *proxy) markGated(lb.Key) {
	p.gatesChanged.Store(true)
	p.runner.PokeNow()
}

// meetGated takes in which pods wait for their gates, and marks the Services that name them as dirty.
func (p *proxy) meetGated(now time.Time) {
	if p.from.gated == nil || !p.gatesChanged.Swap(false) {
		return
	}
	g := &p.gates
	all := p.from.gated.All()
	for key, before := range g.pods {
		if pod := all[key]; !pod.Ready || pod.UID != before.UID || !slices.Equal(pod.Addrs, before.Addrs) {
			p.dropGated(key, now)
		}
	}
	for key, pod := range all {
		have := g.pods[key]
		switch {
		case have != nil:
			if pod.Opened && have.opened.IsZero() {
				have.opened = now
			}
		case pod.Ready && !pod.Opened: // of one that was open before, EndpointSlices say what it is
			g.pods[key] = &gatedPod{GatedPod: pod, since: now}
			for _, addr := range pod.Addrs {
				if g.of[addr] == nil {
					g.of[addr] = map[lb.Key]bool{}
				}
				g.of[addr][key] = true
				p.markNaming(addr, now)
			}
		}
	}
}

func (p *proxy) dropGated(key lb.Key, now time.Time) {
	for _, addr := range p.gates.pods[key].Addrs {
		if delete(p.gates.of[addr], key); len(p.gates.of[addr]) == 0 {
			delete(p.gates.of, addr)
		}
		p.markNaming(addr, now)
	}
	delete(p.gates.pods, key)
}

func (p *proxy) markNaming(addr netip.Addr, now time.Time) {
	p.markEndpointsOf(slices.Collect(maps.Keys(p.gates.naming[addr])), now)
}

// admit notes which of this node's endpoints a Service names that are not ready, and returns its slices with
// those ready that wait for this node only.
func (p *proxy) admit(key lb.Key, all []lb.Slice) []lb.Slice {
	if p.from.gated == nil {
		return all
	}
	g := &p.gates
	for _, addr := range g.unready[key] {
		if delete(g.naming[addr], key); len(g.naming[addr]) == 0 {
			delete(g.naming, addr)
		}
	}
	unready := plan.Unready(all, p.self)
	if g.unready[key] = unready; len(unready) == 0 {
		delete(g.unready, key)
		return all
	}
	admitted := false
	for _, addr := range unready {
		if g.naming[addr] == nil {
			g.naming[addr] = map[lb.Key]bool{}
		}
		g.naming[addr][key] = true
		admitted = admitted || g.waits(addr, key.Namespace)
	}
	if !admitted {
		return all
	}
	return plan.Admit(all, lb.Place{Node: p.self, Zone: p.facts.node.Zone}, func(addr netip.Addr) bool {
		return g.waits(addr, key.Namespace)
	})
}

// waits reports whether a pod of a namespace waits that has an address.
func (g *gates) waits(addr netip.Addr, namespace string) bool {
	for pod := range g.of[addr] {
		if pod.Namespace == namespace {
			return true
		}
	}
	return false
}

// openGates decides which gates open, tells the actor, and returns when to look again.
func (p *proxy) openGates(now time.Time) (again time.Duration) {
	g := &p.gates
	if len(g.pods) == 0 && g.told == 0 {
		return 0
	}
	open := map[lb.Key]readiness.Gate{}
	for key, pod := range g.pods {
		if !pod.opened.IsZero() {
			if left := pod.opened.Add(plan.GateHold).Sub(now); left > 0 {
				again = sooner(again, left)
			} else {
				p.dropGated(key, now)
				p.runner.Poke()
			}
			continue
		}
		if pod.opening == nil {
			var wait time.Duration
			pod.opening, wait = p.gate(key.Namespace, pod).Open(p.self, now, p.settings.gateTimeout)
			again = sooner(again, wait)
		}
		if pod.opening != nil {
			open[key] = readiness.Gate{UID: pod.UID, Opening: *pod.opening}
		}
	}
	if len(open) > 0 || g.told > 0 {
		p.to.gates.Set(open)
	}
	g.told = len(open)
	return again
}

// gate returns what is known of a pod that waits. Only Services of its namespace count: others would have it
// wait for what somebody else has written into an EndpointSlice.
func (p *proxy) gate(namespace string, pod *gatedPod) plan.Gate {
	gate := plan.Gate{Since: pod.since, Programmed: map[lb.Key]bool{}}
	for _, addr := range pod.Addrs {
		for key := range p.gates.naming[addr] {
			r := p.records[key]
			if key.Namespace != namespace || r == nil || len(r.live.Ports) == 0 {
				continue // another proxy serves it, or there is none of that name
			}
			gate.Programmed[key] = p.written && !r.pending() && r.failure == nil && r.applied.DeliversTo(pod.Addrs)
		}
	}
	return gate
}
