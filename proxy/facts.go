package main

import (
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// labelZone is the well-known label that says in which zone a node is.
const labelZone = "topology.kubernetes.io/zone"

// settings are what the flags say about rules.
type settings struct {
	// pods tells pods' connections from others; its prefixes come from the Node when nodeCIDR is set.
	pods     plan.Detector
	nodeCIDR bool
	// nodePorts limits node ports to local addresses in these networks; primary adds the Node's own
	// addresses.
	nodePorts         []netip.Prefix
	primary           bool
	loopbackNodePorts bool
	masqueradeAll     bool
	masqueradeBit     int
	dropInvalid       bool
	answerPing        bool
	drain             time.Duration
	scheduler         plan.Scheduler
	// allAddresses lists the node's addresses where node ports are not limited, for rules that cannot
	// ask the kernel.
	allAddresses bool
}

// facts are what is known of this node.
type facts struct {
	self   string
	object lb.Node // as last seen
	node   plan.Node
	config plan.Config
	// healthAddresses limit where the health ports of Services are served.
	healthAddresses map[lb.Family][]netip.Addr
	known           bool // the Node object has been seen
	leaving         lb.Reason
}

func (f facts) samePlans(other facts) bool { return reflect.DeepEqual(f.node, other.node) }

func (f facts) sameRules(other facts) bool { return reflect.DeepEqual(f.config, other.config) }

// facts reads what is known of the node called self. waiting names what is missing before any rule
// can be right. A Node object that is deleted stays as it was last seen (before): the rules go on.
func (s settings) facts(self string, from sources, before facts) (f facts, waiting string) {
	node, ok := from.nodes.Get(self)
	if !ok {
		node = before.object
		if before.object.Name != "" {
			node.Leaving = lb.ReasonNodeLeaving
		}
	}
	interfaces, listed := from.interfaces()
	switch {
	case !from.services.Synced():
		return f, "the Services"
	case !from.slices.Synced():
		return f, "the EndpointSlices"
	case !from.networks.Synced():
		return f, "the ServiceCIDRs"
	case s.nodeCIDR && len(node.PodCIDRs) == 0:
		return f, "the pod networks in the Node " + self
	case s.primary && len(node.Addresses) == 0:
		return f, "the addresses of the Node " + self
	case !listed:
		return f, "the network interfaces"
	}
	f = facts{
		self: self, object: node, node: plan.Node{
			Name: self, Zone: node.Labels[labelZone], Addresses: node.Addresses, Scheduler: s.scheduler,
		},
		known: ok, leaving: node.Leaving,
		config: plan.Config{
			Pods: s.pods, MasqueradeAll: s.masqueradeAll, MasqueradeBit: s.masqueradeBit, DropInvalid: s.dropInvalid,
			LoopbackNodePorts: s.loopbackNodePorts, AnswerPing: s.answerPing,
			ServiceNetworks:   serviceNetworks(from.networks.All()),
			NodePortAddresses: s.nodePortAddresses(node, interfaces),
		},
	}
	f.healthAddresses = f.config.NodePortAddresses
	if s.allAddresses {
		f.config = nftables.WithAddresses(f.config, stable(localAddresses(interfaces)))
	}
	if s.nodeCIDR {
		f.config.Pods.Prefixes = node.PodCIDRs
	}
	return f, ""
}

// serviceNetworks returns the networks of all ServiceCIDRs in a stable order.
func serviceNetworks(all map[string][]netip.Prefix) []netip.Prefix {
	var networks []netip.Prefix
	for _, of := range all {
		networks = append(networks, of...)
	}
	slices.SortFunc(networks, netip.Prefix.Compare)
	return slices.Compact(networks)
}

// nodePortAddresses returns the node's addresses that serve node ports, for the families that are
// limited.
func (s settings) nodePortAddresses(node lb.Node, interfaces []lb.Interface) map[lb.Family][]netip.Addr {
	limited := map[lb.Family][]netip.Addr{}
	add := func(addr netip.Addr) {
		family := lb.FamilyOf(addr)
		if addr.IsLoopback() && (family != lb.IPv4 || !s.loopbackNodePorts) {
			return // could not be answered
		}
		if !slices.Contains(limited[family], addr) {
			limited[family] = append(limited[family], addr)
		}
	}
	for _, network := range s.nodePorts {
		limited[lb.FamilyOf(network.Addr())] = []netip.Addr{}
	}
	if s.primary {
		for _, addr := range node.Addresses {
			if len(limited[lb.FamilyOf(addr)]) == 0 {
				add(addr)
			}
		}
	}
	for _, addr := range localAddresses(interfaces) {
		if slices.ContainsFunc(s.nodePorts, func(network netip.Prefix) bool { return network.Contains(addr) }) {
			add(addr)
		}
	}
	for _, addrs := range limited {
		slices.SortFunc(addrs, netip.Addr.Compare)
	}
	if len(limited) == 0 {
		return nil
	}
	return limited
}

// stable leaves out link-local IPv6 addresses, of which each interface of a pod brings one: nobody
// is told to connect to them, and all rules would change with every pod. The rest is sorted.
func stable(addrs []netip.Addr) []netip.Addr {
	addrs = slices.DeleteFunc(addrs, func(addr netip.Addr) bool { return addr.Is6() && addr.IsLinkLocalUnicast() })
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// localAddresses returns the addresses of the interfaces.
func localAddresses(interfaces []lb.Interface) []netip.Addr {
	var addrs []netip.Addr
	for _, i := range interfaces {
		for _, p := range i.Addresses {
			addrs = append(addrs, p.Addr())
		}
	}
	return addrs
}
