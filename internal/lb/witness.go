package lb

import (
	"net/netip"
	"slices"
	"time"
)

// Witness is a message from the majority's side of a partition to the other side. Gossip does not
// reach the other side, so it travels over the API server. It says that the majority's speakers
// run, and which VIPs they answer for.
type Witness struct {
	// Node is the sender, and At the time of its own clock.
	Node string
	At   time.Time
	// Live are the nodes that the sender sees, itself included; sorted.
	Live []string
	// Unserved are the VIPs that none of these nodes answers for; sorted.
	Unserved []netip.Addr
	// Partial is set if Unserved is incomplete.
	Partial bool
}

// Serves reports whether the majority's nodes answer for the VIP. It is false for a node among
// them.
func (w Witness) Serves(node string, vip netip.Addr) bool {
	if w.Partial || slices.Contains(w.Live, node) {
		return false
	}
	_, unserved := slices.BinarySearchFunc(w.Unserved, vip, netip.Addr.Compare)
	return !unserved
}

// Same reports whether two messages have the same content, apart from sender and time.
func (w Witness) Same(other Witness) bool {
	return w.Partial == other.Partial && slices.Equal(w.Live, other.Live) && slices.Equal(w.Unserved, other.Unserved)
}
