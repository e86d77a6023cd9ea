package lb

import "net/netip"

// Trace is what the rules in a node's kernel do with the first packet of a connection.
type Trace struct {
	Node   string      `json:"node"`
	Packet TracePacket `json:"packet"`
	// Rules are those of Landfall that the kernel has: the names of tables, or of the variant of
	// iptables. None if Landfall has no rules there.
	Rules []string `json:"rules,omitempty"`
	// Ways are the ways that the packet can take, the most likely first. They part where rules draw.
	Ways []TraceWay `json:"ways"`
	// Notes say what the walk left out, and what it took for granted.
	Notes []string `json:"notes,omitempty"`
}

// TracePacket is the first packet of a connection.
type TracePacket struct {
	Source      netip.AddrPort `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	// Protocol is TCP, UDP, SCTP or ICMP, which stands for the question of a ping and has no ports.
	Protocol Protocol `json:"protocol"`
	// Interface is where the packet comes in; "" if the node sends it itself.
	Interface string `json:"interface,omitempty"`
}

// TraceICMP is the protocol of pings in a TracePacket.
const TraceICMP Protocol = "ICMP"

// TraceVerdict is how a way ends.
type TraceVerdict string

// The verdicts.
const (
	TraceDelivered  TraceVerdict = "delivered"  // translated to a backend
	TraceRelayed    TraceVerdict = "relayed"    // ended by the node's relay, which connects to a backend
	TraceAnswered   TraceVerdict = "answered"   // by the node itself, which pings are
	TraceDropped    TraceVerdict = "dropped"    // in silence
	TraceRefused    TraceVerdict = "refused"    // by a TCP reset or by ICMP
	TraceUntouched  TraceVerdict = "untouched"  // no rule of Landfall is for it
	TraceUnroutable TraceVerdict = "unroutable" // the node has no route to where it shall go
	TraceUnknown    TraceVerdict = "unknown"    // a rule that the walk cannot evaluate decides
)

// TraceWay are ways through the same rules.
type TraceWay struct {
	Verdict TraceVerdict `json:"verdict"`
	// Share is the probability of the way, up to 1.
	Share float64 `json:"share"`
	// Ends are where the packet goes, if it is delivered, relayed or unroutable; MoreEnds counts those that are left out.
	Ends     []TraceEnd `json:"ends,omitempty"`
	MoreEnds int        `json:"moreEnds,omitempty"`
	// Masqueraded is set if a backend sees the node's address instead of the client's.
	Masqueraded bool `json:"masqueraded,omitempty"`
	// Why is what the rules say of themselves where they drop or refuse a packet.
	Why   string      `json:"why,omitempty"`
	Steps []TraceStep `json:"steps,omitempty"`
}

// TraceEnd is one backend.
type TraceEnd struct {
	Address netip.AddrPort `json:"address"`
	Share   float64        `json:"share"`
}

// TraceStep is a rule that did something with the packet.
type TraceStep struct {
	Hook  string `json:"hook"`  // such as prerouting
	Table string `json:"table"` // such as ip landfall
	Chain string `json:"chain"`
	// Rule is the rule's place in its chain, from 1 on, and Handle what nft -a prints; 0 for none.
	Rule    int    `json:"rule"`
	Handle  uint64 `json:"handle,omitempty"`
	Comment string `json:"comment,omitempty"`
	// Text says what matched and what the rule does.
	Text string `json:"text"`
	// Foreign is set for rules of other programs.
	Foreign bool `json:"foreign,omitempty"`
}
