// Package tunnel carries packets as they are to nodes behind routers, over a VXLAN (RFC 7348) of
// Landfall's own: one interface for each family, without flooding and without learning. Rules let
// in only what other nodes send, and only packets that nodes move (docs/design/rescue.md).
package tunnel

import (
	"hash/fnv"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// DefaultPort is the UDP port to which nodes send the packets. All nodes need the same.
const DefaultPort = 7948

// What all nodes have to agree on besides the port: the network's number (VNI).
const network = 7948

// Names and numbers in the kernel.
const (
	// TableName is the name of the rules' tables, one in the family ip and one in ip6.
	TableName = "landfall-tunnel"
	// routes is the number of the routing table that says for the interface alone that each node is on
	// its link, and the priority of the rule that leads there.
	routes = 7948
)

// overhead is what a packet grows by: IP, UDP and VXLAN headers, and the inner Ethernet's.
func overhead(family lb.Family) int {
	if family == lb.IPv6 {
		return 70
	}
	return 50
}

// Desired is how a family's tunnel shall be.
type Desired struct {
	// Self is the address of this node from which it sends. Without it, as while the cluster is not
	// known, the tunnel of a predecessor stays as it is, but for Peers.
	Self netip.Addr
	// Nodes are the addresses of the other nodes, from which packets are taken.
	Nodes []netip.Addr
	// Peers are the nodes that packets are sent to. Packets are taken from them too.
	Peers []netip.Addr
	// Direct are the addresses of Services that this node forwards directly: what is handed over for them is taken.
	// Handed over for others it goes back. Unless DirectKnown is set, those that are there stay.
	Direct      []netip.Addr
	DirectKnown bool
	// MTU is that of the networks between the nodes.
	MTU int
}

// State is how a family's tunnel is.
type State struct {
	// Link is the index of the interface.
	Link int
	// MTU is the size of the packets that it takes. In IPv4 that is the MTU of the networks between the
	// nodes, whose kernels send larger ones in fragments. In IPv6 nobody does: the client is told.
	MTU int
	// Refused counts the packets that were dropped: from elsewhere than a node, or of a kind that nodes
	// do not move.
	Refused uint64
}

// segment returns the greatest TCP segment, without options, that fits into the tunnel in one packet of the networks
// between the nodes; 0 if that is not known.
func segment(family lb.Family, between int) uint16 {
	const tcp, most = 20, 1<<16 - 1
	if between == 0 {
		return 0
	}
	if family == lb.IPv6 {
		return uint16(min(mtu(family, between)-40-tcp, most))
	}
	// Hosts take 576 bytes (RFC 9293 section 3.7.1).
	return uint16(min(max(between-overhead(family), 576)-20-tcp, most))
}

// mtu returns the size of the packets that fit; 0 if that is not known.
func mtu(family lb.Family, between int) int {
	if between == 0 {
		return 0
	}
	if family == lb.IPv6 {
		return max(between-overhead(family), 1280) // no IPv6 network has less (RFC 8200 section 5)
	}
	return between
}

// Networks of aliases: of the block that RFC 1112 section 4 reserves, which no host has, and a unique local one.
var (
	aliases4 = netip.MustParsePrefix("255.0.0.0/8")
	aliases6 = netip.MustParsePrefix("fd4c:616e:6466:616c::/64")
)

func aliases(family lb.Family) netip.Prefix {
	if family == lb.IPv6 {
		return aliases6
	}
	return aliases4
}

// Alias returns the address at which this node finds another one through the tunnel. It is in no packet. In IPv4
// it differs from the node's address in the first byte, so nodes that differ in this byte alone have the same.
func Alias(node netip.Addr) netip.Addr {
	if node.Is4() {
		at := node.As4()
		at[0] = aliases4.Addr().As4()[0]
		return netip.AddrFrom4(at)
	}
	at := aliases6.Addr().As16()
	h := fnv.New64a()
	h.Write(node.AsSlice())
	copy(at[8:], h.Sum(nil))
	return netip.AddrFrom16(at)
}

// apart returns Alias without those that two nodes share: nothing is handed to these, or sent back.
func apart(nodes []netip.Addr) func(netip.Addr) netip.Addr {
	count := map[netip.Addr]int{}
	for _, node := range nodes {
		count[Alias(node)]++
	}
	return func(node netip.Addr) netip.Addr {
		if at := Alias(node); count[at] == 1 {
			return at
		}
		return netip.Addr{}
	}
}

// MAC returns the link-layer address of a node in the tunnel. It follows from the node's address, so
// that nobody has to be asked.
func MAC(node netip.Addr) [6]byte {
	const local = 0x0e // administered locally, of one interface (IEEE 802)
	h := fnv.New64a()
	h.Write(node.AsSlice())
	return [6]byte(append([]byte{local}, h.Sum(nil)[:5]...))
}
