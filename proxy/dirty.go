package main

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const (
	// tellFrontends is how many frontends the Services have that are told at once for whose sake they are refused some: as
	// many as one Service may have.
	tellFrontends = 1 << 14
	// tellService is how many frontends a Service counts for besides.
	tellService = 16
)

// mark notes that a Service has changed. It never blocks.
func (p *proxy) mark(key lb.Key) {
	p.markThose([]lb.Key{key}, p.now())
	p.runner.Poke()
}

// markEndpoints notes that endpoints of a Service have changed. It never blocks.
func (p *proxy) markEndpoints(key lb.Key) {
	if key == apiServers {
		p.factsChanged.Store(true) // no probe may ask them, and no external IP be one
	}
	p.mark(key)
}

// markAll notes that every Service has to be planned again.
func (p *proxy) markAll(at time.Time) { p.markThose(p.from.services.Keys(), at) }

// markThose notes that the named Services have to be planned again.
func (p *proxy) markThose(keys []lb.Key, at time.Time) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for _, key := range keys {
		delete(p.tell, key) // its plan tells it
		if since, waits := p.dirty[key]; !waits || at.Before(since) {
			p.dirty[key] = at
		}
	}
}

// waits reports whether a Service has changed and is not planned yet.
func (p *proxy) waits(key lb.Key) bool {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	_, waits := p.dirty[key]
	return waits
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

// takeDirty returns the Services that are to be planned now, and since when, and those that are only to be told for
// whose sake they are refused frontends. Large ones come one at a time, whatever has changed of them, and let the
// others go first, once: so a Service waits for the plan of one of them at most, and they for one step of the others
// each. Those that are told wait for the same step, and come some at a time: however many ask for a frontend, that it
// changes hands costs two of them.
func (p *proxy) takeDirty() (taken map[lb.Key]time.Time, told []lb.Key) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	taken = make(map[lb.Key]time.Time, len(p.dirty))
	large := map[lb.Key]time.Time{}
	for key, since := range p.dirty {
		if p.begun && p.large(key) {
			large[key] = since
		} else {
			taken[key] = since
		}
	}
	p.dirty = large
	waiting := len(large)+len(p.tell) > 0
	if p.yielded = waiting && len(taken) > 0 && !p.yielded; !p.yielded && waiting {
		if len(large) > 0 {
			next := p.nextLarge(large)
			taken[next] = large[next]
			delete(large, next)
		}
		told = p.takeTold()
	}
	if len(large)+len(p.tell) > 0 {
		p.runner.Poke()
	}
	return taken, told
}

// nextLarge returns which of the large Services that wait is planned next. Their namespaces take turns, and of each the
// one comes first that has waited longest.
func (p *proxy) nextLarge(waiting map[lb.Key]time.Time) lb.Key {
	later := func(key lb.Key) int { // 1 until all namespaces that come behind it in order have had their turn
		if key.Namespace <= p.turn {
			return 1
		}
		return 0
	}
	next := slices.MinFunc(slices.Collect(maps.Keys(waiting)), func(a, b lb.Key) int {
		return cmp.Or(cmp.Compare(later(a), later(b)), cmp.Compare(a.Namespace, b.Namespace),
			waiting[a].Compare(waiting[b]), a.Compare(b))
	})
	p.turn = next.Namespace
	return next
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

// large reports whether the plan of a Service takes long, or writing it. Of one that is gone only what it had counts.
func (p *proxy) large(key lb.Key) bool {
	svc, exists := p.from.services.Get(key)
	endpoints, _ := p.from.slices.Get(key)
	r := p.records[key]
	return exists && plan.IsLarge(svc, endpoints, p.settings.scheduler) || r != nil && r.live.IsLarge()
}
