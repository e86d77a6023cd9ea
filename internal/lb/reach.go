package lb

import "net/netip"

// Reach says how far connections of clients to a Service get on a node.
type Reach struct {
	Node string `json:"node"`
	// Connects are connections that the node has opened to endpoints.
	Connects []ReachConnect `json:"connects,omitempty"`
	// Walks are packets of clients that were walked through the rules in the node's kernel.
	Walks []ReachWalk `json:"walks,omitempty"`
	// Unwalked says why packets could not be walked; "" if they were.
	Unwalked string `json:"unwalked,omitempty"`
}

// ReachConnect is a connection that a node has opened, or could not open.
type ReachConnect struct {
	Address netip.AddrPort `json:"address"`
	// Error says why there is no connection; "" if there is one.
	Error string `json:"error,omitempty"`
	// Refused is set if the other host answers that nothing listens there.
	Refused bool `json:"refused,omitempty"`
}

// ReachWalk is a packet on its way through the rules of a node.
type ReachWalk struct {
	Packet TracePacket `json:"packet"`
	// Dropped names the rule of another program that ends the packet's way, whatever backend is drawn; "" if
	// none certainly does.
	Dropped string `json:"dropped,omitempty"`
	// NoRoute is set if the node has no route back to the packet's source.
	NoRoute bool `json:"noRoute,omitempty"`
}
