package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// hear takes over what the speaker says now, and makes the Services dirty that have endpoints on a
// node of which it says something else than before. Without a speaker nobody is dead, and addresses
// are as they were: those that have moved stay where they are.
func (p *proxy) hear(now time.Time) {
	n, ok := p.from.update()
	if ok {
		p.previous, p.ring = succeed(p.previous, n.Previous), succeed(p.ring, n.Ring)
		p.to.rescue.Set(rescue.Desired{Previous: p.previous, Ring: p.ring, Gone: n.Gone})
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
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for key, all := range p.from.slices.All() {
		if _, marked := p.dirty[key]; !marked && on(all, changed) {
			p.dirty[key] = now
		}
	}
}

// succeed returns where connections to VIPs may be known: what is said of each now, or else what
// was said of it before.
func succeed(before, now map[netip.Addr][]netip.Addr) map[netip.Addr][]netip.Addr {
	previous := make(map[netip.Addr][]netip.Addr, len(now))
	for vip, nodes := range now {
		if len(nodes) == 0 {
			nodes = before[vip]
		}
		if len(nodes) > 0 {
			previous[vip] = nodes
		}
	}
	return previous
}

// on reports whether there are endpoints on some of the nodes.
func on(all []lb.Slice, nodes map[string]bool) bool {
	return slices.ContainsFunc(all, func(s lb.Slice) bool {
		return slices.ContainsFunc(s.Endpoints, func(ep lb.Endpoint) bool { return nodes[ep.Node] })
	})
}
