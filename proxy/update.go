package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// hear takes over the speaker's latest update. It marks as dirty each Service with an endpoint on a
// node that has died or come back. Without a speaker no node counts as dead, and what is known of
// addresses stays.
func (p *proxy) hear(now time.Time) {
	n, ok := p.from.update()
	if ok {
		p.follow(n)
	}
	switch {
	case ok && n.Gates:
		p.spoke, p.unspoken = true, time.Time{}
	case p.unspoken.IsZero():
		p.unspoken, p.unnamed = now, p.unnamedVIPs()
	}
	dead := make(map[string]bool, len(n.Dead))
	for _, node := range n.Dead {
		dead[node] = true
	}
	changed := map[string]bool{}
	for node := range dead {
		if !p.dead[node] {
			changed[node] = true
		}
	}
	for node := range p.dead {
		if !dead[node] {
			changed[node] = true
		}
	}
	p.dead = dead
	if len(changed) == 0 {
		return
	}
	p.log.Info("the speaker reports dead nodes", "nodes", n.Dead)
	var keys []lb.Key
	for key, all := range p.from.slices.All() {
		if on(all, changed) {
			keys = append(keys, key)
		}
	}
	p.markThose(keys, now)
}

// unnamedVIPs returns the VIPs of which the speaker has said nothing, as those that another load balancer announces.
// In the first step there are none, as no Service is known yet.
func (p *proxy) unnamedVIPs() map[netip.Addr]bool {
	unnamed := map[netip.Addr]bool{}
	for _, r := range p.records {
		for _, vip := range r.applied.VIPs {
			if _, said := p.unannounced[vip]; !said {
				unnamed[vip] = true
			}
		}
	}
	return unnamed
}

// follow passes on where connections to VIPs may be known: what is said of each now, or else what
// was said of it before.
func (p *proxy) follow(n lb.FeedUpdate) {
	changes := make(map[netip.Addr]*rescue.Origins, len(n.Previous)+len(n.Ended))
	for _, vip := range n.Ended {
		delete(p.origins, vip)
		delete(p.unannounced, vip)
		changes[vip] = nil
	}
	for vip, previous := range n.Previous {
		if n.Gates {
			p.unannounced[vip] = n.Unannounced[vip]
		}
		ring, spread := n.Ring[vip]
		now, before := rescue.Origins{Previous: previous, Ring: ring}, p.origins[vip]
		if len(previous) == 0 {
			now.Previous = before.Previous
		}
		if spread && len(ring) == 0 {
			now.Ring = before.Ring
		}
		p.origins[vip] = now
		changes[vip] = p.originsOf(vip)
	}
	p.to.rescue.SetGone(n.Gone, n.CutOff)
	if !p.heard {
		p.heard = true
		p.to.rescue.Begin(changes)
	} else if len(changes) > 0 {
		p.to.rescue.Update(changes)
	}
	p.to.rescue.Confirm(n.Number)
}

// on reports whether there are endpoints on some of the nodes.
func on(all []lb.Slice, nodes map[string]bool) bool {
	return slices.ContainsFunc(all, func(s lb.Slice) bool {
		return slices.ContainsFunc(s.Endpoints, func(ep lb.Endpoint) bool { return nodes[ep.Node] })
	})
}
