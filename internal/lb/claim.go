package lb

// Claim is what one node says of one VIP to all others.
type Claim struct {
	// Reason says why the node does not claim the VIP; empty means that it does: it can deliver it now.
	Reason Reason `json:"reason,omitempty"`
	// Answering is set while the node announces the VIP.
	Answering bool `json:"answering,omitempty"`
	// Weight is how much the node is preferred for the VIP, 0 to MaxWeight; the heaviest that claim own.
	Weight uint16 `json:"weight,omitempty"`
	// Held is set for what a node said before its speaker ended, while it is expected back. It is never sent.
	Held bool `json:"-"`
}
