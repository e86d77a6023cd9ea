package plan

import (
	"cmp"
	"hash/fnv"
	"net/netip"
)

// Winner returns the node with the highest weight for the VIP (rendezvous hashing, also known as
// highest random weight): all who know the same nodes pick the same winner, and a node that comes
// or goes moves only the VIPs that it wins or won. "" without nodes.
func Winner(vip netip.Addr, nodes []string) string {
	winner, most := "", uint64(0)
	for _, node := range nodes {
		w := weight(vip, node)
		if winner == "" || w > most || w == most && node < winner {
			winner, most = node, w
		}
	}
	return winner
}

// Candidate is a node that claims a VIP.
type Candidate struct {
	Node string
	// Weight is how much the node is preferred.
	Weight uint16
	// Answering is set for a node that answers for the VIP already.
	Answering bool
	// Parted is set for one that does and was cut off from the majority: see Claim.
	Parted bool
}

// compare puts the better candidate first.
func (c Candidate) compare(other Candidate) int {
	rank := func(c Candidate) int {
		switch {
		case !c.Answering:
			return 2
		case c.Parted:
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(other.Weight, c.Weight), cmp.Compare(rank(c), rank(other)))
}

// elect returns which candidate owns the VIP: of the heaviest, one that answers already, as a VIP
// that is served well is not moved, and of those one that was with the majority; else the winner.
// "" without candidates.
func elect(vip netip.Addr, candidates []Candidate) string {
	best := make([]string, 0, len(candidates))
	var top Candidate
	for _, c := range candidates {
		order := c.compare(top)
		if len(best) > 0 && order > 0 {
			continue
		}
		if len(best) == 0 || order < 0 {
			best, top = best[:0], c
		}
		best = append(best, c.Node)
	}
	return Winner(vip, best)
}

// weight must never change between versions: nodes of both would disagree during an upgrade.
func weight(vip netip.Addr, node string) uint64 {
	h := fnv.New64a()
	addr := vip.As16()
	h.Write(addr[:])
	h.Write([]byte(node))
	// FNV leaves neighbors near each other; this finalizer (splitmix64) spreads them over all bits.
	x := h.Sum64()
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
