package main

import (
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// mark notes that something of a Service has changed. It never blocks.
func (p *proxy) mark(key lb.Key) {
	p.dirtyMu.Lock()
	if _, ok := p.dirty[key]; !ok {
		p.dirty[key] = p.now()
	}
	p.dirtyMu.Unlock()
	p.runner.Poke()
}

// markAll notes that every Service has to be planned again.
func (p *proxy) markAll(at time.Time) { p.markThose(p.from.services.Keys(), at) }

// markThose notes that the named Services have to be planned again.
func (p *proxy) markThose(keys []lb.Key, at time.Time) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for _, key := range keys {
		if _, ok := p.dirty[key]; !ok {
			p.dirty[key] = at
		}
	}
}

func (p *proxy) takeDirty() map[lb.Key]time.Time {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	dirty := p.dirty
	p.dirty = map[lb.Key]time.Time{}
	return dirty
}
