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

// table is what one family's rules are made from.
type table struct {
	// targets are the nodes that packets are moved to, with the VIPs whose unknown connections they
	// may hold: none for a node that is only sent what it was sent before.
	targets map[netip.Addr][]netip.Addr
	// peers are the nodes that may move packets here.
	peers []mac
	// ring are those of the VIPs whose packets go on round a ring, sorted, and hops is how many nodes
	// they may pass through.
	ring []netip.Addr
	hops int
}

// maxTargets bounds the rules that a stray packet meets.
const maxTargets = 64

// choose decides on the rules of one family. sent are the nodes to which packets were moved before.
func choose(family lb.Family, w Desired, neighbors map[netip.Addr]links.Neighbor, sent []netip.Addr) table {
	c := chooser{w: w, neighbors: neighbors, peers: map[mac]bool{}, table: table{targets: map[netip.Addr][]netip.Addr{}}}
	vips := map[netip.Addr]bool{}
	for _, of := range []map[netip.Addr][]netip.Addr{w.Previous, w.Ring} {
		for vip := range of {
			vips[vip] = vips[vip] || lb.FamilyOf(vip) == family
		}
	}
	for _, vip := range slices.SortedFunc(maps.Keys(vips), netip.Addr.Compare) {
		switch {
		case !vips[vip]:
		case len(w.Ring[vip]) > 0:
			c.onRing(vip)
		default:
			c.moved(vip)
		}
	}
	for _, node := range sent {
		if _, known := c.targets[node]; known || c.gone(node) || len(c.targets) >= maxTargets {
			continue
		}
		c.targets[node] = nil
		if n := neighbors[node]; n.Found {
			c.peers[n.MAC] = true
		}
	}
	c.table.peers = slices.SortedFunc(maps.Keys(c.peers), mac.compare)
	return c.table
}

// chooser makes a table.
type chooser struct {
	w         Desired
	neighbors map[netip.Addr]links.Neighbor
	peers     map[mac]bool
	table
}

func (c *chooser) gone(node netip.Addr) bool {
	return c.neighbors[node].Failed || slices.Contains(c.w.Gone, node)
}

// reachable reports whether packets can be moved to a node now.
func (c *chooser) reachable(node netip.Addr) bool { return c.neighbors[node].Found && !c.gone(node) }

// aim makes a node the target for a VIP, if there is room for it.
func (c *chooser) aim(vip, node netip.Addr) bool {
	if _, known := c.targets[node]; !known && len(c.targets) >= maxTargets {
		return false
	}
	c.targets[node] = append(c.targets[node], vip)
	return true
}

// moved aims what is for a VIP at the likeliest of its previous owners.
func (c *chooser) moved(vip netip.Addr) {
	found := false
	for _, node := range c.w.Previous[vip] {
		if !c.reachable(node) {
			continue // a node whose MAC address is not known could move the packet back
		}
		c.peers[c.neighbors[node].MAC] = true
		found = found || c.aim(vip, node)
	}
}

// onRing aims what is for a VIP at the next node that is there, and lets it go on to as many as
// there may be.
func (c *chooser) onRing(vip netip.Addr) {
	found, hops := false, 0
	for _, node := range c.w.Ring[vip] {
		found = found || c.reachable(node) && c.aim(vip, node)
		if !c.gone(node) {
			hops++ // it may be reachable from others
		}
	}
	if found {
		c.ring = append(c.ring, vip)
		c.hops = max(c.hops, min(hops, maxHops))
	}
}

// nodes returns the targets in order.
func (t table) nodes() []netip.Addr {
	return slices.SortedFunc(maps.Keys(t.targets), netip.Addr.Compare)
}

func (t table) equal(other table) bool {
	return maps.EqualFunc(t.targets, other.targets, slices.Equal) && slices.Equal(t.peers, other.peers) &&
		slices.Equal(t.ring, other.ring) && t.hops == other.hops
}

// sameRules reports whether other differs in elements of sets at most.
func (t table) sameRules(other table) bool {
	some := func(a, b []netip.Addr) bool { return (len(a) > 0) == (len(b) > 0) }
	return t.hops == other.hops && some(t.ring, other.ring) && maps.EqualFunc(t.targets, other.targets, some)
}
