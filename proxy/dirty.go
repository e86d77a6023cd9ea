package main

import (
	"cmp"
	"maps"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// dirt is what has changed of a Service: since when, and whether it is its endpoints alone, or which of them
// this node uses. With told it is only which Service has the frontends that this one is refused.
type dirt struct {
	since           time.Time
	endpoints, told bool
}

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
	if before, ok := p.dirty[key]; ok {
		if d.told && !before.told || d.told == before.told && before.since.Before(d.since) {
			d.since = before.since // to wait to be told is not to wait for the kernel
		}
		d.endpoints, d.told = d.endpoints && before.endpoints, d.told && before.told
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
	if len(keys) > 0 {
		p.addAll(keys, dirt{since: at, endpoints: true, told: true})
		p.runner.Poke()
	}
}

func (p *proxy) addAll(keys []lb.Key, d dirt) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for _, key := range keys {
		p.add(key, d)
	}
}

// takeDirty returns the Services that are to be planned now, and since when. Large ones of which only
// endpoints have changed come one at a time, and let the others go first, once: so a Service waits for
// the plan of one of them at most, and they for one step of the others each. After those come, likewise, Services
// that are only to be told something else: however many ask for a frontend, its change of hands costs two of them.
// Where frontends may have changed hands nobody waits, as one Service's loss is another's gain.
func (p *proxy) takeDirty() map[lb.Key]time.Time {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	taken := make(map[lb.Key]time.Time, len(p.dirty))
	large := map[lb.Key]dirt{}
	var next lb.Key // the one of them that has waited longest
	for key, d := range p.dirty {
		if !p.begun || !d.endpoints || !d.told && !p.large(key) {
			taken[key] = d.since
			continue
		}
		if first, any := large[next]; !any || d.before(key, first, next) {
			next = key
		}
		large[key] = d
	}
	p.dirty = map[lb.Key]dirt{}
	if p.yielded = len(large) > 0 && len(taken) > 0 && !p.yielded; !p.yielded && len(large) > 0 {
		taken[next] = large[next].since
		delete(large, next)
	}
	maps.Copy(p.dirty, large)
	if len(large) > 0 {
		p.runner.Poke()
	}
	return taken
}

// before reports whether the dirt of one Service is taken before that of another, of those that wait.
func (d dirt) before(key lb.Key, other dirt, otherKey lb.Key) bool {
	if d.told != other.told {
		return other.told
	}
	return cmp.Or(d.since.Compare(other.since), key.Compare(otherKey)) < 0
}

func (p *proxy) large(key lb.Key) bool {
	endpoints, _ := p.from.slices.Get(key)
	return plan.IsLarge(endpoints)
}
