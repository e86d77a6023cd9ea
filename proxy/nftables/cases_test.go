package nftables

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// world are the addresses of a node, its pods, one pod on another node, and who connects, in one family.
type world struct {
	family                              lb.Family
	node, node2, outside, stranger, pod netip.Addr
	local, local2, remote               netip.Addr // endpoints
	clusterIP, vip, vip2, external      netip.Addr
	pods, loopback                      netip.Prefix
}

func worldOf(family lb.Family) world {
	at := func(v4, v6 string) netip.Addr {
		if family == lb.IPv6 {
			return addr(v6)
		}
		return addr(v4)
	}
	net := func(v4, v6 string) netip.Prefix {
		if family == lb.IPv6 {
			return netip.MustParsePrefix(v6)
		}
		return netip.MustParsePrefix(v4)
	}
	return world{
		family: family,
		node:   at("172.31.0.1", "fd31::1"), node2: at("172.31.0.4", "fd31::4"),
		outside: at("172.31.0.2", "fd31::2"), stranger: at("172.31.0.3", "fd31::3"),
		pod:   at("192.168.3.2", "fd00:10:0:3::2"),
		local: at("192.168.1.2", "fd00:10:0:1::2"), local2: at("192.168.1.3", "fd00:10:0:1::3"), remote: at("192.168.2.2", "fd00:10:0:2::2"),
		clusterIP: at("10.96.0.1", "fd00:96::1"), vip: at("198.51.100.10", "2001:db8::10"), vip2: at("198.51.100.11", "2001:db8::11"),
		external: at("198.51.100.20", "2001:db8::20"),
		pods:     net("192.168.0.0/16", "fd00:10::/32"), loopback: net("127.0.0.1/32", "::1/128"),
	}
}

// backend is an endpoint of a case with its conditions.
type backend struct {
	at                          string // local, local2 or remote
	ready, serving, terminating bool
}

var (
	bothReady = []backend{{at: "local", ready: true, serving: true}, {at: "remote", ready: true, serving: true}}
	onlyLocal = bothReady[:1]
	onlyThere = bothReady[1:]
)

func going(at string, serving bool) backend {
	return backend{at: at, serving: serving, terminating: true}
}

func (w world) endpoint(at string) netip.Addr {
	return map[string]netip.Addr{"local": w.local, "local2": w.local2, "remote": w.remote}[at]
}

// semantics is one row of "what a user can observe": a Service in some state, a connection, and where it ends.
type semantics struct {
	name     string
	service  func(w world, s *lb.Service)
	config   func(w world, c *plan.Config)
	backends []backend
	from     string // outside, stranger, pod, node or local (the endpoint itself)
	to       string // cluster, vip, vip2, external, nodeport, nodeport2 (at the node's other address) or loopback
	udp      bool
	// want are the endpoints that get connections, or one of reject, drop and none.
	want string
	snat bool
	// own gives the node the VIP as an address of its own.
	own bool
	// scheduler chooses among the endpoints; random if "".
	scheduler Scheduler
	// only limits the case to one family.
	only lb.Family
}

func etpLocal(_ world, s *lb.Service) { s.ExternalPolicy = lb.Local }
func itpLocal(_ world, s *lb.Service) { s.InternalPolicy = lb.Local }
func ranged(w world, s *lb.Service)   { s.SourceRanges = []netip.Prefix{host(w.outside)} }
func blind(_ world, c *plan.Config)   { c.Pods = plan.Detector{} }

// cases are those of service-semantics section 4 that concern rules, by their numbers there.
func cases() []semantics {
	all := []semantics{
		{name: "1 pod to ClusterIP", from: "pod", to: "cluster", want: "local remote"},
		{name: "2 node to ClusterIP", from: "node", to: "cluster", want: "local remote", snat: true},
		{name: "3 outside to ClusterIP", from: "outside", to: "cluster", want: "local remote", snat: true},
		{name: "9 ETP Local and ClusterIP", service: etpLocal, from: "pod", to: "cluster", want: "local remote"},
		{name: "10 ITP Local, pod", service: itpLocal, from: "pod", to: "cluster", want: "local"},
		{name: "10 ITP Local, node", service: itpLocal, from: "node", to: "cluster", want: "local", snat: true},
		{name: "10 ITP Local, outside", service: itpLocal, from: "outside", to: "cluster", want: "local", snat: true},
		{name: "11 ITP Local, none local", service: itpLocal, backends: onlyThere, from: "pod", to: "cluster", want: "drop"},
		{name: "11 ITP Local, none at all", service: itpLocal, backends: []backend{}, from: "pod", to: "cluster", want: "reject"},
		{name: "9 ITP Local and VIP", service: itpLocal, from: "pod", to: "vip", want: "local remote", snat: true},
		{name: "12 no detector, outside to ClusterIP", config: blind, from: "outside", to: "cluster", want: "local remote"},
		{name: "12 no detector, pod to VIP with ETP Local", config: blind, service: etpLocal, from: "pod", to: "vip", want: "local"},
		{name: "13 masqueradeAll", config: func(_ world, c *plan.Config) { c.MasqueradeAll = true }, from: "pod", to: "cluster", want: "local remote", snat: true},
		{name: "20 source ranges, listed", service: ranged, from: "outside", to: "vip", want: "local remote", snat: true},
		{name: "20 source ranges, unlisted", service: ranged, from: "stranger", to: "vip", want: "drop"},
		{name: "20 source ranges, listed, VIP on the node", own: true, service: ranged, from: "outside", to: "vip", want: "local remote", snat: true},
		{name: "20 source ranges, unlisted, VIP on the node", own: true, service: ranged, from: "stranger", to: "vip", want: "drop"},
		{name: "16 no endpoints, VIP on the node", own: true, backends: []backend{}, from: "outside", to: "vip", want: "reject"},
		{name: "20 source ranges, pod", service: ranged, from: "pod", to: "vip", want: "drop"},
		{name: "20 source ranges and node port", service: ranged, from: "stranger", to: "nodeport", want: "local remote", snat: true},
		{name: "20 source ranges and external IP", service: ranged, from: "stranger", to: "external", want: "local remote", snat: true},
		{name: "20 source ranges with the node", service: func(w world, s *lb.Service) { s.SourceRanges = []netip.Prefix{host(w.node)} }, from: "node", to: "vip", want: "local remote", snat: true},
		{name: "20 source ranges without the node", service: ranged, from: "node", to: "vip", want: "drop"},
		{name: "22 everybody in range", service: func(w world, s *lb.Service) {
			s.SourceRanges = []netip.Prefix{host(w.outside), netip.PrefixFrom(w.outside, 0).Masked()}
		}, from: "stranger", to: "vip", want: "local remote", snat: true},
		{name: "23 second VIP", from: "outside", to: "vip2", want: "local remote", snat: true},
		{name: "24 ipMode Proxy", service: func(_ world, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy }, from: "outside", to: "vip", want: "none"},
		{name: "24 ipMode VIP", service: func(_ world, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeVIP }, from: "outside", to: "vip", want: "local remote", snat: true},
		{name: "25 node port at an address that is asked for", config: nodePortsAtNode, from: "outside", to: "nodeport", want: "local remote", snat: true},
		{name: "25 node port at another address", config: nodePortsAtNode, from: "outside", to: "nodeport2", want: "none"},
		{name: "25 refusal at another address", config: nodePortsAtNode, backends: []backend{}, from: "outside", to: "nodeport2", want: "none"},
		{name: "27 ready and terminating", backends: append([]backend{going("local2", true)}, bothReady...), from: "outside", to: "vip", want: "local remote", snat: true},
		{name: "28 only terminating", backends: []backend{going("local", true), going("remote", true)}, from: "pod", to: "cluster", want: "local remote"},
		{name: "29 only terminating and not serving", backends: []backend{going("local", false)}, from: "pod", to: "cluster", want: "reject"},
		{name: "30 ETP Local, local ones terminate, outside", service: etpLocal, backends: []backend{going("local", true), going("local2", false), onlyThere[0]}, from: "outside", to: "vip", want: "local"},
		{name: "30 ETP Local, local ones terminate, pod to ClusterIP", service: etpLocal, backends: []backend{going("local", true), onlyThere[0]}, from: "pod", to: "cluster", want: "remote"},
		{name: "31 ETP Local, remote ones terminate, pod to ClusterIP", service: etpLocal, backends: []backend{going("remote", true)}, from: "pod", to: "cluster", want: "remote"},
		{name: "31 ETP Local, remote ones terminate, outside", service: etpLocal, backends: []backend{going("remote", true)}, from: "outside", to: "vip", want: "drop"},
		{name: "hairpin at ClusterIP", backends: onlyLocal, from: "local", to: "cluster", want: "local", snat: true},
		{name: "hairpin at VIP with ETP Local", service: etpLocal, backends: onlyLocal, from: "local", to: "vip", want: "local", snat: true},
		{name: "17 UDP beside TCP", from: "outside", to: "vip", udp: true, want: "local remote", snat: true},
		{name: "17 UDP, ETP Local", service: etpLocal, from: "outside", to: "vip", udp: true, want: "local"},
		{name: "16 UDP without endpoints", backends: []backend{}, from: "outside", to: "vip", udp: true, want: "reject"},
		{name: "18 UDP to a TCP port", service: func(_ world, s *lb.Service) { s.Ports = s.Ports[:1] }, from: "outside", to: "vip", udp: true, want: "none"},
		{name: "15 localhost to node port", from: "node", to: "loopback", only: lb.IPv4, want: "local remote", snat: true},
		{name: "15 localhost to node port, IPv6", from: "node", to: "loopback", only: lb.IPv6, want: "none"},
		{name: "15 localhost to node port, off", config: func(_ world, c *plan.Config) { c.LoopbackNodePorts = false }, from: "node", to: "loopback", want: "none"},
		{name: "pods by interface", config: func(_ world, c *plan.Config) { c.Pods = plan.Detector{Interface: "pod+"} }, from: "pod", to: "cluster", want: "local remote"},
		{name: "pods by interface, outside", config: func(_ world, c *plan.Config) { c.Pods = plan.Detector{Interface: "pod+"} }, from: "outside", to: "cluster", want: "local remote", snat: true},
		{name: "pods by interface, pod to VIP with ETP Local", service: etpLocal, config: func(_ world, c *plan.Config) { c.Pods = plan.Detector{Interface: "pod+"} }, from: "pod", to: "vip", want: "local remote"},
		{name: "another mark", config: func(_ world, c *plan.Config) { c.MasqueradeBit = 31 }, from: "outside", to: "vip", want: "local remote", snat: true},
	}
	for _, to := range []string{"vip", "external", "nodeport"} {
		for _, from := range []string{"outside", "pod", "node"} {
			all = append(all,
				semantics{name: "4 ETP Cluster, " + from + " to " + to, from: from, to: to, want: "local remote", snat: true},
				semantics{name: "16 no endpoints, " + from + " to " + to, backends: []backend{}, from: from, to: to, want: "reject"})
		}
		all = append(all,
			semantics{name: "5 ETP Local, outside to " + to, service: etpLocal, from: "outside", to: to, want: "local"},
			semantics{name: "6 ETP Local, pod to " + to, service: etpLocal, from: "pod", to: to, want: "local remote"},
			semantics{name: "7 ETP Local, node to " + to, service: etpLocal, from: "node", to: to, want: "local remote", snat: true},
			semantics{name: "8 ETP Local without local ones, outside to " + to, service: etpLocal, backends: onlyThere, from: "outside", to: to, want: "drop"},
			semantics{name: "8 ETP Local without local ones, pod to " + to, service: etpLocal, backends: onlyThere, from: "pod", to: to, want: "remote"},
			semantics{name: "8 ETP Local without local ones, node to " + to, service: etpLocal, backends: onlyThere, from: "node", to: to, want: "remote", snat: true})
	}
	for _, from := range []string{"outside", "pod", "node"} {
		all = append(all, semantics{name: "16 no endpoints, " + from + " to ClusterIP", backends: []backend{}, from: from, to: "cluster", want: "reject"})
	}
	return all
}

func nodePortsAtNode(w world, c *plan.Config) {
	c.NodePortAddresses = map[lb.Family][]netip.Addr{w.family: {w.node}}
}

const (
	servicePort, backendPort, nodePort = 80, 8080, 30080
	localNode                          = "here"
)

// plan returns the case's Service as the node plans it, and the configuration of its rules.
func (c semantics) plan(w world) (plan.Service, plan.Config) {
	svc := lb.Service{
		Key: lb.Key{Namespace: "test", Name: "web"}, Type: lb.LoadBalancer,
		ClusterIPs: []netip.Addr{w.clusterIP}, ExternalIPs: []netip.Addr{w.external},
		Ports: []lb.ServicePort{
			{Name: "tcp", Protocol: lb.TCP, Port: servicePort, NodePort: nodePort}, {Name: "udp", Protocol: lb.UDP, Port: servicePort, NodePort: nodePort},
		},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		Ingress: []lb.Ingress{{Addr: w.vip}, {Addr: w.vip2}},
	}
	if c.service != nil {
		c.service(w, &svc)
	}
	slice := lb.Slice{
		Key: svc.Key, Service: svc.Key, Family: w.family,
		Ports: []lb.SlicePort{{Name: "tcp", Protocol: lb.TCP, Port: backendPort}, {Name: "udp", Protocol: lb.UDP, Port: backendPort}},
	}
	backends := c.backends
	if backends == nil {
		backends = bothReady
	}
	for _, b := range backends {
		node := localNode
		if b.at == "remote" {
			node = "there"
		}
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: w.endpoint(b.at), Node: node, Ready: b.ready, Serving: b.serving, Terminating: b.terminating})
	}
	config := plan.Config{Pods: plan.Detector{Prefixes: []netip.Prefix{w.pods}}, MasqueradeBit: 14, LoopbackNodePorts: true, DropInvalid: true}
	if c.config != nil {
		c.config(w, &config)
	}
	return plan.New(svc, []lb.Slice{slice}, plan.Node{Name: localNode, Addresses: []netip.Addr{w.node}}), config
}

func (c semantics) source(w world) netip.Addr {
	if c.to == "loopback" {
		return w.loopback.Addr()
	}
	return map[string]netip.Addr{"outside": w.outside, "stranger": w.stranger, "pod": w.pod, "node": w.node, "local": w.local}[c.from]
}

func (c semantics) destination(w world) netip.AddrPort {
	switch c.to {
	case "nodeport":
		return netip.AddrPortFrom(w.node, nodePort)
	case "nodeport2":
		return netip.AddrPortFrom(w.node2, nodePort)
	case "loopback":
		return netip.AddrPortFrom(w.loopback.Addr(), nodePort)
	}
	return netip.AddrPortFrom(map[string]netip.Addr{"cluster": w.clusterIP, "vip": w.vip, "vip2": w.vip2, "external": w.external}[c.to], servicePort)
}

func (c semantics) protocol() lb.Protocol {
	if c.udp {
		return lb.UDP
	}
	return lb.TCP
}

// wanted returns the ends that the case expects, as addresses of backends or a verdict.
func (c semantics) wanted(w world) []string {
	var ends []string
	for at := range strings.FieldsSeq(c.want) {
		if a := w.endpoint(at); a.IsValid() {
			at = netip.AddrPortFrom(a, backendPort).String()
		}
		ends = append(ends, at)
	}
	slices.Sort(ends)
	return ends
}
