package rescue

import (
	"maps"
	"net/netip"
	"slices"

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
	// ring are the VIPs whose packets go round a ring, sorted. hops is how many nodes they may pass
	// through.
	ring []netip.Addr
	hops int
	// limit is Deps.Limit.
	limit int
	// carried has, for each target behind a router, the interface of the tunnel to it. segment is the
	// greatest TCP segment that fits into the tunnel; 0 for no bound.
	carried map[netip.Addr]int
	segment int

	// previous counts the VIPs of which a node is a previous owner, and spread the VIPs whose packets
	// may pass through so many nodes.
	previous map[netip.Addr]int
	spread   [maxHops + 1]int
}

// maxTargets bounds the rules that a stray packet meets.
const maxTargets = 64

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
}

// gone reports whether a node holds nothing any more. While this node may be cut off, its kernel
// finds that nobody answers; connections that only the others know arrive with its first packets.
func (j judge) gone(node netip.Addr) bool {
	return j.neighbors[node].Failed && !j.lost.cutOff || slices.Contains(j.lost.nodes, node)
}

// reachable reports whether packets can be moved to a node now. A node whose MAC address is not
// known could move the packet back.
func (j judge) reachable(node netip.Addr) bool { return j.neighbors[node].Found && !j.gone(node) }

// near reports whether packets can be moved to a previous owner now. It is on this node's network:
// both have answered ARP or NDP for the same address.
func (j judge) near(node netip.Addr) bool { return j.reachable(node) && !j.neighbors[node].Routed }

// choose decides on the rules of one family. sent are the nodes to which packets were moved before.
func choose(family lb.Family, all map[netip.Addr]Origins, j judge, sent []netip.Addr) *table {
	t := &table{targets: map[netip.Addr][]netip.Addr{}, previous: map[netip.Addr]int{}, carried: map[netip.Addr]int{}}
	for _, vip := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
		if lb.FamilyOf(vip) == family {
			t.add(vip, all[vip], j)
		}
	}
	for _, node := range sent {
		n := j.neighbors[node]
		if n.Routed && !n.Found {
			continue // a router would send the packets back
		}
		if _, known := t.targets[node]; !known && !j.gone(node) && len(t.targets) < maxTargets {
			t.targets[node] = nil
			if n.Found {
				t.peers = append(t.peers, n.MAC)
			}
		}
	}
	for node := range t.previous {
		t.peers = append(t.peers, j.neighbors[node].MAC)
	}
	for node, n := range j.neighbors {
		if !n.Routed || !n.Found {
			continue
		}
		if family == lb.IPv6 {
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

// add aims a VIP's packets at its previous owners, or at the next reachable node of its ring.
func (t *table) add(vip netip.Addr, o Origins, j judge) {
	found := false
	for _, node := range o.moved() {
		if j.near(node) {
			t.previous[node]++
			found = found || t.aim(vip, node)
		}
	}
	for _, node := range o.Ring {
		found = found || j.reachable(node) && t.aim(vip, node)
	}
	if found && len(o.Ring) > 0 {
		t.ring = insert(t.ring, vip)
		t.count(o, j, 1)
	}
}

// aim makes a node the target for a VIP, if there is room for it.
func (t *table) aim(vip, node netip.Addr) bool {
	if _, known := t.targets[node]; !known && len(t.targets) >= maxTargets {
		return false
	}
	t.targets[node] = insert(t.targets[node], vip)
	return true
}

// remove takes a VIP out. o must be the Origins that it was added with.
func (t *table) remove(vip netip.Addr, o Origins, j judge) {
	for node, vips := range t.targets {
		t.targets[node] = drop(vips, vip)
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
		t.count(o, j, -1)
	}
}

// count adds a VIP on a ring to the counts, or removes it. Its packets may pass through all nodes
// of the ring that are not gone: a node that this one cannot reach may be reachable from others.
func (t *table) count(o Origins, j judge, n int) {
	hops := 0
	for _, node := range o.Ring {
		if !j.gone(node) {
			hops++
		}
	}
	t.spread[min(hops, maxHops)] += n
	for t.hops = maxHops; t.hops > 0 && t.spread[t.hops] == 0; {
		t.hops--
	}
}

// of returns the targets for a VIP, and reports whether its packets go on round a ring.
func (t *table) of(vip netip.Addr) (nodes []netip.Addr, ring bool) {
	for node, vips := range t.targets {
		if _, found := slices.BinarySearchFunc(vips, vip, netip.Addr.Compare); found {
			nodes = append(nodes, node)
		}
	}
	_, ring = slices.BinarySearchFunc(t.ring, vip, netip.Addr.Compare)
	return nodes, ring
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
		slices.Equal(t.ring, other.ring) && t.hops == other.hops && t.limit == other.limit &&
		maps.Equal(t.carried, other.carried) && t.segment == other.segment
}

// shape is what the rules and the set of peers depend on. Two tables of the same shape differ only
// in the elements of the other sets.
func (t *table) shape() string {
	b := []byte{byte(t.hops), byte(min(1, len(t.ring)))}
	for _, node := range t.nodes() {
		b = append(append(b, node.AsSlice()...), byte(min(1, len(t.targets[node]))))
	}
	for _, node := range slices.SortedFunc(maps.Keys(t.previous), netip.Addr.Compare) {
		b = append(b, node.AsSlice()...)
	}
	return string(b)
}
