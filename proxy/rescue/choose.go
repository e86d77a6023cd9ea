package rescue

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

// mac is a link-layer address of Ethernet.
type mac [6]byte

func (m mac) bytes() []byte { return m[:] }

func (m mac) compare(other mac) int { return slices.Compare(m[:], other[:]) }

// Origins are the other nodes that may hold connections to a VIP, by their addresses of the VIP's
// family.
type Origins struct {
	// Previous are the previous owners, the likeliest first. They are ignored while there is a Ring.
	Previous []netip.Addr
	// Ring is for a VIP that routers spread over nodes: the other ones of these nodes, in the order of
	// the ring after this node.
	Ring []netip.Addr
	// Direct is set for a VIP that has a Ring because it is forwarded directly.
	Direct bool
}

func (o Origins) equal(other Origins) bool {
	return o.Direct == other.Direct && slices.Equal(o.Previous, other.Previous) && slices.Equal(o.Ring, other.Ring)
}

// moved returns the previous owners to use.
func (o Origins) moved() []netip.Addr {
	if len(o.Ring) > 0 {
		return nil
	}
	return o.Previous
}

// table is what one family's rules are made from.
type table struct {
	// targets are the nodes that packets are moved to. Each has a sorted list of the VIPs whose
	// connections it may hold; the list is empty for a node that only keeps the connections it has.
	targets map[netip.Addr][]netip.Addr
	// peers are the nodes that may move packets here.
	peers []mac
	// ring are the VIPs whose packets go round a ring, sorted. hops is how many nodes those of each may
	// pass through.
	ring []netip.Addr
	hops map[netip.Addr]int
	// onRing has, for each target, the VIPs on whose ring it is, sorted.
	onRing map[netip.Addr][]netip.Addr
	// limit is Deps.Limit.
	limit int
	// carried has, for each target behind a router, the interface of the tunnel to it; for one whose link is away that
	// link, as a copy without it would go to a router, which may send it back. segment is the greatest TCP segment that
	// fits into the tunnel; 0 for no bound.
	carried map[netip.Addr]int
	segment int

	// previous counts the VIPs of which a node is a previous owner, others those without Direct that are
	// aimed at a target, and spread the VIPs whose packets may pass through so many nodes.
	previous, others map[netip.Addr]int
	spread           [maxHops + 1]int

	// crowded is set once a VIP has found no room because of nodes that are only remembered. They give way when the
	// table is made anew.
	crowded bool
}

// The targets are bounded, and with them the rules that a stray packet meets. VIPs that are forwarded
// directly take none from the others: they bring at most maxDirect of their own, and share the rest.
const maxTargets, maxDirect = 64, 32

// losses are the nodes that the speaker takes for dead. With cutOff set it may be this node that is
// cut off from the others.
type losses struct {
	nodes  []netip.Addr
	cutOff bool
}

func (l losses) equal(other losses) bool {
	return l.cutOff == other.cutOff && slices.Equal(l.nodes, other.nodes)
}

// judge tells which nodes are reachable.
type judge struct {
	neighbors map[netip.Addr]links.Neighbor
	lost      losses
	// away are the nodes that only keep the place where they were, by since when.
	away map[netip.Addr]time.Time
}

// gone reports whether a node holds nothing any more. While this node may be cut off, its kernel
// finds that nobody answers; connections that only the others know arrive with its first packets.
func (j judge) gone(node netip.Addr) bool {
	return j.neighbors[node].Failed && !j.lost.cutOff || slices.Contains(j.lost.nodes, node)
}

// reachable reports whether packets can be moved to a node now. A node whose MAC address is not
// known could move the packet back.
func (j judge) reachable(node netip.Addr) bool { return j.neighbors[node].Found && !j.gone(node) }

func (j judge) isAway(node netip.Addr) bool {
	_, away := j.away[node]
	return away
}

// near reports whether packets can be moved to a previous owner now. It is on this node's network:
// both have answered ARP or NDP for the same address.
func (j judge) near(node netip.Addr) bool { return j.reachable(node) && !j.neighbors[node].Routed }

func newTable() *table {
	return &table{targets: map[netip.Addr][]netip.Addr{}, hops: map[netip.Addr]int{}, carried: map[netip.Addr]int{},
		onRing:   map[netip.Addr][]netip.Addr{},
		previous: map[netip.Addr]int{}, others: map[netip.Addr]int{}}
}

// choose decides on the rules of one family. sent are the nodes to which packets were moved before.
func choose(family lb.Family, all map[netip.Addr]Origins, j judge, sent []netip.Addr) *table {
	t := newTable()
	vips := slices.SortedFunc(maps.Keys(all), netip.Addr.Compare)
	for _, direct := range []bool{false, true} {
		for _, vip := range vips {
			if lb.FamilyOf(vip) == family && all[vip].Direct == direct {
				t.add(vip, all[vip], j)
			}
		}
	}
	for _, node := range sent {
		n := j.neighbors[node]
		if n.Routed && !n.Found {
			continue // a router would send the packets back
		}
		if _, known := t.targets[node]; !known && !j.gone(node) && len(t.targets) < maxTargets+maxDirect {
			t.targets[node] = nil
			if n.Found {
				t.peers = append(t.peers, n.MAC)
			}
		}
	}
	for _, vip := range t.ring {
		t.join(vip, all[vip])
	}
	for node := range t.previous {
		t.peers = append(t.peers, j.neighbors[node].MAC)
	}
	for node, n := range j.neighbors {
		if !n.Found || !n.Routed && !j.isAway(node) {
			continue
		}
		if family == lb.IPv6 && n.Routed {
			t.segment = n.MTU - ipv6Header - tcpHeader
		}
		if _, target := t.targets[node]; target {
			t.carried[node] = n.Link
		}
	}
	slices.SortFunc(t.peers, mac.compare)
	t.peers = slices.Compact(t.peers)
	return t
}

// add aims a VIP's packets at its previous owners, or at the next reachable node of its ring; at one to which there is
// no way now only if there is no other.
func (t *table) add(vip netip.Addr, o Origins, j judge) {
	found := false
	for _, away := range []bool{false, true} {
		for _, node := range o.moved() {
			if j.isAway(node) == away && j.near(node) {
				t.previous[node]++
				found = found || t.aim(vip, node, o.Direct)
			}
		}
		for _, node := range o.Ring {
			found = found || j.isAway(node) == away && j.reachable(node) && t.aim(vip, node, o.Direct)
		}
	}
	if found && len(o.Ring) > 0 {
		t.ring, t.hops[vip] = insert(t.ring, vip), o.hops(j)
		t.spread[t.hops[vip]]++
	}
}

// join notes which targets are on the ring of a VIP: none if it is so long that a packet cannot ask all nodes in order
// after it has gone where its connection is remembered to be.
func (t *table) join(vip netip.Addr, o Origins) {
	if t.hops[vip]+spare > maxHops {
		return
	}
	for _, node := range o.Ring {
		if _, target := t.targets[node]; target {
			t.onRing[node] = insert(t.onRing[node], vip)
		}
	}
}

// aim makes a node the target for a VIP, if there is room for it.
func (t *table) aim(vip, node netip.Addr, direct bool) bool {
	if !t.fits(node, direct, len(t.targets)) {
		t.crowded = t.crowded || t.fits(node, direct, len(t.targets)-t.onlyRemembered())
		return false
	}
	t.targets[node] = insert(t.targets[node], vip)
	if !direct {
		t.others[node]++
	}
	return true
}

// fits reports whether there is room for a VIP at a node among so many targets.
func (t *table) fits(node netip.Addr, direct bool, targets int) bool {
	_, known := t.targets[node]
	if !known && (targets >= maxTargets+maxDirect || direct && targets-len(t.others) >= maxDirect) {
		return false
	}
	return direct || t.others[node] > 0 || len(t.others) < maxTargets
}

// onlyRemembered returns how many targets no VIP is aimed at.
func (t *table) onlyRemembered() (n int) {
	for _, vips := range t.targets {
		if len(vips) == 0 {
			n++
		}
	}
	return n
}

// remove takes a VIP out. o must be the Origins that it was added with.
func (t *table) remove(vip netip.Addr, o Origins, j judge) {
	for node, vips := range t.targets {
		t.targets[node] = drop(vips, vip)
		if len(t.targets[node]) < len(vips) && !o.Direct {
			if t.others[node]--; t.others[node] == 0 {
				delete(t.others, node)
			}
		}
	}
	for _, node := range o.moved() {
		if j.near(node) {
			if t.previous[node]--; t.previous[node] == 0 {
				delete(t.previous, node)
			}
		}
	}
	if _, spread := slices.BinarySearchFunc(t.ring, vip, netip.Addr.Compare); spread {
		t.ring = drop(t.ring, vip)
		t.spread[t.hops[vip]]--
		delete(t.hops, vip)
		for _, node := range o.Ring {
			if t.onRing[node] = drop(t.onRing[node], vip); len(t.onRing[node]) == 0 {
				delete(t.onRing, node)
			}
		}
	}
}

// hops returns how many nodes packets on the ring may pass through: all that are not gone, as a node that
// this one cannot reach may be reachable from others.
func (o Origins) hops(j judge) int {
	hops := 0
	for _, node := range o.Ring {
		if !j.gone(node) {
			hops++
		}
	}
	return min(hops, maxHops)
}

// lengths returns how many nodes packets on the rings pass through, each number once and in order.
func (t *table) lengths() (all []int) {
	for hops, vips := range t.spread {
		if vips > 0 {
			all = append(all, hops)
		}
	}
	return all
}

// rings returns the VIPs on rings by how many nodes their packets may pass through, in order.
func (t *table) rings() map[int][]netip.Addr {
	all := map[int][]netip.Addr{}
	for _, vip := range t.ring {
		all[t.hops[vip]] = append(all[t.hops[vip]], vip)
	}
	return all
}

// of returns the targets for a VIP.
func (t *table) of(vip netip.Addr) []netip.Addr { return having(t.targets, vip) }

// having returns the nodes that have a VIP among theirs.
func having(all map[netip.Addr][]netip.Addr, vip netip.Addr) (nodes []netip.Addr) {
	for node, vips := range all {
		if _, found := slices.BinarySearchFunc(vips, vip, netip.Addr.Compare); found {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

func insert(sorted []netip.Addr, addr netip.Addr) []netip.Addr {
	i, found := slices.BinarySearchFunc(sorted, addr, netip.Addr.Compare)
	if found {
		return sorted
	}
	return slices.Insert(sorted, i, addr)
}

func drop(sorted []netip.Addr, addr netip.Addr) []netip.Addr {
	i, found := slices.BinarySearchFunc(sorted, addr, netip.Addr.Compare)
	if !found {
		return sorted
	}
	return slices.Delete(sorted, i, i+1)
}

// nodes returns the targets in order.
func (t *table) nodes() []netip.Addr {
	return slices.SortedFunc(maps.Keys(t.targets), netip.Addr.Compare)
}

func (t *table) equal(other *table) bool {
	return maps.EqualFunc(t.targets, other.targets, slices.Equal) && slices.Equal(t.peers, other.peers) &&
		slices.Equal(t.ring, other.ring) && maps.Equal(t.hops, other.hops) &&
		maps.EqualFunc(t.onRing, other.onRing, slices.Equal) && t.limit == other.limit &&
		maps.Equal(t.carried, other.carried) && t.segment == other.segment
}

// edits returns how the sets of another table differ.
func (t *table) edits(next *table) []edit {
	all := map[netip.Addr]*edit{}
	of := func(vip netip.Addr) *edit {
		if all[vip] == nil {
			all[vip] = &edit{vip: vip}
			all[vip].hops.from, all[vip].hops.to = t.hops[vip], next.hops[vip]
		}
		return all[vip]
	}
	for _, m := range []struct {
		from, to map[netip.Addr][]netip.Addr
		list     func(*edit) *[]netip.Addr
	}{
		{t.targets, next.targets, func(e *edit) *[]netip.Addr { return &e.from }},
		{next.targets, t.targets, func(e *edit) *[]netip.Addr { return &e.to }},
		{t.onRing, next.onRing, func(e *edit) *[]netip.Addr { return &e.leaves }},
		{next.onRing, t.onRing, func(e *edit) *[]netip.Addr { return &e.joins }},
	} {
		for node, vips := range m.from {
			for _, vip := range minus(vips, m.to[node]) {
				list := m.list(of(vip))
				*list = append(*list, node)
			}
		}
	}
	for _, hops := range []map[netip.Addr]int{t.hops, next.hops} {
		for vip := range hops {
			if t.hops[vip] != next.hops[vip] {
				of(vip)
			}
		}
	}
	edits := make([]edit, 0, len(all))
	for _, e := range all {
		edits = append(edits, *e)
	}
	return edits
}

// minus returns the elements of a sorted list that are not in another one.
func minus(sorted, other []netip.Addr) (left []netip.Addr) {
	for _, addr := range sorted {
		for len(other) > 0 && other[0].Less(addr) {
			other = other[1:]
		}
		if len(other) == 0 || other[0] != addr {
			left = append(left, addr)
		}
	}
	return left
}

// shape is what the rules, the set of peers and the room for VIPs depend on. Two tables of the same shape differ only
// in the elements of the other sets.
func (t *table) shape() string {
	b := []byte{byte(len(t.lengths()))}
	for _, hops := range t.lengths() {
		b = append(b, byte(hops))
	}
	for _, node := range t.nodes() {
		b = append(append(b, node.AsSlice()...), byte(min(1, len(t.targets[node]))), byte(min(1, t.others[node])))
	}
	for _, node := range slices.SortedFunc(maps.Keys(t.previous), netip.Addr.Compare) {
		b = append(b, node.AsSlice()...)
	}
	return string(b)
}
