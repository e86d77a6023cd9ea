package plan

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What follows is what the loop and whatever writes rules tell each other, besides Services.

// Detector tells connections that pods of this cluster make from all others. The zero value cannot
// tell, so all count as pods'.
type Detector struct {
	Prefixes  []netip.Prefix // where pods have their addresses; the first of each family counts
	Interface string         // where pods' packets come in; a + at its end stands for any rest
}

// Config is what all rules depend on, and no Service.
type Config struct {
	Pods          Detector
	MasqueradeAll bool
	// MasqueradeBit is the bit of the packet mark that asks for masquerading, 0 to 31.
	MasqueradeBit int
	// NodePortAddresses are the addresses of this node at which node ports are served, by family; a
	// family without an entry serves them at all of the node's addresses.
	NodePortAddresses map[lb.Family][]netip.Addr
	// LoopbackNodePorts serves node ports at 127.0.0.1 too, which needs the sysctl route_localnet.
	LoopbackNodePorts bool
	// SetRouteLocalnet is set if Landfall itself has set that sysctl, and sets it back.
	SetRouteLocalnet bool
	// DropInvalid drops packets that conntrack finds invalid. Otherwise a pod's packets could leave
	// with its own address and end the client's connection (kubernetes/kubernetes#74839).
	DropInvalid bool
	// ServiceNetworks are the known ranges of the cluster's cluster IPs that no node and no pod is in.
	// A new connection that is still for such an address after translation belongs to no Service: it is
	// dropped, as any route that it took would be the wrong one.
	ServiceNetworks []netip.Prefix
	// VRFInterfaces are the names of the VRFs that routers are in, and of their ports, sorted. What comes in by them
	// is not handed to other nodes, which would answer outside of the VRF, nor relayed.
	VRFInterfaces []string
	// AnswerPing has the node answer echo requests to the addresses that it delivers, see
	// Frontend.AnswersPing.
	AnswerPing bool
	// Relay has the rules send connections to relayed frontends to the node's relay. RelayTo is where that
	// accepts them, as far as iptables mode has to know; nftables mode has it in a map.
	Relay   bool
	RelayTo map[lb.Family]netip.AddrPort
	// RelayUDPRate is how many flows of UDP a second they lead there from each namespace; 0 for no limit.
	RelayUDPRate int
	// Offload are the families in which the rules offload established connections to a flowtable, in nftables mode.
	Offload map[lb.Family]bool
	// OffloadUDP is set if flows of UDP are among them.
	OffloadUDP bool
}

// Outcome is what is so for one Service.
type Outcome struct {
	// Applied is the plan that the kernel has confirmed; without ports when it holds nothing.
	Applied Service
	// Err says why the newest plan is not applied; nil when it is, and while nothing has been tried.
	Err error
	// Alone are the families in which the Service fails by itself, or is written in parts, while others
	// can be applied.
	Alone []lb.Family
}
