package main

import (
	"maps"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// maxTargets is how many endpoints of one Service are looked at, those of this node before others. The
// others count as reached.
const maxTargets = 4096

// walk takes in what has become of the way to endpoints, and returns the Services of which that
// decides something. Those whose endpoints are concerned become dirty.
func (p *proxy) walk(now time.Time) map[lb.Key]bool {
	if p.from.path == nil {
		p.walked = true
		return nil
	}
	news, known := p.from.path()
	p.walked = known
	concerned := news.Services
	if (news.Off == nil) != (p.path.Off == nil) {
		concerned = maps.Clone(concerned)
		if concerned == nil {
			concerned = map[lb.Key]bool{}
		}
		for key := range p.records {
			concerned[key] = true
		}
		if news.Off != nil {
			p.log.Warn("this node delivers nothing", "reason", news.Off.Reason, "message", news.Off.Message)
		} else {
			p.log.Info("this node delivers again", "reason", p.path.Off.Reason)
		}
	}
	p.path = p.path.After(news.Lost)
	p.path.Off = news.Off
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for key := range news.Services {
		p.add(key, dirt{since: now})
	}
	return concerned
}

// target tells which endpoints the named Services have, if they have VIPs.
func target[V any](p *proxy, keys map[lb.Key]V) {
	if p.to.targets == nil {
		return
	}
	changes := make(map[lb.Key][]plan.Target, len(keys))
	for key := range keys {
		changes[key] = nil
		if r := p.records[key]; r == nil || len(r.live.VIPs) == 0 {
			continue
		}
		endpoints, _ := p.from.slices.Get(key)
		changes[key] = p.clusterNodes.Targets(endpoints, p.self, maxTargets)
	}
	if p.begun {
		p.to.targets.Update(changes)
	} else {
		p.to.targets.Begin(changes)
	}
}

// with returns the Services of both that have records: those whose plans have changed, and those that
// are reached otherwise than before, also if their rules stay as they are.
func (p *proxy) with(touched, walked map[lb.Key]bool) map[lb.Key]bool {
	if len(walked) == 0 {
		return touched
	}
	both := maps.Clone(touched)
	for key := range walked {
		if p.records[key] != nil {
			both[key] = true
		}
	}
	return both
}
