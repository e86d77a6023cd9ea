package plan

import (
	"cmp"
	"net/netip"
	"slices"
)

// Ring returns the neighbors of a node on a ring of all nodes, in an order that hashing gives them:
// so many successors, and as many predecessors. Two nodes that know the same nodes agree on whether
// they are neighbors, and a node that comes or goes changes nobody's neighbors but those around it.
// Sorted.
func Ring(self string, nodes []string, successors int) []string {
	order := slices.Clone(nodes)
	place := func(node string) uint64 { return weight(netip.Addr{}, node) }
	slices.SortFunc(order, func(a, b string) int { return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a, b)) })
	order = slices.Compact(order)
	at := slices.Index(order, self)
	if at < 0 {
		return nil
	}
	var neighbors []string
	for distance := 1; distance <= successors && distance < len(order); distance++ {
		neighbors = append(neighbors, order[(at+distance)%len(order)], order[(at-distance+len(order))%len(order)])
	}
	slices.Sort(neighbors)
	return slices.DeleteFunc(slices.Compact(neighbors), func(node string) bool { return node == self })
}
