// Package contract judges what was seen in a run of chaos by the clauses of the contract in docs/design/design.md: one
// named function for each claim. It is pure: evidence in, violations out.
package contract

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// Evidence is what was seen in one round.
type Evidence struct {
	Round story.Round
	// Spans say how each event went, in the order of their beginnings.
	Spans []Span
	// Samples are requests over new connections, Flows connections that were to last for the round.
	Samples []Sample
	Flows   []Flow
	// Holders are all that the API server showed of who holds which address.
	Holders []Holder
	// Settled is the state after the round, once nothing was wrong with it or its time was over.
	Settled Snapshot
}

// Span is an event as it went.
type Span struct {
	story.Event
	Began, Ended time.Time
	// From and Until are when a fault that lasts was there: after it was brought about, and before it was healed.
	From, Until time.Time
	// Took are the addresses that the event's node announced once the event had ended, as its speaker says.
	Took []netip.Addr
	// OwnedBefore are those that it owned before, if its speaker said so (Known). Lost are those of them that it did not
	// own when it was back.
	OwnedBefore, Lost []netip.Addr
	Known             bool
	// Gone are pods that the event removed.
	Gone []string
	// Attractive are Services whose health port did not come to say 503 on a node that is about to leave.
	Attractive []string
	// Bare are nodes that announced what the event removed after their rules for it were gone.
	Bare []string
	// Back is how long a program was away; 0 for an event that ends none.
	Back time.Duration
}

// Sample is one request over a new connection.
type Sample struct {
	// Service was asked, of App, with policy Local or not; it may be gone by now.
	Service, Wanted string
	Local           bool
	// Direct is whether the Service asks for direct forwarding, Affine whether for session affinity.
	Direct  bool
	Affine  bool
	Network string // tcp or udp
	Target  netip.AddrPort
	// Client is the address of the host that asked.
	Client       netip.Addr
	Began, Ended time.Time
	// Pod, App and Source are the answer: who gave it, and the client's address as the pod saw it.
	Pod, App string
	Source   netip.Addr
	// Err is why there was none.
	Err string
}

// Flow is a connection that was to last.
type Flow struct {
	Service string
	Target  netip.AddrPort
	Client  netip.Addr
	Pod     string
	// Relayed connections end with the relay that carries them, after its drain time.
	Relayed bool
	Began   time.Time
	// Asked is when the last line was sent, without an answer if it broke.
	Asked time.Time
	// Broke is when it broke, and Err how; zero for one that lasted.
	Broke time.Time
	Err   string
}

// Holder is a Service that the API server showed with an address.
type Holder struct {
	Seen    time.Time
	Service string
	Share   string // its sharing key
	Address netip.Addr
}

// Service is a Service as the API server shows it.
type Service struct {
	Name, App, Share string
	Local, BGP       bool
	// TCP and UDP are ports that clients connect to, HealthPort the health port; 0 for none.
	TCP, UDP, HealthPort uint16
	Addresses            []netip.Addr
	// Endpoints are the addresses of all its pods, ready or not.
	Endpoints []netip.Addr
	// Ready has the number of ready pods by node.
	Ready map[string]int
	// Announced is the condition, with its reason; Owners are the nodes that the status names, by address.
	Announced       bool
	Reason, Message string
	Owners          map[netip.Addr]string
	// Health is the answer of the health port by node: 200, 503, or 0 without an answer; nil for a Service
	// without one.
	Health map[string]int
}

// Port is where clients connect to, over tcp or udp.
type Port struct {
	Network string
	To      netip.AddrPort
}

// addressOnly is an address without a port.
func addressOnly(a netip.Addr) Port { return Port{To: netip.AddrPortFrom(a, 0)} }

// Ports returns those of a Service at one of its addresses.
func (s Service) Ports(a netip.Addr) []Port {
	var ports []Port
	if s.TCP != 0 {
		ports = append(ports, Port{"tcp", netip.AddrPortFrom(a, s.TCP)})
	}
	if s.UDP != 0 {
		ports = append(ports, Port{"udp", netip.AddrPortFrom(a, s.UDP)})
	}
	return ports
}

// HasReady reports whether there is a ready pod.
func (s Service) HasReady() bool { return len(s.nodes()) > 0 }

// nodes returns the nodes with a ready pod.
func (s Service) nodes() []string {
	var nodes []string
	for node, n := range s.Ready {
		if n > 0 {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// Kernel is what a node's kernel holds for Services.
type Kernel struct {
	// Named are the ports at addresses of Services that rules are about, and addresses without a port. Elements of sets
	// that the kernel forgets by itself do not count.
	Named []Port
	// Delivered are those ports that have endpoints.
	Delivered map[Port]bool
	// UDP are the flows that conntrack knows.
	UDP []UDPFlow
}

// UDPFlow is what conntrack knows of a flow: which address and port of a Service a client asks, and which address
// answers.
type UDPFlow struct {
	To      netip.AddrPort
	Backend netip.Addr
}

// Refused says that a request was refused rather than dropped.
const Refused = "refused"

// Snapshot is the state of the cluster, as the API server, the speakers, the LAN and the router show it.
type Snapshot struct {
	At       time.Time
	Services []Service
	// Nodes are those that may announce.
	Nodes []string
	// Members are the nodes that each node's speaker sees.
	Members map[string][]string
	// Answering are the nodes that say that they answer for an address; Heard are those whose MAC addresses
	// answer on the LAN, "?" and the MAC for another; Routed are those that the router's kernel leads it to.
	Answering, Heard, Routed map[netip.Addr][]string
	// Asked is how a request ended, by what was asked: "" for an answer, [Refused] for a reset or an ICMP error. What has
	// pods is asked by a client, all else by a node or a pod.
	Asked map[Port]string
	// ClusterIPs are those of all Services, of other namespaces too.
	ClusterIPs []netip.Addr
	// Kernels are what the nodes' kernels hold, by node; nil unless all else is well, as it takes long to read.
	Kernels map[string]Kernel
	// Expected are the addresses that Services had from the start, and keep.
	Expected map[string][]netip.Addr
	// Unknown is what could not be seen.
	Unknown []string
}

// Violated begins each line of a report that tells of a violation. A test that prints one has failed, however often it
// passes when it runs again.
const Violated = "VIOLATED"

// Violation is a clause that did not hold.
type Violation struct {
	// Clause is the number in the contract, and Name that of the function here.
	Clause int    `json:"clause"`
	Name   string `json:"name"`
	Round  int    `json:"round"`
	Text   string `json:"text"`
	// At is when, if that is known.
	At time.Time `json:"at,omitzero"`
}
