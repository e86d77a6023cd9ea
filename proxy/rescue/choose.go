package rescue

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// mac is a link-layer address of Ethernet.
type mac [6]byte

func (m mac) compare(other mac) int { return slices.Compare(m[:], other[:]) }

// neighbor is what the kernel knows of an address on the same LAN.
type neighbor struct {
	mac   mac
	there bool // it has answered, and mac is known
	gone  bool // it answers no more
}

// table is what one family's rules are made from.
type table struct {
	// targets are the nodes that packets are handed to, with the VIPs whose unknown connections they may hold: none for a node that
	// is only sent what it was sent before.
	targets map[netip.Addr][]netip.Addr
	// peers are where packets come from that another node has handed over.
	peers []mac
}

// maxTargets bounds the rules that a stray packet meets.
const maxTargets = 64

// choose decides on the rules of one family. sent are the nodes to which packets were handed before.
func choose(family lb.Family, w Wanted, neighbors map[netip.Addr]neighbor, sent []netip.Addr) table {
	t := table{targets: map[netip.Addr][]netip.Addr{}}
	peers := map[mac]bool{}
	gone := func(node netip.Addr) bool { return neighbors[node].gone || slices.Contains(w.Gone, node) }
	for _, vip := range slices.SortedFunc(maps.Keys(w.Former), netip.Addr.Compare) {
		if lb.FamilyOf(vip) != family {
			continue
		}
		found := false
		for _, node := range w.Former[vip] {
			n := neighbors[node]
			if !n.there || gone(node) {
				continue // a node whose MAC address is not known could hand the packet back
			}
			peers[n.mac] = true
			_, known := t.targets[node]
			if !found && (known || len(t.targets) < maxTargets) {
				t.targets[node] = append(t.targets[node], vip)
				found = true
			}
		}
	}
	for _, node := range sent {
		if _, known := t.targets[node]; known || gone(node) || len(t.targets) >= maxTargets {
			continue
		}
		t.targets[node] = nil
		if n := neighbors[node]; n.there {
			peers[n.mac] = true
		}
	}
	t.peers = slices.SortedFunc(maps.Keys(peers), mac.compare)
	return t
}

func (t table) equal(other table) bool {
	return maps.EqualFunc(t.targets, other.targets, slices.Equal) && slices.Equal(t.peers, other.peers)
}
