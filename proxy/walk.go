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
	p.lost.Take(news.Lost, p.counts.unreached)
	for key := range news.Services {
		if r := p.records[key]; r != nil { // told at once, also if its plan has to wait
			r.lost = p.lost.Of(r.targets)
		}
	}
	p.path.Off, p.path.Own = news.Off, own
	p.markThose(slices.Collect(maps.Keys(news.Services)), now)
	return concerned
}

// retarget tells of which endpoints of the named Services the way has to be known, where they are others than before.
func (p *proxy) retarget(keys map[lb.Key]time.Time) {
	if p.to.targets == nil {
		return
	}
	changes := map[lb.Key][]plan.Target{}
	for key := range keys {
		if r := p.records[key]; r != nil && !slices.Equal(r.targets, r.toldTargets) {
			r.toldTargets = r.targets
			changes[key] = r.targets
		}
	}
	switch {
	case !p.begun:
		p.to.targets.Begin(changes)
	case len(changes) > 0:
		p.to.targets.Update(changes)
	}
}

// targets returns of which endpoints the way has to be known: of none if a Service has no VIP, or is not served.
func (p *proxy) targets(s plan.Service, endpoints []lb.Slice) []plan.Target {
	if p.to.targets == nil || len(s.VIPs) == 0 || len(s.Ports) == 0 {
		return nil
	}
	return p.clusterNodes.Targets(endpoints, p.self, maxTargets)
}

// targeting returns the Services with a target at one of some addresses.
func (p *proxy) targeting(addrs map[netip.Addr]bool) (keys []lb.Key) {
	for key, r := range p.records {
		if slices.ContainsFunc(r.targets, func(t plan.Target) bool { return addrs[t.Addr] }) {
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
