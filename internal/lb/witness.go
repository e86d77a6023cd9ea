package lb

import (
	"net/netip"
	"slices"
	"time"
)

// Witness is what speakers that see a majority of all speakers tell those that they do not see,
// over the API server, as gossip does not reach them: that they are at work, and what they answer
// for.
type Witness struct {
	// Node is the one that tells, At when, by its own clock.
	Node string
	At   time.Time
	// Live are the nodes that it sees, itself included; sorted.
	Live []string
	// Unserved are the VIPs that none of them answers for; sorted.
	Unserved []netip.Addr
	// Partial is set when Unserved is not all.
	Partial bool
}

// Serves reports whether other nodes than the given one, which is not among them, answer for the
// VIP.
func (w Witness) Serves(node string, vip netip.Addr) bool {
	if w.Partial || slices.Contains(w.Live, node) {
		return false
	}
	_, unserved := slices.BinarySearchFunc(w.Unserved, vip, netip.Addr.Compare)
	return !unserved
}

// Same reports whether two say the same, whenever and by whom.
func (w Witness) Same(other Witness) bool {
	return w.Partial == other.Partial && slices.Equal(w.Live, other.Live) && slices.Equal(w.Unserved, other.Unserved)
}
