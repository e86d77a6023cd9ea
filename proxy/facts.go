package main

import (
	"cmp"
	"net/netip"
	"reflect"
	"slices"
	"strings"
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
	setRouteLocalnet  bool
	masqueradeAll     bool
	masqueradeBit     int
	dropInvalid       bool
	answerPing        bool
	externalIPs       plan.ExternalIPs
	// serviceNetworks are networks of cluster IPs that no ServiceCIDR may show.
	serviceNetworks []netip.Prefix
	// apiServers are the addresses by which the proxy itself was told to reach the API server.
	apiServers      []netip.Addr
	acceptForwarded bool
	drain           time.Duration
	// gateTimeout is how long a pod's readiness gate stays closed at most; 0 if none waits for the proxy.
	gateTimeout time.Duration
	scheduler   plan.Scheduler
	// allAddresses lists the node's addresses where node ports are not limited, for rules that cannot
	// ask the kernel.
	allAddresses bool
	// direct are the families in which the rules can hand packets over to other nodes.
	direct map[lb.Family]bool
	// offload are the families in which the rules offload established flows, notOffloaded why not in others that shall.
	offload      map[lb.Family]bool
	offloadUDP   bool
	notOffloaded map[lb.Family]string
	// relay has the rules send connections to a relay, if the mode can.
	relay bool
	// relayUDP has it do so for UDP too.
	relayUDP bool
	// relayUDPRate is how many new flows of UDP a second it sends there from each namespace; 0 for no limit.
	relayUDPRate int
	// needs returns what a Service needs of that of which the Services of one namespace may have limit together, in
	// which unit; nil if nothing is counted.
	needs func(plan.Service) int
	limit int
	unit  string
}

// facts are what is known of this node.
type facts struct {
	self   string
	object lb.Node // as last seen
	node   plan.Node
	config plan.Config
	// external says which external IPs are served, own are the node's own addresses.
	external plan.ExternalIPs
	own      []netip.Addr
	// lans are the interfaces over which packets can be handed to other nodes, networks those that they
	// are in.
	lans     []lb.Interface
	networks []netip.Prefix
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
	own, others := ownAddresses(interfaces)
	switch {
	case !from.services.Synced():
		return f, "the Services"
	case !from.slices.Synced():
		return f, "the EndpointSlices"
	case !from.networks.Synced():
		return f, "the ServiceCIDRs"
	case !from.nodes.Synced():
		return f, "the Nodes"
	case !from.pools.Synced():
		return f, "the IPAddressPools"
	case !from.routers.Synced():
		return f, "the BGPPeers"
	case from.gated != nil && !from.gated.Synced():
		return f, "the pods of this node"
	case s.nodeCIDR && len(node.PodCIDRs) == 0:
		return f, "the pod networks in the Node " + self
	case s.primary && len(node.Addresses) == 0:
		return f, "the addresses of the Node " + self
	case !listed:
		return f, "the network interfaces"
	}
	if from.vrfs != nil {
		if _, known := from.vrfs(); !known {
			return f, "the VRFs"
		}
	}
	f = facts{
		self: self, object: node, node: plan.Node{
			Name: self, Zone: node.Labels[labelZone], Addresses: node.Addresses, Scheduler: s.scheduler,
			Relay: s.relay, RelayTCPOnly: !s.relayUDP,
		},
		known: ok, leaving: node.Leaving,
		config: plan.Config{
			Pods: s.pods, MasqueradeAll: s.masqueradeAll, MasqueradeBit: s.masqueradeBit, DropInvalid: s.dropInvalid,
			LoopbackNodePorts: s.loopbackNodePorts, SetRouteLocalnet: s.setRouteLocalnet, AnswerPing: s.answerPing,
			Relay:             s.relay,
			RelayUDPRate:      s.relayUDPRate,
			Offload:           s.offload,
			OffloadUDP:        s.offloadUDP,
			NodePortAddresses: s.nodePortAddresses(node, own),
		},
	}
	f.external, f.own, f.lans = s.externalIPs, own, lansOf(interfaces)
	f.networks = networksOf(f.lans)
	f.external.Pools, f.external.Networks = from.pools.All(), serviceNetworks(from.networks.All(), s.serviceNetworks)
	f.config.ServiceNetworks, _ = plan.OnlyServices(f.external.Networks, from.nodes.All(), s.pods.Prefixes)
	f.external.APIServers = s.allAPIServers(from)
	for _, r := range from.routers.All() {
		f.external.Routers = append(f.external.Routers, r.Addr)
	}
	f.external.Routers = distinct(f.external.Routers)
	f.external.Hostless, f.external.Own = hostless(interfaces), theNodes(interfaces)
	f.healthAddresses = f.config.NodePortAddresses
	switch {
	case s.allAddresses:
		f.config = nftables.WithAddresses(f.config, own)
	case others: // rules that ask the kernel for its addresses would serve node ports there too
		f.config = withAddresses(f.config, own)
	}
	if s.nodeCIDR {
		f.config.Pods.Prefixes = node.PodCIDRs
	}
	f.external.Pods = f.config.Pods.Prefixes
	f.config.VRFInterfaces = inVRFs(interfaces, vrfsOf(from.routers.All()))
	f.node.VRFs = len(f.config.VRFInterfaces) > 0
	if from.relayPorts != nil {
		f.config.RelayTo = f.relayTo(from.relayPorts())
	}
	f.node.Direct = map[lb.Family]bool{}
	for family := range s.direct {
		f.node.Direct[family] = f.config.Pods.Tells(family)
	}
	return f, ""
}

// apiServers is the Service whose endpoints are the API servers.
var apiServers = lb.Key{Namespace: "default", Name: "kubernetes"}

// allAPIServers returns the addresses of the API servers, sorted: those that they tell of, and those that the
// proxy was told, which may be a load balancer in front of them.
func (s settings) allAPIServers(from sources) []netip.Addr {
	all := slices.Clone(s.apiServers)
	endpoints, _ := from.slices.Get(apiServers)
	for _, slice := range endpoints {
		for _, ep := range slice.Endpoints {
			all = append(all, ep.Addr)
		}
	}
	return distinct(all)
}

func distinct(all []netip.Addr) []netip.Addr {
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// serviceNetworks returns the networks of all ServiceCIDRs, and the given ones, in a stable order.
func serviceNetworks(all map[string][]netip.Prefix, given []netip.Prefix) []netip.Prefix {
	networks := slices.Clone(given)
	for _, of := range all {
		networks = append(networks, of...)
	}
	slices.SortFunc(networks, netip.Prefix.Compare)
	return slices.Compact(networks)
}

// nodePortAddresses returns the node's addresses that serve node ports, for the families that are
// limited.
func (s settings) nodePortAddresses(node lb.Node, own []netip.Addr) map[lb.Family][]netip.Addr {
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
	for _, addr := range own {
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

// withAddresses names the addresses that serve node ports, 127.0.0.1 among them if it does.
func withAddresses(config plan.Config, own []netip.Addr) plan.Config {
	config = nftables.WithAddresses(config, own)
	if config.LoopbackNodePorts {
		loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		if v4 := config.NodePortAddresses[lb.IPv4]; !slices.Contains(v4, loopback) {
			config.NodePortAddresses[lb.IPv4] = append(slices.Clone(v4), loopback)
		}
	}
	return config
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

// holdsOthers reports whether the addresses of an interface are not the node's: kube-proxy in mode ipvs, kube-router's
// service proxy, and node-local DNS caches put those of Services on interfaces with these names. Only the name tells: a
// node may well have its own address on a dummy or loopback interface, as with BGP down to the host.
func holdsOthers(i lb.Interface) bool {
	return strings.HasPrefix(i.Name, "kube-ipvs") || i.Name == "kube-dummy-if" || strings.HasPrefix(i.Name, "nodelocaldns")
}

// ownAddresses returns the node's own addresses, sorted, and whether the kernel takes others for its own: on interfaces
// that holdsOthers, or that are down. It leaves out link-local IPv6 addresses. Each interface of a pod has one, so all
// rules would change with every pod, and no client connects to them.
func ownAddresses(interfaces []lb.Interface) (own []netip.Addr, others bool) {
	for _, i := range interfaces {
		if holdsOthers(i) {
			others = others || len(i.Addresses) > 0
			continue
		}
		for _, p := range i.Addresses {
			switch addr := p.Addr(); {
			case i.Disabled:
				others = true
			case addr.Is4() || !addr.IsLinkLocalUnicast():
				own = append(own, addr)
			}
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	return slices.Compact(own), others
}

// theNodes returns the addresses that are the node's alone, and no Service's, sorted. Programs that move addresses
// between nodes, such as keepalived and kube-vip, and those that announce addresses by BGP, put them on interfaces too,
// and Services list such addresses on purpose: as a network of one address, as a second address of a network, or on a
// loopback or dummy interface.
func theNodes(interfaces []lb.Interface) (all []plan.Own) {
	for _, i := range interfaces {
		if holdsOthers(i) || i.Disabled || i.Loopback || i.NoARP {
			continue
		}
		for _, p := range i.Addresses {
			if addr := p.Addr(); !p.IsSingleIP() && addr.IsGlobalUnicast() && !slices.Contains(i.Secondary, addr) {
				all = append(all, plan.Own{Addr: addr, Interface: i.Name})
			}
		}
	}
	slices.SortFunc(all, func(a, b plan.Own) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Interface, b.Interface))
	})
	return slices.CompactFunc(all, func(a, b plan.Own) bool { return a.Addr == b.Addr })
}

// hostless returns the network and broadcast addresses of the networks that the node is in, sorted. A network of
// addresses on a loopback interface, or of others' ones, has no hosts to send to.
func hostless(interfaces []lb.Interface) (all []lb.Unassignable) {
	for _, i := range interfaces {
		if holdsOthers(i) || i.Disabled || i.Loopback {
			continue
		}
		for _, p := range i.Addresses {
			all = append(all, lb.HostlessOf(p)...)
		}
	}
	slices.SortFunc(all, func(a, b lb.Unassignable) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.What, b.What))
	})
	return slices.Compact(all)
}

// inVRFs returns the names of the interfaces in these VRFs, and of the VRFs, sorted.
func inVRFs(interfaces []lb.Interface, vrfs map[string]bool) (names []string) {
	for _, i := range interfaces {
		if vrfs[i.VRF] {
			names = append(names, i.Name)
		}
	}
	slices.Sort(names)
	return names
}

// ifAddressesChange returns what calls poke if the node's own addresses, its networks, or the interfaces in VRFs, have
// changed since its last call. The interfaces of pods come and go all the time.
func ifAddressesChange(poke func()) func(interfaces []lb.Interface) {
	var known, others bool
	var own []netip.Addr
	var vrfs []string // an interface's VRF and name
	var ends []lb.Unassignable
	var hosts []plan.Own
	return func(interfaces []lb.Interface) {
		nowOwn, nowOthers := ownAddresses(interfaces)
		nowEnds, nowHosts := hostless(interfaces), theNodes(interfaces)
		var nowVRFs []string
		for _, i := range interfaces {
			if i.VRF != "" {
				nowVRFs = append(nowVRFs, i.VRF+" "+i.Name)
			}
		}
		slices.Sort(nowVRFs)
		if known && nowOthers == others && slices.Equal(nowOwn, own) && slices.Equal(nowVRFs, vrfs) &&
			slices.Equal(nowEnds, ends) && slices.Equal(nowHosts, hosts) {
			return
		}
		known, others, own, vrfs, ends, hosts = true, nowOthers, nowOwn, nowVRFs, nowEnds, nowHosts
		poke()
	}
}
