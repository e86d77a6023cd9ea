package main

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// plan plans the dirty Services, and those on which their plans bear, or that are told, which become dirty too. It
// returns those whose plans changed. Each Service is progress: at the start there may be many large ones.
func (p *proxy) plan(ctx context.Context, dirty map[lb.Key]time.Time, concerned []lb.Key,
	now time.Time) map[lb.Key]bool {
	var told []lb.Key
	live := func(keys []lb.Key) {
		for _, key := range keys {
			others, losers := p.planLive(key, now)
			loop.Progress(ctx)
			concerned, told = append(concerned, others...), append(told, losers...)
		}
	}
	keys := p.order(dirty)
	live(keys)
	if !p.begun { // some that wait may have had a place, and have grown
		p.relayShares.Loading(true)
		live(slices.DeleteFunc(keys, func(key lb.Key) bool { return !p.relayShares.Waits(key) }))
		p.relayShares.Loading(false)
	}
	for _, key := range append(concerned, p.lingers.changed(now, p.claims)...) {
		if _, ok := dirty[key]; !ok {
			dirty[key] = now
		}
	}
	p.markTold(slices.DeleteFunc(told, func(key lb.Key) bool { return !dirty[key].IsZero() }), now)
	// Once for all, as it goes through all that wait.
	for _, shares := range []interface{ Next() *lb.Key }{p.shares, p.relayShares, p.affinity} {
		if next := shares.Next(); next != nil {
			p.mark(*next)
		}
	}
	touched := map[lb.Key]bool{}
	var early []lb.Key // to be told when Services are planned that may give up what these ask for
	for key, since := range dirty {
		loop.Progress(ctx)
		r := p.records[key]
		planned := p.claims.Grant(r.live)
		if len(planned.Denied) > 0 && p.claims.Awaits(key, p.waits) {
			early = append(early, key)
		} else {
			p.advise(r, planned)
		}
		if p.lingers.policy(key) {
			planned = planned.AsCluster()
		}
		planned = planned.WithLingering(slices.Concat(p.lingers.of(key)...))
		if p.replan(r, planned, since) {
			touched[key] = true
		} else if !r.pending() {
			r.programming = time.Time{} // it changed nothing here
		}
	}
	p.markTold(early, now)
	return touched
}

// order returns Services in the order in which they are planned: at the start the oldest first, as no Service has a
// place in its namespace yet, neither among the rules nor at the relay.
func (p *proxy) order(dirty map[lb.Key]time.Time) []lb.Key {
	keys := slices.SortedFunc(maps.Keys(dirty), lb.Key.Compare)
	if p.begun || p.shares.Limit() == 0 && !p.settings.relay {
		return keys
	}
	created := make(map[lb.Key]time.Time, len(keys))
	for _, key := range keys {
		svc, _ := p.from.services.Get(key)
		created[key] = svc.Created
	}
	slices.SortStableFunc(keys, func(a, b lb.Key) int { return created[a].Compare(created[b]) })
	return keys
}

// planLive plans one Service by what the API server has, and lets the VIPs that it loses linger. It
// returns the other Services on whose frontends that bears, and those that may have to be told something else.
func (p *proxy) planLive(key lb.Key, now time.Time) (concerned, told []lb.Key) {
	r := p.records[key]
	if r == nil {
		r = &record{live: plan.Service{Key: key}, planned: plan.Service{Key: key}, applied: plan.Service{Key: key}}
		p.records[key] = r
		p.counts.add(r, 1)
	}
	whole := plan.Service{Key: key}
	svc, ok := p.from.services.Get(key)
	named, _ := p.from.slices.Get(key)
	endpoints, crowded := named, plan.Crowded(named)
	if crowded { // nobody looks at others than those that it had
		endpoints = r.had().Listed(named)
	}
	endpoints = p.admit(key, svc.Selector, endpoints)
	if !crowded {
		named = plan.Without(endpoints, p.dead)
	}
	if ok {
		whole = plan.New(svc, named, p.nodeFor(svc))
		r.trigger(endpoints, p.began)
	}
	// They decide what it needs.
	whole.Places = p.affinity.Set(key, whole.Age, whole.AffinityTimeout > 0 && r.hasPorts(whole))
	if whole, endpoints = p.freeze(r, whole, svc, endpoints); len(whole.Ports) == 0 {
		if whole.Places != plan.NoPlaces { // who has none waits for some
			p.affinity.Set(key, whole.Age, false)
		}
		whole.Places = plan.ManyPlaces
	}
	live := whole
	r.targets = p.targets(live, endpoints)
	r.lost = p.lost.Of(r.targets)
	live = live.Reaching(r.lost)
	live = p.answering(r, svc, endpoints, live)
	if gone := plan.Withdrawn(r.planned, live); len(gone) > 0 && p.settings.drain > 0 {
		p.lingers.add(key, gone, now.Add(p.settings.drain))
	}
	if plan.Tightened(r.live, live) && p.settings.drain > 0 {
		p.lingers.addPolicy(key, now.Add(p.settings.drain))
	}
	if r.relayRefused = ""; live.Relay {
		r.relayRefused = plan.RefuseRelay(endpoints, p.scope)
	}
	p.relayRoom(r, live)
	if r.relayRefused != "" {
		live.Relay, live.ProxyProtocol = false, 0
	}
	if r.whole = nil; !live.Equal(whole) {
		r.whole = &whole
	}
	if !r.live.Equal(live) { // else they are worth keeping once
		r.live, r.families = live, live.Families()
	}
	if svc.Forwarding != "" || p.direct.asking[key] || len(p.direct.held[key]) > 0 {
		p.forward(r, svc, endpoints, now)
	}
	return p.claims.Set(r.live)
}

// freeze returns the plan of a Service and its endpoints cut down to what it had, if it is too large, and else
// as they are. What routes and probes leave out of a plan it still has.
func (p *proxy) freeze(r *record, now plan.Service, svc lb.Service, endpoints []lb.Slice) (plan.Service, []lb.Slice) {
	tooLarge, before := r.tooLarge, r.asked()
	r.tooLarge = nil
	if tooLarge != nil && now.Excess == nil && now.Equal(before) {
		now.Excess = tooLarge
	}
	if now.Excess == nil {
		now.Excess = p.room(now)
	}
	if now.Excess == nil {
		if r.live.Excess != nil && r.live.Excess.Together {
			r.fit = nil // what it has got in the meantime is what it has
		} // else fit stays, as the kernel's writer may refuse it
		return now, endpoints
	}
	if r.fit == nil {
		r.fit = &before
	}
	frozen := r.had().Frozen(now, svc, plan.Without(endpoints, p.dead), p.nodeFor(svc))
	if !now.Excess.Together {
		_ = p.room(frozen) // it waits for no more
	}
	return frozen, r.had().Listed(endpoints)
}

// asked returns the last plan with what routes and probes leave out of it.
func (r *record) asked() plan.Service {
	if r.whole != nil {
		return *r.whole
	}
	return r.live
}

// had returns the last plan with which the Service was not too large.
func (r *record) had() plan.Service {
	if r.fit != nil {
		return *r.fit
	}
	return r.asked()
}

// hasPorts reports whether a Service has ports, or is too large and may keep those that it had.
func (r *record) hasPorts(now plan.Service) bool {
	if had := r.had(); now.Excess != nil && now.UID == had.UID {
		return len(had.Ports) > 0
	}
	return len(now.Ports) > 0
}

// room says why there is no room for a Service among those of its namespace; nil if there is.
func (p *proxy) room(s plan.Service) *plan.TooLarge {
	if p.shares.Limit() == 0 {
		return nil
	}
	needs := p.settings.needs(s)
	if p.shares.Set(s.Key, s.Age, needs) == plan.Room {
		return nil
	}
	return &plan.TooLarge{Elements: needs, Limit: p.shares.Limit(), Of: p.settings.unit, Together: true}
}

// relayRoom refuses to relay a Service for which its namespace or the node has no room at the relay. One that asks for
// the relay keeps its place while it has no usable endpoint, as between the pods of a Deployment with one replica.
func (p *proxy) relayRoom(r *record, s plan.Service) {
	before := r.relayNeeds
	if r.relayNeeds = 0; s.Relay && r.relayRefused == "" {
		if r.relayNeeds = plan.RelayNeeds(s); r.relayNeeds == 0 {
			r.relayNeeds = p.relayShares.Held(s.Key)
		}
	}
	if before == 0 && r.relayNeeds == 0 {
		return
	}
	if lack := p.relayShares.Set(s.Key, s.Age, r.relayNeeds); lack != plan.Room {
		r.relayRefused = plan.RefuseRelayFor(r.relayNeeds, lack, p.relayShares)
	}
}

// sized takes in whether the kernel's writer finds a Service too large, which then gets what it had. If
// that is unknown, as after a restart, the kernel keeps what it has.
func (p *proxy) sized(r *record) (frozen bool) {
	var tooLarge plan.TooLarge
	switch {
	case r.planned.Excess != nil || r.pending() && r.failure == nil:
	case r.failure == nil:
		r.fit = nil
	case errors.As(r.failure, &tooLarge) && len(r.applied.Ports) > 0 && r.applied.UID == r.live.UID:
		if r.fit == nil {
			before := r.applied
			r.fit = &before
		}
		r.tooLarge = &tooLarge
		p.mark(r.live.Key)
		return true
	}
	return false
}

// sameExcess reports whether a Service is told the same of its size, whatever the figures are.
func sameExcess(a, b *plan.TooLarge) bool {
	return (a == nil) == (b == nil) && (a == nil || a.Together == b.Together)
}

// replan notes a new plan, and returns whether it differs from the one before.
func (p *proxy) replan(r *record, planned plan.Service, since time.Time) bool {
	same := planned.Policy == r.planned.Policy && slices.Equal(planned.VIPs, r.planned.VIPs) &&
		slices.Equal(planned.Denied, r.planned.Denied) && sameExcess(planned.Excess, r.planned.Excess)
	for i, family := range allFamilies {
		if plan.SameRules(r.planned, planned, family) {
			continue
		}
		same = false
		if r.since[i].IsZero() {
			r.since[i] = since
			p.unconfirmed[planned.Key] = true
		}
	}
	r.planned = planned
	return !same
}
