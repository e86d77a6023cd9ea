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
	// those endpoints by Service.
	naming  map[netip.Addr]map[lb.Key]bool
	unready map[lb.Key][]lb.Endpoint
	// selectors are those of Services, by their namespaces; changes counts how often one has changed.
	selectors map[string]map[lb.Key]string
	changes   int
	told      int // how many gates the actor was told to open
}

// gatedPod is a pod that waits for its gate, or did so a moment ago.
type gatedPod struct {
	lb.GatedPod
	// since is since when only the gate keeps it from being ready, opened when the gate was seen to be open;
	// zero if it was not.
	since, opened time.Time
	// selected are the Services that select it, as of so many changes of selectors; negative if unknown.
	selected []lb.Key
	asOf     int
	// opening is why the gate shall open; nil if it shall not yet.
	opening *plan.Opening
}

func newGates() gates {
	return gates{pods: map[lb.Key]*gatedPod{}, of: map[netip.Addr]map[lb.Key]bool{},
		naming: map[netip.Addr]map[lb.Key]bool{}, unready: map[lb.Key][]lb.Endpoint{},
		selectors: map[string]map[lb.Key]string{}}
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
			if !maps.Equal(have.Labels, pod.Labels) {
				have.Labels, have.asOf = pod.Labels, -1
			}
			if pod.Opened && have.opened.IsZero() {
				have.opened = now
			}
		case pod.Ready && !pod.Opened: // of one that was open before, EndpointSlices say what it is
			g.pods[key] = &gatedPod{GatedPod: pod, since: now, asOf: -1}
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

// selects notes the selector of a Service; "" if it has none or is gone.
func (g *gates) selects(key lb.Key, selector string) {
	of := g.selectors[key.Namespace]
	if of[key] == selector {
		return
	}
	g.changes++
	switch {
	case selector != "" && of == nil:
		g.selectors[key.Namespace] = map[lb.Key]string{key: selector}
	case selector != "":
		of[key] = selector
	default:
		if delete(of, key); len(of) == 0 {
			delete(g.selectors, key.Namespace)
		}
	}
}

// selecting returns the Services that select a pod.
func (g *gates) selecting(of lb.Key, pod *gatedPod) []lb.Key {
	if pod.asOf != g.changes {
		pod.asOf, pod.selected = g.changes, nil
		for key, selector := range g.selectors[of.Namespace] {
			if pod.SelectedBy(selector) {
				pod.selected = append(pod.selected, key)
			}
		}
	}
	return pod.selected
}

// admit notes which pods a Service selects, and which of this node's endpoints it names that are not ready. It
// returns its slices with those ready that wait for this node only.
func (p *proxy) admit(key lb.Key, selector string, all []lb.Slice) []lb.Slice {
	if p.from.gated == nil {
		return all
	}
	g := &p.gates
	g.selects(key, selector)
	for _, ep := range g.unready[key] {
		if delete(g.naming[ep.Addr], key); len(g.naming[ep.Addr]) == 0 {
			delete(g.naming, ep.Addr)
		}
	}
	unready := plan.Unready(all, p.self)
	if g.unready[key] = unready; len(unready) == 0 {
		delete(g.unready, key)
		return all
	}
	admitted := false
	for _, ep := range unready {
		if g.naming[ep.Addr] == nil {
			g.naming[ep.Addr] = map[lb.Key]bool{}
		}
		g.naming[ep.Addr][key] = true
		admitted = admitted || g.waits(key.Namespace, ep)
	}
	if !admitted {
		return all
	}
	return plan.Admit(all, lb.Place{Node: p.self, Zone: p.facts.node.Zone}, func(ep lb.Endpoint) bool {
		return g.waits(key.Namespace, ep)
	})
}

// waits reports whether the pod behind an endpoint waits. Another one may have its address: in the node's
// network, or after it.
func (g *gates) waits(namespace string, ep lb.Endpoint) bool {
	return g.of[ep.Addr][lb.Key{Namespace: namespace, Name: ep.Pod}]
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
			pod.opening, wait = p.gate(key, pod).Open(p.self, now, p.settings.gateTimeout)
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
func (p *proxy) gate(of lb.Key, pod *gatedPod) plan.Gate {
	gate := plan.Gate{Since: pod.since, Programmed: map[lb.Key]bool{}}
	add := func(key lb.Key) {
		r := p.records[key]
		if r == nil || !r.live.HasFamilyOf(pod.Addrs) {
			return // another proxy serves it, there is none of that name, or it can never name the pod
		}
		gate.Programmed[key] = p.written && !r.pending() && r.failure == nil && r.applied.DeliversTo(pod.Addrs)
	}
	for _, key := range p.gates.selecting(of, pod) {
		add(key)
	}
	for _, addr := range pod.Addrs {
		for key := range p.gates.naming[addr] {
			if key.Namespace == of.Namespace && slices.ContainsFunc(p.gates.unready[key], func(ep lb.Endpoint) bool {
				return ep.Addr == addr && ep.Pod == of.Name
			}) {
				add(key)
			}
		}
	}
	return gate
}
