package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ringMemory is how long a node stays in the ring that announces a VIP no more: as long as the
// proxies remember a silent connection.
const ringMemory = time.Hour

// rings are, for each VIP that routers spread over nodes, the other nodes that may hold connections
// to it: when the set of nodes changes that announce it, routers move connections also between
// nodes that stay. All is noted all the time, so that the proxy is ready before that happens.
type rings struct {
	self  string
	nodes table[string, lb.Node]
	dead  []string
	of    map[netip.Addr]*ring
	peers map[string][]netip.Addr     // the other nodes, as they were last arranged
	told  map[netip.Addr][]netip.Addr // as the proxy is told; nil if it has to be made anew
}

// ring is what is known of one VIP.
type ring struct {
	announce map[string]bool      // the other nodes that do so now
	last     map[string]time.Time // when each was last known to
	routed   time.Time            // when some node was last known to announce it over BGP
	next     []netip.Addr         // never changed in place
}

func newRings(self string) rings { return rings{self: self, of: map[netip.Addr]*ring{}} }

// meet takes in which nodes there are, and which of them are dead, and tells whether that differs.
func (r *rings) meet(nodes table[string, lb.Node], dead []string, peers map[string][]netip.Addr) (changed bool) {
	same := slices.Equal(r.dead, dead) && (peers == nil || maps.EqualFunc(r.peers, peers, slices.Equal))
	r.nodes, r.dead = nodes, dead
	if same {
		return false
	}
	if peers != nil {
		r.peers = peers
	}
	for vip, ring := range r.of {
		r.arrange(vip, ring)
	}
	return true
}

// note takes in what other nodes say of a VIP, and whether this one announces it over BGP. With
// possible set, BGP is for the VIP, as far as is known.
func (r *rings) note(now time.Time, vip netip.Addr, claims map[string]lb.Claim, own, possible bool) {
	k := r.of[vip]
	if k == nil {
		k = &ring{last: map[string]time.Time{}}
	}
	announce := map[string]bool{}
	for node, claim := range claims {
		own = own || claim.Routes != ""
		if claim.Answering || claim.Routes != "" {
			announce[node] = true
			k.last[node] = now
		}
	}
	for node := range k.announce {
		k.last[node] = now
	}
	maps.DeleteFunc(k.last, func(_ string, t time.Time) bool { return now.Sub(t) > ringMemory })
	k.announce = announce
	if own {
		k.routed = now
	}
	if now.Sub(k.routed) > ringMemory {
		if !possible {
			r.forget(vip)
			return
		}
		k.last = map[string]time.Time{} // whoever answers over ARP is a former owner
	}
	if r.of[vip] == nil {
		r.of[vip], r.told = k, nil
	}
	r.arrange(vip, k)
}

func (r *rings) forget(vip netip.Addr) {
	if r.of[vip] != nil {
		delete(r.of, vip)
		r.told = nil
	}
}

// arrange puts the nodes of a ring into their order, from this one on.
func (r *rings) arrange(vip netip.Addr, k *ring) {
	family := lb.FamilyOf(vip)
	var next []netip.Addr
	for name := range k.last {
		node, _ := r.nodes.Get(name)
		if addr, ok := addressOf(node, family); ok && !slices.Contains(r.dead, name) {
			next = append(next, addr)
		}
	}
	slices.SortFunc(next, netip.Addr.Compare)
	own, _ := r.nodes.Get(r.self)
	if self, ok := addressOf(own, family); ok {
		i, _ := slices.BinarySearchFunc(next, self, netip.Addr.Compare)
		next = slices.Concat(next[i:], next[:i])
	}
	next = next[:min(len(next), lb.MaxRing)]
	if !slices.Equal(next, k.next) {
		k.next, r.told = next, nil
	}
}

// all returns the rings as the proxy is told. What it returns is never changed.
func (r *rings) all() map[netip.Addr][]netip.Addr {
	if r.told == nil {
		r.told = make(map[netip.Addr][]netip.Addr, len(r.of))
		for vip, k := range r.of {
			r.told[vip] = k.next
		}
	}
	return r.told
}
