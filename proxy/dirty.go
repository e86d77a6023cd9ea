package main

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// dirt is what has changed of a Service: since when, and whether it is its endpoints alone, or which of them
// this node uses.
type dirt struct {
	since     time.Time
	endpoints bool
}

const (
	// tellFrontends is how many frontends the Services have that are told at once for whose sake they are refused some: as
	// many as one Service may have.
	tellFrontends = 1 << 14
	// tellService is how many frontends a Service counts for besides.
	tellService = 16
)

// mark notes that a Service has changed. It never blocks.
func (p *proxy) mark(key lb.Key) { p.note(key, false) }

// markEndpoints notes that endpoints of a Service have changed. It never blocks.
func (p *proxy) markEndpoints(key lb.Key) {
	if key == apiServers {
		p.factsChanged.Store(true) // no probe may ask them, and no external IP be one
	}
	p.note(key, true)
}

func (p *proxy) note(key lb.Key, endpoints bool) {
	p.dirtyMu.Lock()
	p.add(key, dirt{since: p.now(), endpoints: endpoints})
	p.dirtyMu.Unlock()
	p.runner.Poke()
}

// add adds to what is dirty. Its caller holds dirtyMu.
func (p *proxy) add(key lb.Key, d dirt) {
	delete(p.tell, key) // its plan tells it
	if before, ok := p.dirty[key]; ok {
		if before.since.Before(d.since) {
			d.since = before.since
		}
		d.endpoints = d.endpoints && before.endpoints
	}
	p.dirty[key] = d
}

// markAll notes that every Service has to be planned again.
func (p *proxy) markAll(at time.Time) { p.markThose(p.from.services.Keys(), at) }

// markThose notes that the named Services have to be planned again.
func (p *proxy) markThose(keys []lb.Key, at time.Time) { p.addAll(keys, dirt{since: at}) }

// markEndpointsOf notes that this node is to use other endpoints of the named Services. No frontend changes
// hands by that.
func (p *proxy) markEndpointsOf(keys []lb.Key, at time.Time) {
	p.addAll(keys, dirt{since: at, endpoints: true})
}

// markTold notes that other Services than before may have the frontends that the named ones are refused.
func (p *proxy) markTold(keys []lb.Key, at time.Time) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for _, key := range keys {
		_, waits := p.tell[key]
		if _, changed := p.dirty[key]; !changed && !waits {
			p.tell[key] = at
			p.runner.Poke()
		}
	}
}

func (p *proxy) addAll(keys []lb.Key, d dirt) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for _, key := range keys {
		p.add(key, d)
	}
}

// takeDirty returns the Services that are to be planned now, and since when, and those that are only to be told for
// whose sake they are refused frontends. Large ones of which only endpoints have changed come one at a time, and let
// the others go first, once: so a Service waits for the plan of one of them at most, and they for one step of the
// others each. Those that are told wait for the same step, and come some at a time: however many ask for a frontend,
// that it changes hands costs two of them. Where it may have changed hands nobody waits, as one Service's loss is
// another's gain.
func (p *proxy) takeDirty() (taken map[lb.Key]time.Time, told []lb.Key) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	taken = make(map[lb.Key]time.Time, len(p.dirty))
	large := map[lb.Key]dirt{}
	var next lb.Key // the one of them that has waited longest
	for key, d := range p.dirty {
		if !p.begun || !d.endpoints || !p.large(key) {
			taken[key] = d.since
			continue
		}
		if first, any := large[next]; !any || cmp.Or(d.since.Compare(first.since), key.Compare(next)) < 0 {
			next = key
		}
		large[key] = d
	}
	p.dirty = large
	waiting := len(large)+len(p.tell) > 0
	if p.yielded = waiting && len(taken) > 0 && !p.yielded; !p.yielded && waiting {
		if d, any := large[next]; any {
			taken[next] = d.since
			delete(large, next)
		}
		told = p.takeTold()
	}
	if len(large)+len(p.tell) > 0 {
		p.runner.Poke()
	}
	return taken, told
}

// takeTold returns the Services that are told next, those first that have waited longest: as many as have
// tellFrontends frontends, and one at least.
func (p *proxy) takeTold() (told []lb.Key) {
	room := p.tellFrontends
	for _, key := range slices.SortedFunc(maps.Keys(p.tell), func(a, b lb.Key) int {
		return cmp.Or(p.tell[a].Compare(p.tell[b]), a.Compare(b))
	}) {
		if room <= 0 {
			break
		}
		delete(p.tell, key)
		if r := p.records[key]; r != nil { // else it is gone
			told = append(told, key)
			room -= tellService + r.live.CountFrontends()
		}
	}
	return told
}

func (p *proxy) large(key lb.Key) bool {
	endpoints, _ := p.from.slices.Get(key)
	return plan.IsLarge(endpoints)
}
