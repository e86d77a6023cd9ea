package lb

import "net/netip"

// Flows are the connections that a node's conntrack has to some destinations.
type Flows struct {
	Node string `json:"node"`
	// Total is how many there are, Flows the first of them.
	Total int    `json:"total"`
	Flows []Flow `json:"flows,omitempty"`
	// Counts are those of all, by backend and state.
	Counts []FlowCount `json:"counts,omitempty"`
	// Accounted is set if the kernel counts packets and bytes (net.netfilter.nf_conntrack_acct).
	Accounted bool `json:"accounted,omitempty"`
}

// Flow is one connection of conntrack.
type Flow struct {
	Protocol Protocol       `json:"protocol"`
	Client   netip.AddrPort `json:"client"`
	To       netip.AddrPort `json:"to"` // where the client sent
	Backend  netip.AddrPort `json:"backend"`
	// State is that of TCP or SCTP, such as ESTABLISHED; else ASSURED, REPLIED or UNREPLIED.
	State       string `json:"state"`
	Masqueraded bool   `json:"masqueraded,omitempty"`
	// Expires is in how many seconds conntrack forgets the connection, if no packet comes.
	Expires uint32 `json:"expires"`
	// Packets and Bytes are those of both directions, where the kernel counts them.
	Packets uint64 `json:"packets,omitempty"`
	Bytes   uint64 `json:"bytes,omitempty"`
}

// FlowCount is how many connections to a backend are in a state.
type FlowCount struct {
	Backend netip.AddrPort `json:"backend"`
	State   string         `json:"state"`
	Count   int            `json:"count"`
}

// FlowTarget is a destination of which the flows are asked for.
type FlowTarget struct {
	// Addr is not valid for a node port, which is reached at all addresses of the node.
	Addr netip.Addr
	// Port is 0 for all ports of an address.
	Port uint16
	// Protocol is "" for all.
	Protocol Protocol
}

// Covers reports whether a flow is to the target. local tells the node's own addresses, where node
// ports are.
func (t FlowTarget) Covers(p Protocol, to netip.AddrPort, local func(netip.Addr) bool) bool {
	return (t.Protocol == "" || t.Protocol == p) && (t.Port == 0 || t.Port == to.Port()) &&
		(t.Addr == to.Addr() || !t.Addr.IsValid() && local(to.Addr()))
}
