package handoff

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ring are the other nodes that may hold connections to a VIP which routers spread over nodes: when
// the set of nodes changes that announce it, routers move connections also between nodes that stay.
type ring struct {
	announce map[string]bool      // the other nodes that do so now
	last     map[string]time.Time // when each was last known to
	routed   time.Time            // when some node was last known to announce it over BGP
	next     []netip.Addr         // never changed in place
}

// spread notes which nodes announce the VIP, and reports whether its ring is another one than
// before.
func (s *State) spread(now time.Time, addr netip.Addr, v *vip, view View) (changed bool) {
	k := v.ring
	if k == nil {
		k = &ring{last: map[string]time.Time{}}
	}
	k.note(now, view, s.booted)
	if now.Sub(k.routed) > lb.FlowMemory {
		if !view.Routable {
			had := v.ring != nil
			v.ring = nil
			return had
		}
		k.last = map[string]time.Time{} // whoever answers over ARP is a previous owner
	}
	changed = v.ring == nil
	v.ring = k
	return s.arrange(addr, v) || changed
}

// note takes in who announces the VIP now. A node that does so no more stays in the ring for as
// long as proxies remember a silent connection. Of a node that has booted, what is reserved for it does
// not count.
func (k *ring) note(now time.Time, view View, booted map[string]uint64) {
	routed := view.Announced
	announce := map[string]bool{}
	for node, claim := range view.Claims {
		routed = routed || claim.Routes != ""
		_, again := booted[node]
		void := again && claim.Held
		if claim.Routes != "" || claim.Answering && !void {
			announce[node] = true
			k.last[node] = now
		}
	}
	for node := range k.announce {
		k.last[node] = now
	}
	maps.DeleteFunc(k.last, func(_ string, t time.Time) bool { return now.Sub(t) > lb.FlowMemory })
	k.announce = announce
	if routed {
		k.routed = now
	}
}

// arrange puts the nodes of a ring into the order of their addresses, from this one on, and reports
// whether that is another order than before.
func (s *State) arrange(addr netip.Addr, v *vip) (changed bool) {
	if v.ring == nil {
		return false
	}
	family := lb.FamilyOf(addr)
	var next []netip.Addr
	nodes := maps.Clone(v.ring.last)
	maps.Copy(nodes, s.foreign)
	delete(nodes, s.self)
	for node := range nodes {
		if a, ok := s.address(node, family); ok {
			next = append(next, a)
		}
	}
	slices.SortFunc(next, netip.Addr.Compare)
	if self, ok := s.address(s.self, family); ok {
		i, _ := slices.BinarySearchFunc(next, self, netip.Addr.Compare)
		next = slices.Concat(next[i:], next[:i])
	}
	next = next[:min(len(next), lb.MaxRing)]
	changed = !slices.Equal(next, v.ring.next)
	v.ring.next = next
	return changed
}
