package cases

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Backend is an endpoint of a case with its conditions and its topology hints.
type Backend struct {
	At                          string // local, local2 or remote
	Ready, Serving, Terminating bool
	Zones, Nodes                []string
}

// Case is one row of the table: a Service in some state, a connection, and where it ends.
type Case struct {
	// Name begins with the number of the case in the reference of Service semantics, if it has one.
	Name string
	// Service and Config change the Service and the configuration that all cases start from; nil for
	// as they are.
	Service func(w World, s *lb.Service)
	Config  func(w World, c *plan.Config)
	// Zone is the node's; "" for unknown.
	Zone string
	// Backends are the endpoints; nil for one ready here and one there.
	Backends []Backend
	From     string // outside, stranger, pod, node or local (the endpoint itself)
	// cluster, vip, vip2, external, nodeport, nodeport2 (at the node's other address), loopback,
	// client (outside) or unallocated
	To string
	// Also are other destinations of the Service that the same client connects to in turn, and ends
	// where it ends at To.
	Also     []string
	Protocol lb.Protocol // TCP if ""
	// Want are the endpoints that get connections, or one of reject, drop and none: none of ours, so
	// that nothing is done to it.
	Want string
	SNAT bool
	// Own gives the node the VIP as an address of its own.
	Own bool
	// Unpooled leaves the VIPs out of all pools.
	Unpooled bool
	// Sticky sends all connections to one of the endpoints of Want.
	Sticky bool
	// Invalid is for a packet of no connection, which conntrack finds invalid.
	Invalid bool
	// Scheduler chooses among the endpoints; random if "". The others are nftables' only.
	Scheduler plan.Scheduler
	// Only limits the case to one family.
	Only lb.Family
}

// For returns the cases for a family and a dialect; nftables tells which.
func For(family lb.Family, nftables bool) []Case {
	var some []Case
	for _, c := range All() {
		if c.Only != "" && c.Only != family || c.Scheduler != "" && !nftables {
			continue
		}
		some = append(some, c)
	}
	return some
}

// Objects returns the case's Service and its EndpointSlices.
func (c Case) Objects(w World) (lb.Service, []lb.Slice) {
	svc := lb.Service{
		Key: lb.Key{Namespace: "test", Name: "web"}, Type: lb.LoadBalancer,
		ClusterIPs: []netip.Addr{w.ClusterIP}, ExternalIPs: []netip.Addr{w.External},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		Ingress: []lb.Ingress{{Addr: w.VIP}, {Addr: w.VIP2}},
	}
	slice := lb.Slice{Key: svc.Key, Service: svc.Key, Family: w.Family}
	for _, p := range []lb.Protocol{lb.TCP, lb.UDP, lb.SCTP} {
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: p.Lower(), Protocol: p, Port: ServicePort, NodePort: NodePort})
		slice.Ports = append(slice.Ports, lb.SlicePort{Name: p.Lower(), Protocol: p, Port: BackendPort(p)})
	}
	if c.Service != nil {
		c.Service(w, &svc)
	}
	backends := c.Backends
	if backends == nil {
		backends = bothReady
	}
	for _, b := range backends {
		node := Here
		if b.At == "remote" {
			node = There
		}
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{
			Addr: w.Endpoint(b.At), Node: node, Ready: b.Ready, Serving: b.Serving, Terminating: b.Terminating,
			ForZones: b.Zones, ForNodes: b.Nodes,
		})
	}
	return svc, []lb.Slice{slice}
}

// Plan returns the case's Service as the node plans it, and the configuration of its rules.
func (c Case) Plan(w World) (plan.Service, plan.Config) {
	config := plan.Config{Pods: plan.Detector{Prefixes: []netip.Prefix{w.Pods}}, MasqueradeBit: 14,
		LoopbackNodePorts: true, DropInvalid: true}
	if c.Config != nil {
		c.Config(w, &config)
	}
	svc, endpoints := c.Objects(w)
	planned := plan.New(svc, endpoints, plan.Node{Name: Here, Zone: c.Zone, Addresses: []netip.Addr{w.Node}})
	planned.Scheduler = c.Scheduler
	claims, pools := plan.NewClaims(), map[string][]lb.Range{"lan": {w.Pool}}
	if c.Unpooled {
		pools = nil
	}
	claims.Configure(plan.ExternalIPs{Pools: pools}, nil)
	claims.Set(planned)
	return claims.Grant(planned), config
}

// Source returns who connects.
func (c Case) Source(w World) netip.Addr {
	if c.To == "loopback" {
		return w.Loopback.Addr()
	}
	return map[string]netip.Addr{"outside": w.Outside, "stranger": w.Stranger, "pod": w.Pod, "node": w.Node,
		"local": w.Local}[c.From]
}

// Interface returns where the packet comes in; "" for one of the node's own.
func (c Case) Interface() string {
	return map[string]string{"outside": "eth0", "stranger": "eth0", "pod": "podc", "local": "poda"}[c.From]
}

// Destination returns what is connected to.
func (c Case) Destination(w World) netip.AddrPort {
	switch c.To {
	case "nodeport":
		return netip.AddrPortFrom(w.Node, NodePort)
	case "nodeport2":
		return netip.AddrPortFrom(w.Node2, NodePort)
	case "loopback":
		return netip.AddrPortFrom(w.Loopback.Addr(), NodePort)
	case "client":
		return netip.AddrPortFrom(w.Outside, clientPort)
	}
	return netip.AddrPortFrom(map[string]netip.Addr{"cluster": w.ClusterIP, "vip": w.VIP, "vip2": w.VIP2,
		"external": w.External, "unallocated": w.Unallocated}[c.To], ServicePort)
}

// Legs returns the case once for each destination.
func (c Case) Legs() []Case {
	legs := []Case{c}
	for _, to := range c.Also {
		leg := c
		leg.To, leg.Also = to, nil
		legs = append(legs, leg)
	}
	legs[0].Also = nil
	return legs
}

// Transport returns the protocol of the connection.
func (c Case) Transport() lb.Protocol {
	if c.Protocol == "" {
		return lb.TCP
	}
	return c.Protocol
}

// Ends returns the sorted ends that the case expects, as addresses of backends or a verdict.
func (c Case) Ends(w World) []string {
	var ends []string
	for at := range strings.FieldsSeq(c.Want) {
		if a := w.Endpoint(at); a.IsValid() {
			at = netip.AddrPortFrom(a, BackendPort(c.Transport())).String()
		}
		ends = append(ends, at)
	}
	slices.Sort(ends)
	return ends
}

// LocalAddresses are the node's own.
func (c Case) LocalAddresses(w World) []netip.Addr {
	local := []netip.Addr{w.Node, w.Node2, w.Loopback.Addr()}
	if c.Own {
		local = append(local, w.VIP)
	}
	return local
}
