package main

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// formers are, for each VIP, the other node that answered for it last: the one that may hold
// connections to it which this node does not know, if it is this node that clients turn to. It is
// noted all the time, so that the proxy is ready before the VIP moves here.
type formers map[netip.Addr]string

// note takes in what other nodes say of a VIP, and who owns it, and tells whether another node is
// the former now.
func (f formers) note(vip netip.Addr, claims map[string]lb.Claim, owner string) (changed bool) {
	before := f[vip]
	var answering []string
	for node, claim := range claims {
		if claim.Answering {
			answering = append(answering, node)
		}
	}
	switch {
	case slices.Contains(answering, owner):
		f[vip] = owner
	case len(answering) > 0 && !slices.Contains(answering, f[vip]):
		f[vip] = slices.Min(answering)
	}
	return f[vip] != before
}

// notice is what the proxy is told: of each VIP, even if nobody is known to have answered for it,
// so that what an earlier speaker said goes on.
func (f formers) notice(vips iter.Seq[netip.Addr], dead []string, nodes map[string]lb.Node) lb.FeedNotice {
	n := lb.FeedNotice{Dead: dead, Former: map[netip.Addr][]netip.Addr{}}
	for _, name := range dead {
		n.Gone = append(n.Gone, nodes[name].Addresses...)
	}
	for vip := range vips {
		n.Former[vip] = []netip.Addr{}
		if addr, ok := addressOf(nodes[f[vip]], lb.FamilyOf(vip)); ok && !slices.Contains(dead, f[vip]) {
			n.Former[vip] = []netip.Addr{addr}
		}
	}
	return n
}

// addressOf returns a node's first address of a family.
func addressOf(node lb.Node, family lb.Family) (netip.Addr, bool) {
	i := slices.IndexFunc(node.Addresses, func(a netip.Addr) bool { return lb.FamilyOf(a) == family })
	if i < 0 {
		return netip.Addr{}, false
	}
	return node.Addresses[i], true
}

// tell says to the proxy what it has to know of other nodes, if that differs. It needs mu.
func (s *speaker) tell() {
	if s.from.feed != nil && (s.untold || s.rings.told == nil) {
		s.untold = false
		notice := s.formers.notice(maps.Keys(s.decisions), s.from.liveness.Speakers().Dead, s.from.nodes.All())
		notice.Ring = s.rings.all()
		s.from.feed.Set(notice)
	}
}
