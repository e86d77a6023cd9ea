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

// gates has this node's rules deliver to pods whose readiness waits for that, and for nothing else, and opens the gates
// once the addresses of their Services are announced, too.
type gates struct {
	pods map[lb.Key]*gatedPod
	// of has the pods with each of their addresses: those in the node's network share its own.
	of map[netip.Addr]map[lb.Key]bool
	// naming are the Services that name a pod of this node as an endpoint that is not ready, and unready those
	// endpoints by Service.
	naming  map[place]map[lb.Key]bool
	unready map[lb.Key][]lb.Endpoint
	// selectors are those of Services, by their namespaces.
	selectors map[string]map[lb.Key]string
	told      int // how many gates the actor was told to open
}

// place is a pod at one of its addresses.
type place struct {
	pod  lb.Key
	addr netip.Addr
}

// gatedPod is a pod that waits for its gate, or did so a moment ago.
type gatedPod struct {
	lb.GatedPod
	// since is since when only the gate keeps it from being ready, opened when the gate was seen to be open;
	// zero if it was not.
	since, opened time.Time
	// admitted is set while rules deliver to it although slices say that it is not ready, followed once no slice has said
	// so any more: then they have the last word.
	admitted, followed bool
	// selected are the Services that select it.
	selected map[lb.Key]bool
	// missing is a Service for which it was seen to wait. While it does, no other one is looked at: many may
	// select many pods, and each step of the planner asks.
	missing lb.Key
	// opening is why the gate shall open; nil if it shall not yet.
	opening *plan.Opening
}

func newGates() gates {
	return gates{pods: map[lb.Key]*gatedPod{}, of: map[netip.Addr]map[lb.Key]bool{},
		naming: map[place]map[lb.Key]bool{}, unready: map[lb.Key][]lb.Endpoint{},
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
		if pod.Passed.After(now) { // by another clock
			pod.Passed = now
		}
		switch {
		case have != nil:
			if !maps.Equal(have.Labels, pod.Labels) {
				have.Labels = pod.Labels
				have.selected = g.selecting(key.Namespace, pod)
			}
			if !have.Passed.Equal(pod.Passed) {
				have.followed = false
			}
			if have.Passed = pod.Passed; pod.Opened && have.opened.IsZero() {
				have.opened = now
			}
			p.admitGated(key, have, have.admits(now), now)
		// Of one that has been ready for long, EndpointSlices say what it is.
		case pod.Ready && (pod.Passed.IsZero() || now.Before(pod.Passed.Add(plan.GateHoldPassed))):
			have = &gatedPod{GatedPod: pod, since: now, selected: g.selecting(key.Namespace, pod)}
			if g.pods[key] = have; pod.Opened { // by the process before, or it has just got ready again
				have.opened = now.Add(-plan.GateHold)
			}
			p.admitGated(key, have, have.admits(now), now)
		}
	}
}

// admits reports whether the rules deliver to a pod by its gate: while it waits for that, and then until it is known to
// be ready.
func (pod *gatedPod) admits(now time.Time) bool {
	return pod.opened.IsZero() || !pod.followed && now.Before(pod.heldUntil())
}

// admitGated has the rules deliver to a pod by its gate, or no longer.
func (p *proxy) admitGated(key lb.Key, pod *gatedPod, admits bool, now time.Time) {
	if admits == pod.admitted {
		return
	}
	pod.admitted = admits
	g := &p.gates
	for _, addr := range pod.Addrs {
		switch {
		case !admits:
			if delete(g.of[addr], key); len(g.of[addr]) == 0 {
				delete(g.of, addr)
			}
		case g.of[addr] == nil:
			g.of[addr] = map[lb.Key]bool{key: true}
		default:
			g.of[addr][key] = true
		}
		p.markNaming(place{key, addr}, now)
	}
}

// heldUntil returns until when a pod whose gate is open counts as ready by that.
func (pod *gatedPod) heldUntil() time.Time {
	if !pod.Passed.IsZero() {
		return pod.Passed.Add(plan.GateHoldPassed)
	}
	return pod.opened.Add(plan.GateHold)
}

func (p *proxy) dropGated(key lb.Key, now time.Time) {
	p.admitGated(key, p.gates.pods[key], false, now)
	delete(p.gates.pods, key)
}

func (p *proxy) markNaming(at place, now time.Time) {
	p.markThose(slices.Collect(maps.Keys(p.gates.naming[at])), now)
}

// selects notes the selector of a Service; "" if it has none or is gone.
func (g *gates) selects(key lb.Key, selector string) {
	of := g.selectors[key.Namespace]
	if of[key] == selector {
		return
	}
	for pod, waiting := range g.pods {
		switch {
		case pod.Namespace != key.Namespace:
		case selector != "" && waiting.SelectedBy(selector):
			waiting.selected[key] = true
		default:
			delete(waiting.selected, key)
		}
	}
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

// selecting returns the Services of a namespace that select a pod.
func (g *gates) selecting(namespace string, pod lb.GatedPod) map[lb.Key]bool {
	selected := map[lb.Key]bool{}
	for key, selector := range g.selectors[namespace] {
		if pod.SelectedBy(selector) {
			selected[key] = true
		}
	}
	return selected
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
		at := placeOf(key.Namespace, ep)
		if delete(g.naming[at], key); len(g.naming[at]) == 0 {
			delete(g.naming, at)
		}
	}
	unready := plan.Unready(all, p.self)
	if g.unready[key] = unready; len(unready) == 0 {
		delete(g.unready, key)
		return all
	}
	admitted := false
	for _, ep := range unready {
		at := placeOf(key.Namespace, ep)
		if g.naming[at] == nil {
			g.naming[at] = map[lb.Key]bool{}
		}
		g.naming[at][key] = true
		admitted = admitted || g.waits(at)
	}
	if !admitted {
		return all
	}
	return plan.Admit(all, lb.Place{Node: p.self, Zone: p.facts.node.Zone}, func(ep lb.Endpoint) bool {
		return g.waits(placeOf(key.Namespace, ep))
	})
}

func placeOf(namespace string, ep lb.Endpoint) place {
	return place{lb.Key{Namespace: namespace, Name: ep.Pod}, ep.Addr}
}

// waits reports whether the pod behind an endpoint waits. Another one may have its address: in the node's
// network, or after it.
func (g *gates) waits(at place) bool { return g.of[at.addr][at.pod] }

// openGates decides which gates open, tells the actor, and returns when to look again.
func (p *proxy) openGates(now time.Time) (again time.Duration) {
	g := &p.gates
	if len(g.pods) == 0 && g.told == 0 {
		return 0
	}
	open, waits := map[lb.Key]readiness.Gate{}, false
	for key, pod := range g.pods {
		if !pod.opened.IsZero() {
			switch left := pod.heldUntil().Sub(now); {
			case left > 0:
				again = sooner(again, left, p.settleGated(key, pod, now))
			case !pod.Passed.IsZero():
				p.dropGated(key, now)
				p.runner.Poke()
			case pod.admitted: // until it is ready
				p.admitGated(key, pod, false, now)
				p.runner.Poke()
			}
			continue
		}
		if pod.opening == nil {
			var wait time.Duration
			pod.opening, wait = p.gate(key, pod, now).Open(p.self, now, p.settings.gateTimeout)
			again = sooner(again, wait)
			waits = waits || pod.opening == nil
		}
		if pod.opening != nil {
			open[key] = readiness.Gate{UID: pod.UID, Opening: *pod.opening}
		}
	}
	if len(open) > 0 || g.told > 0 {
		p.to.gates.Set(open)
	}
	g.told = len(open)
	if left := p.heeds().Sub(now); waits && left > 0 {
		again = sooner(again, left)
	}
	return again
}

// settleGated notes that slices have followed a pod that is ready, and returns when to look again; 0 for not before
// they change. Those that do not name it yet get the time to.
func (p *proxy) settleGated(key lb.Key, pod *gatedPod, now time.Time) (again time.Duration) {
	if pod.followed || pod.Passed.IsZero() {
		return 0
	}
	if wait := pod.Passed.Add(plan.GateHold).Sub(now); wait > 0 {
		return wait
	}
	if !p.gates.isLate(key, pod) {
		pod.followed = true
		p.admitGated(key, pod, false, now)
	}
	return 0
}

// isLate reports whether a slice says of a pod that it is not ready.
func (g *gates) isLate(key lb.Key, pod *gatedPod) bool {
	return slices.ContainsFunc(pod.Addrs, func(addr netip.Addr) bool { return len(g.naming[place{key, addr}]) > 0 })
}

// heeds returns until when pods wait for what the speaker said, or for its first word, while there is no speaker that
// says what is unannounced; the zero time while there is one. After that there may be none.
func (p *proxy) heeds() time.Time {
	switch {
	case p.unspoken.IsZero():
		return time.Time{}
	case p.spoke:
		return p.unspoken.Add(p.settings.gateTimeout)
	}
	return p.unspoken.Add(plan.GateSpeaker)
}

// gate returns what is known of a pod that waits. Only Services of its namespace count: others would have it
// wait for what somebody else has written into an EndpointSlice.
func (p *proxy) gate(of lb.Key, pod *gatedPod, now time.Time) plan.Gate {
	timeout := p.settings.gateTimeout
	gate := plan.Gate{Since: pod.since, Services: map[lb.Key]plan.Standing{}}
	if p.gates.concerns(pod.missing, of, pod) && now.Sub(pod.since) < timeout {
		if standing, counts := p.standing(pod.missing, of, pod, now); counts && !standing.Done() {
			gate.Services[pod.missing] = standing
			return gate
		}
	}
	pod.missing = lb.Key{}
	// add reports whether there is nothing more to know: the pod waits for one of the Services. Once it does not
	// wait any longer, it is told for which ones it did.
	add := func(key lb.Key) (done bool) {
		standing, counts := p.standing(key, of, pod, now)
		if counts {
			gate.Services[key] = standing
		}
		if counts && !standing.Done() {
			pod.missing = key
			return now.Sub(pod.since) < timeout
		}
		return false
	}
	for key := range pod.selected {
		if add(key) {
			return gate
		}
	}
	for _, addr := range pod.Addrs {
		for key := range p.gates.naming[place{of, addr}] {
			if add(key) {
				return gate
			}
		}
	}
	return gate
}

// concerns reports whether a Service selects or names a pod.
func (g *gates) concerns(key, of lb.Key, pod *gatedPod) bool {
	return pod.selected[key] || slices.ContainsFunc(pod.Addrs, func(addr netip.Addr) bool {
		return g.naming[place{of, addr}][key]
	})
}

// standing returns how far a Service is ready for a pod: whether the rules deliver to it, and then whether its
// addresses of the pod's families are announced, as far as the pod waits for that. What a speaker said counts while
// there is none for as long as a pod may wait: it is back sooner, or does not come back. Until then, an address that is
// new does not count as announced.
func (p *proxy) standing(key, of lb.Key, pod *gatedPod, now time.Time) (s plan.Standing, counts bool) {
	if s.Programmed, counts = p.programs(key, of, pod); !s.Programmed {
		return s, counts
	}
	if until := p.heeds(); !until.IsZero() && !now.Before(until) {
		return s, counts
	}
	r := p.records[key]
	s.VIP, s.Unannounced = plan.Awaited(r.applied, p.whyUnannounced, func(family lb.Family) bool {
		return slices.ContainsFunc(pod.Addrs, func(a netip.Addr) bool { return lb.FamilyOf(a) == family && r.delivers[a] })
	})
	return s, counts
}

// whyUnannounced says why this node does not announce a VIP yet; the zero value if there is nothing to wait for.
func (p *proxy) whyUnannounced(vip netip.Addr) lb.Unannounced {
	why, said := p.unannounced[vip]
	if !said && !p.unspoken.IsZero() && !p.unnamed[vip] {
		return lb.Unannounced{Reason: lb.ReasonUnheard}
	}
	return why
}

// programs reports whether the rules of a Service deliver to a pod, in each family in which the node serves the Service
// and that selects the pod, or names its address. The Service does not count if another proxy serves it, there is none
// of that name, or it can never name the pod.
func (p *proxy) programs(key, of lb.Key, pod *gatedPod) (programmed, counts bool) {
	r := p.records[key]
	if r == nil || !slices.ContainsFunc(pod.Addrs, func(a netip.Addr) bool {
		return slices.Contains(r.families, lb.FamilyOf(a))
	}) {
		return false, false
	}
	if !p.written || r.pending() || r.failure != nil {
		return false, true
	}
	if r.delivers == nil {
		r.delivers = r.applied.Endpoints()
	}
	for _, a := range pod.Addrs {
		switch family := lb.FamilyOf(a); {
		case r.delivers[a]:
			programmed = true
		case slices.Contains(r.families, family) && slices.Contains(p.families, family) &&
			(pod.selected[key] || p.gates.naming[place{of, a}][key]):
			return false, true
		}
	}
	return programmed, true
}
