package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Cluster describes a lab: what stands where, with which addresses. A description is a plain value;
// [SeedCluster] gives one, a test changes what it needs, [Start] builds it.
type Cluster struct {
	// LAN is the network of the nodes and the near client, Far the one behind the router.
	LAN, Far Network
	// PodNetwork contains the pod networks of all nodes; agents get it as the cluster CIDR.
	PodNetwork netip.Prefix
	// ServiceNetwork is where the API server takes cluster IPs from.
	ServiceNetwork netip.Prefix
	// DualStack gives IPv6 beside IPv4 to everything: each address has the twin that [Twin] returns,
	// and cluster IPs of IPv6 come from [ServiceNetwork6]. Networks must then have lengths that are
	// multiples of 8.
	DualStack bool
	// CNI is the shape of the pods' network; the zero value is [HostGW].
	CNI CNI
	// Racks is how many racks the nodes are in, each behind ToR routers of its own and all behind a
	// spine ([SpineName]); 0 for one network without a spine. See [RackCluster].
	Racks int
	// ToR are the routers that speak BGP with the nodes; the zero value is a plain router.
	ToR ToR
	// Nodes are the nodes; the first control-plane node runs etcd and the API server.
	Nodes []Node
	// Pods are there from the start. More come with [Lab.AddPod].
	Pods []Pod
	// Services are created at the start, their EndpointSlices follow the pods.
	Services []Service
}

// Network is an Ethernet segment with the router's address and one client in it.
type Network struct {
	Prefix netip.Prefix
	Router netip.Addr
	Client netip.Addr
}

// Node is one node of the cluster.
type Node struct {
	Name string
	Addr netip.Addr
	// PodNetwork is the node's share of the cluster's pod network. Its last address but one (.254 of a
	// /24) is the bridge's, which is the pods' gateway.
	PodNetwork   netip.Prefix
	ControlPlane bool
	Labels       map[string]string
	// Rack is the node's, from 1 on, in a cluster of racks.
	Rack int
}

// Pod is one pod: a network namespace behind its node's bridge, with a small server in it that says
// who it is.
type Pod struct {
	Name string
	Node string
	Addr netip.Addr
	// App is what Services select their pods by.
	App string
	// TCP and UDP are the ports that the pod's server listens on.
	TCP, UDP []uint16
}

// Service is a Service that the lab creates, with fixed addresses where they are given.
type Service struct {
	Namespace, Name string
	// App selects the pods; empty for a Service whose endpoints somebody else writes.
	App       string
	ClusterIP netip.Addr
	// Type is ClusterIP, NodePort or LoadBalancer; empty for ClusterIP.
	Type string
	// ExternalTrafficPolicy is Cluster or Local; empty for the API's default.
	ExternalTrafficPolicy string
	// IPFamilies are IPv4, IPv6 or both, the first one first; empty for the API's default, which is
	// IPv4 alone.
	IPFamilies []corev1.IPFamily
	Ports      []Port
	// Annotations are the object's. Affinity keeps each client with one pod.
	Annotations map[string]string
	Affinity    bool
}

// Port is one port of a Service.
type Port struct {
	Name     string
	Protocol string // TCP or UDP; empty for TCP
	Port     uint16
	Target   uint16 // the pods' port; 0 for the same as Port
	NodePort uint16 // 0 lets the API server choose, if the Service's type has one
}

// SeedCluster returns the VMware cluster of the project's worked example, address for address: a
// control-plane node and three workers on 172.26.236.0/24, the Service default/my-nginx with two
// pods, and kube-dns. The API server adds default/kubernetes itself. my-nginx is left out of
// Services when it is not wanted from the start: see [SeedService].
func SeedCluster() Cluster {
	node := func(n byte, name string) Node {
		return Node{
			Name:       name,
			Addr:       netip.AddrFrom4([4]byte{172, 26, 236, n}),
			PodNetwork: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, n, 0}), 24),
		}
	}
	master, w177, w178, w179 := node(176, "k8s-master-176"), node(177, "k8s-worker-177"), node(178, "k8s-worker-178"),
		node(179, "k8s-worker-179")
	master.ControlPlane = true
	// The worked example's pods are in these networks.
	w178.PodNetwork = netip.MustParsePrefix("192.168.189.0/24")
	w179.PodNetwork = netip.MustParsePrefix("192.168.100.0/24")

	return Cluster{
		LAN: Network{
			Prefix: netip.MustParsePrefix("172.26.236.0/24"),
			Router: netip.MustParseAddr("172.26.236.1"),
			Client: netip.MustParseAddr("172.26.236.20"),
		},
		Far: Network{
			Prefix: netip.MustParsePrefix("198.51.100.0/24"),
			Router: netip.MustParseAddr("198.51.100.1"),
			Client: netip.MustParseAddr("198.51.100.20"),
		},
		PodNetwork:     netip.MustParsePrefix("192.168.0.0/16"),
		ServiceNetwork: netip.MustParsePrefix("10.96.0.0/12"),
		Nodes:          []Node{master, w177, w178, w179},
		Pods: []Pod{
			{Name: "my-nginx-1", Node: w178.Name, Addr: netip.MustParseAddr("192.168.189.131"), App: "my-nginx",
				TCP: []uint16{80}},
			{Name: "my-nginx-2", Node: w179.Name, Addr: netip.MustParseAddr("192.168.100.1"), App: "my-nginx",
				TCP: []uint16{80}},
			{Name: "coredns-1", Node: master.Name, Addr: netip.MustParseAddr("192.168.176.10"), App: "kube-dns",
				TCP: []uint16{53, 9153}, UDP: []uint16{53}},
			{Name: "coredns-2", Node: w177.Name, Addr: netip.MustParseAddr("192.168.177.10"), App: "kube-dns",
				TCP: []uint16{53, 9153}, UDP: []uint16{53}},
		},
		Services: []Service{{
			Namespace: "kube-system", Name: "kube-dns", App: "kube-dns", ClusterIP: netip.MustParseAddr("10.96.0.10"),
			Ports: []Port{{Name: "dns", Protocol: "UDP", Port: 53}, {Name: "dns-tcp", Port: 53}, {Name: "metrics", Port: 9153}},
		}},
	}
}

// SeedService returns default/my-nginx of the worked example: type LoadBalancer, cluster IP
// 10.106.189.218, node port 31428.
func SeedService() Service {
	return Service{
		Namespace: "default", Name: "my-nginx", App: "my-nginx", Type: "LoadBalancer",
		ClusterIP: netip.MustParseAddr("10.106.189.218"),
		Ports:     []Port{{Port: 80, NodePort: 31428}},
	}
}

// Gateway returns the address of the node's bridge, the pods' way out: the last of the pod network
// but the broadcast address. Not the first as most bridge plugins have it, since a pod of the
// worked example has that one.
func (n Node) Gateway() netip.Addr {
	last := n.PodNetwork.Masked().Addr().AsSlice()
	for bit := n.PodNetwork.Bits(); bit < len(last)*8; bit++ {
		last[bit/8] |= 1 << (7 - bit%8)
	}
	addr, _ := netip.AddrFromSlice(last)
	return addr.Prev()
}

// Validate joins what is wrong with the description.
func (c Cluster) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }

	names, addrs := map[string]bool{}, map[netip.Addr]string{}
	claim := func(name string, addr netip.Addr, in netip.Prefix) {
		if name == "" || names[name] {
			bad("%q: empty or used twice as a name", name)
		}
		names[name] = true
		if !in.Contains(addr) {
			bad("%s: address %s is not in %s", name, addr, in)
		} else if other, taken := addrs[addr]; taken {
			bad("%s: address %s is %s's already", name, addr, other)
		}
		addrs[addr] = name
	}
	if c.DualStack {
		for _, p := range c.networks() {
			if p.Bits()%8 != 0 {
				bad("%s: a network with a twin of IPv6 needs a length that is a multiple of 8", p)
			}
		}
	}
	known := []CNI{VXLAN, Calico, CalicoVXLAN, CalicoIPIP, CalicoBGP}
	if c.CNI != HostGW && !slices.Contains(known, c.CNI) {
		bad("CNI %q: want one of %q, or none for flannel's host-gw", c.CNI, known)
	}
	if c.CNI == CalicoBGP && (c.ToR.Count != 1 && c.Racks == 0 || !c.DualStack) {
		bad("CNI %s: want one ToR router or racks, and both families", c.CNI)
	}
	errs = append(errs, c.ToR.validate(), c.validateRacks())
	for i, addr := range c.gateways(c.LAN) {
		name := RouterName
		if i > 0 {
			name = torName(i)
		}
		claim(name, addr, c.LAN.Prefix)
	}
	claim(ClientName, c.LAN.Client, c.LAN.Prefix)
	claim(FarClientName, c.Far.Client, c.Far.Prefix)
	names[switchName] = true

	nodes := map[string]Node{}
	for _, n := range c.Nodes {
		network, _ := c.nodeNetwork(n)
		claim(n.Name, n.Addr, network.Prefix)
		if !c.PodNetwork.Contains(n.PodNetwork.Addr()) || n.PodNetwork.Bits() < c.PodNetwork.Bits() {
			bad("%s: pod network %s is not in %s", n.Name, n.PodNetwork, c.PodNetwork)
		}
		nodes[n.Name] = n
	}
	if !slices.ContainsFunc(c.Nodes, func(n Node) bool { return n.ControlPlane }) {
		bad("no control-plane node to run the API server on")
	}
	for _, p := range c.Pods {
		node, ok := nodes[p.Node]
		if !ok {
			bad("pod %s: no node %q", p.Name, p.Node)
			continue
		}
		claim(p.Name, p.Addr, node.PodNetwork)
		if p.Addr == node.Gateway() {
			bad("pod %s: %s is the address of its node's bridge", p.Name, p.Addr)
		}
	}
	return errors.Join(errs...)
}

// Master returns the node that runs the API server.
func (c Cluster) Master() Node {
	return c.Nodes[slices.IndexFunc(c.Nodes, func(n Node) bool { return n.ControlPlane })]
}
