package plan

import "github.com/landfall-lb/landfall/internal/lb"

// Claim is what one node says of one VIP to all others.
type Claim struct {
	// Reason says why the node does not claim the VIP for ARP and NDP; empty means that it does: it
	// can deliver it now.
	Reason lb.Reason `json:"reason,omitempty"`
	// Answering is set while the node announces the VIP.
	Answering bool `json:"answering,omitempty"`
	// Weight is how much the node is preferred for the VIP, 0 to lb.MaxWeight; the heaviest that claim
	// own.
	Weight uint16 `json:"weight,omitempty"`
	// Routes are the BGP peers that hear of the VIP from the node.
	Routes PeerNames `json:"routes,omitempty"`
	// Unrouted says why no peer hears of the VIP although a BGPAdvertisement is for it, or, with
	// Routes, why they soon hear of it no more; empty when all is well or when BGP is not for the VIP.
	Unrouted lb.Reason `json:"unrouted,omitempty"`
	// Parted is set while the node announces the VIP and sees no majority of the speakers, or has seen
	// none a moment ago: others may have served the VIP meanwhile, and go on.
	Parted bool `json:"parted,omitempty"`
	// Held is set for what a node said before its speaker ended, while it is expected back. It is
	// never sent.
	Held bool `json:"-"`
	// Stale is set for what a node said before it was lost, when it has just been found again and has
	// said nothing else yet. It is never sent.
	Stale bool `json:"-"`
}

// Announces reports whether the node announces the VIP as one that it can deliver: others reserve
// the VIP for the node's next speaker if this one ends.
func (c Claim) Announces() bool { return c.Answering && c.Reason == "" }
