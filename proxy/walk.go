package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/path"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// maxTargets is how many endpoints of one Service are looked at, those of this node before others. The
// others count as reached.
const maxTargets = 4096

// walk takes in what has become of the way to endpoints, and returns the Services of which that
// decides something. Those whose endpoints are concerned become dirty.
func (p *proxy) walk(now time.Time) map[lb.Key]bool {
	news, own := path.News{}, p.facts.object.Addresses
	p.walked = true
	if p.from.path != nil {
		news, p.walked = p.from.path()
	}
	concerned := news.Services
	switched := (news.Off == nil) != (p.path.Off == nil)
	if switched || !slices.Equal(own, p.path.Own) {
		concerned = make(map[lb.Key]bool, len(p.records))
		for key := range p.records {
			concerned[key] = true
		}
	}
	switch {
	case !switched:
	case news.Off != nil:
		p.log.Warn("this node delivers nothing", "reason", news.Off.Reason, "message", news.Off.Message)
	default:
		p.log.Info("this node delivers again", "reason", p.path.Off.Reason)
	}
	p.lost = p.lost.After(news.Lost)
	for key := range news.Services {
		if r := p.records[key]; r != nil && len(r.live.VIPs) > 0 { // told at once, also if its plan has to wait
			r.lost = p.unreached(key)
		}
	}
	p.path.Off, p.path.Own = news.Off, own
	p.markThose(slices.Collect(maps.Keys(news.Services)), now)
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

// unreached returns which endpoints of a Service the kernel does not reach, and why.
func (p *proxy) unreached(key lb.Key) map[netip.Addr]*lb.Refusal {
	if len(p.lost) == 0 {
		return nil
	}
	endpoints, _ := p.from.slices.Get(key)
	return p.lost.Of(p.clusterNodes.Targets(endpoints, p.self, maxTargets))
}

// unreaching returns the Services with endpoints that the kernel does not reach: which are pods, the Nodes decide too.
func (p *proxy) unreaching() (keys []lb.Key) {
	for key, r := range p.records {
		if r.lost != nil {
			keys = append(keys, key)
		}
	}
	return keys
}

// along returns the path behind the rules of the Service.
func (r *record) along(path plan.Path) plan.Path {
	path.Lost = r.lost
	return path
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
