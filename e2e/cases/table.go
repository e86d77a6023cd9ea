package cases

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var (
	bothReady = []Backend{{At: "local", Ready: true, Serving: true}, {At: "remote", Ready: true, Serving: true}}
	onlyLocal = bothReady[:1]
	onlyThere = bothReady[1:]
	twoHere   = []Backend{bothReady[0], {At: "local2", Ready: true, Serving: true}, bothReady[1]}
	nobody    = []Backend{}
)

func going(at string, serving bool) Backend {
	return Backend{At: at, Serving: serving, Terminating: true}
}

func etpLocal(_ World, s *lb.Service) { s.ExternalPolicy = lb.Local }
func passthrough(_ World, s *lb.Service) {
	s.ExternalPolicy, s.Failover = lb.Local, lb.FailoverPassthrough
}
func passthroughCluster(_ World, s *lb.Service) { s.Failover = lb.FailoverPassthrough }
func routed(_ World, s *lb.Service)             { s.Ingress[0].Mode = lb.IPModeRouter }
func itpLocal(_ World, s *lb.Service)           { s.InternalPolicy = lb.Local }
func ranged(w World, s *lb.Service)             { s.SourceRanges = []netip.Prefix{Host(w.Outside)} }
func blind(_ World, c *plan.Config)             { c.Pods = plan.Detector{} }

// lengths lists networks of several lengths; that of the clients outside is neither the shortest
// nor the longest, and the node is in none.
func lengths(w World, s *lb.Service) {
	s.SourceRanges = []netip.Prefix{Host(w.Node2), netip.PrefixFrom(w.Outside, w.Outside.BitLen()-1).Masked(), w.Pods}
}

func masqueradeAll(_ World, c *plan.Config) { c.MasqueradeAll = true }
func byInterface(_ World, c *plan.Config)   { c.Pods = plan.Detector{Interface: "pod+"} }
func byBridge(_ World, c *plan.Config)      { c.Pods = plan.Detector{Interface: "podc"} }
func tcpOnly(_ World, s *lb.Service)        { s.Ports = s.Ports[:1] }

func otherPort(_ World, s *lb.Service) {
	for i := range s.Ports {
		s.Ports[i].Port = ServicePort + 1
	}
}

// All returns the whole table.
func All() []Case { return slices.Concat(reference(), everywhere(), derived(), schedulers()) }

// reference are the cases of the reference of Service semantics, section 4, that concern rules, by
// their numbers there.
func reference() []Case {
	return []Case{
		{Name: "1 pod to ClusterIP", From: "pod", To: "cluster", Want: "local remote"},
		{Name: "2 node to ClusterIP", From: "node", To: "cluster", Want: "local remote", SNAT: true},
		{Name: "3 outside to ClusterIP", From: "outside", To: "cluster", Want: "local remote", SNAT: true},
		{Name: "9 ETP Local and ClusterIP", Service: etpLocal, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "10 ITP Local, pod", Service: itpLocal, From: "pod", To: "cluster", Want: "local"},
		{Name: "10 ITP Local, node", Service: itpLocal, From: "node", To: "cluster", Want: "local", SNAT: true},
		{Name: "10 ITP Local, outside", Service: itpLocal, From: "outside", To: "cluster", Want: "local", SNAT: true},
		{Name: "11 ITP Local, none local", Service: itpLocal, Backends: onlyThere, From: "pod", To: "cluster", Want: "drop"},
		{Name: "11 ITP Local, none at all", Service: itpLocal, Backends: nobody, From: "pod", To: "cluster", Want: "reject"},
		{Name: "9 ITP Local and VIP", Service: itpLocal, From: "pod", To: "vip", Want: "local remote", SNAT: true},
		{Name: "12 no detector, outside to ClusterIP", Config: blind, From: "outside", To: "cluster", Want: "local remote"},
		{Name: "12 no detector, pod to VIP with ETP Local", Config: blind, Service: etpLocal, From: "pod", To: "vip",
			Want: "local"},
		{Name: "13 masqueradeAll", Config: masqueradeAll, From: "pod", To: "cluster", Want: "local remote", SNAT: true},
		{Name: "20 source ranges, listed", Service: ranged, From: "outside", To: "vip", Want: "local remote", SNAT: true},
		{Name: "20 source ranges, unlisted", Service: ranged, From: "stranger", To: "vip", Want: "drop"},
		{Name: "20 source ranges, listed, VIP on the node", Own: true, Service: ranged, From: "outside", To: "vip",
			Want: "local remote", SNAT: true},
		{Name: "20 source ranges, unlisted, VIP on the node", Own: true, Service: ranged, From: "stranger", To: "vip",
			Want: "drop"},
		{Name: "16 no endpoints, VIP on the node", Own: true, Backends: nobody, From: "outside", To: "vip", Want: "reject"},
		{Name: "20 source ranges, pod", Service: ranged, From: "pod", To: "vip", Want: "drop"},
		{Name: "20 source ranges and node port", Service: ranged, From: "stranger", To: "nodeport", Want: "local remote",
			SNAT: true},
		{Name: "20 source ranges and external IP", Service: ranged, From: "stranger", To: "external", Want: "local remote",
			SNAT: true},
		{Name: "20 source ranges with the node",
			Service: func(w World, s *lb.Service) { s.SourceRanges = []netip.Prefix{Host(w.Node)} }, From: "node", To: "vip",
			Want: "local remote", SNAT: true},
		{Name: "20 source ranges without the node", Service: ranged, From: "node", To: "vip", Want: "drop"},
		{Name: "20 source ranges, one within another", Service: func(w World, s *lb.Service) {
			s.SourceRanges = []netip.Prefix{netip.PrefixFrom(w.Outside, w.Outside.BitLen()-1), Host(w.Outside)}
		}, From: "outside", To: "vip", Want: "local remote", SNAT: true},
		{Name: "22 everybody in range", Service: func(w World, s *lb.Service) {
			s.SourceRanges = []netip.Prefix{Host(w.Outside), netip.PrefixFrom(w.Outside, 0).Masked()}
		}, From: "stranger", To: "vip", Want: "local remote", SNAT: true},
		{Name: "23 second VIP", From: "outside", To: "vip2", Want: "local remote", SNAT: true},
		{Name: "24 ipMode Proxy", Service: func(_ World, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy },
			From: "outside", To: "vip", Want: "none"},
		{Name: "24 ipMode VIP", Service: func(_ World, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeVIP }, From: "outside",
			To: "vip", Want: "local remote", SNAT: true},
		{Name: "25 node port at an address that is asked for", Config: nodePortsAtNode, From: "outside", To: "nodeport",
			Want: "local remote", SNAT: true},
		{Name: "25 node port at another address", Config: nodePortsAtNode, From: "outside", To: "nodeport2", Want: "none"},
		{Name: "25 no node port addresses", Config: func(w World, c *plan.Config) {
			c.NodePortAddresses = map[lb.Family][]netip.Addr{w.Family: nil}
		}, From: "outside", To: "nodeport", Want: "none"},
		{Name: "25 addresses of the other family", Config: func(w World, c *plan.Config) {
			c.NodePortAddresses = map[lb.Family][]netip.Addr{w.Other().Family: {w.Other().Node}}
		}, From: "outside", To: "nodeport2", Want: "local remote", SNAT: true},
		{Name: "25 refusal at another address", Config: nodePortsAtNode, Backends: nobody, From: "outside", To: "nodeport2",
			Want: "none"},
		{Name: "27 ready and terminating", Backends: append([]Backend{going("local2", true)}, bothReady...), From: "outside",
			To: "vip", Want: "local remote", SNAT: true},
		{Name: "28 only terminating", Backends: []Backend{going("local", true), going("remote", true)}, From: "pod",
			To: "cluster", Want: "local remote"},
		{Name: "29 only terminating and not serving", Backends: []Backend{going("local", false)}, From: "pod", To: "cluster",
			Want: "reject"},
		{Name: "30 ETP Local, local ones terminate, outside", Service: etpLocal,
			Backends: []Backend{going("local", true), going("local2", false), onlyThere[0]}, From: "outside", To: "vip",
			Want: "local"},
		{Name: "30 ETP Local, local ones terminate, pod to ClusterIP", Service: etpLocal,
			Backends: []Backend{going("local", true), onlyThere[0]}, From: "pod", To: "cluster", Want: "remote"},
		{Name: "31 ETP Local, remote ones terminate, pod to ClusterIP", Service: etpLocal,
			Backends: []Backend{going("remote", true)}, From: "pod", To: "cluster", Want: "remote"},
		{Name: "31 ETP Local, remote ones terminate, outside", Service: etpLocal, Backends: []Backend{going("remote", true)},
			From: "outside", To: "vip", Want: "drop"},
		{Name: "hairpin at ClusterIP", Backends: onlyLocal, From: "local", To: "cluster", Want: "local", SNAT: true},
		{Name: "hairpin at VIP with ETP Local", Service: etpLocal, Backends: onlyLocal, From: "local", To: "vip",
			Want: "local", SNAT: true},
		{Name: "17 UDP beside TCP", From: "outside", To: "vip", Protocol: lb.UDP, Want: "local remote", SNAT: true},
		{Name: "KEP-6272, none local, outside", Service: passthrough, Backends: onlyThere, From: "outside", To: "vip",
			Want: "none"},
		{Name: "KEP-6272, none local, UDP", Service: passthrough, Backends: onlyThere, From: "outside", To: "vip",
			Protocol: lb.UDP, Want: "none"},
		{Name: "KEP-6272, none local, external IP", Service: passthrough, Backends: onlyThere, From: "outside",
			To: "external", Want: "none"},
		{Name: "KEP-6272, none local, pod", Service: passthrough, Backends: onlyThere, From: "pod", To: "vip",
			Want: "remote"},
		{Name: "KEP-6272, none local, node", Service: passthrough, Backends: onlyThere, From: "node", To: "vip",
			Want: "remote", SNAT: true},
		{Name: "KEP-6272, none local, node port", Service: passthrough, Backends: onlyThere, From: "outside", To: "nodeport",
			Want: "drop"},
		{Name: "KEP-6272, none at all, outside", Service: passthrough, Backends: nobody, From: "outside", To: "vip",
			Want: "none"},
		{Name: "KEP-6272, none at all, pod", Service: passthrough, Backends: nobody, From: "pod", To: "vip", Want: "none"},
		{Name: "KEP-6272, none at all, cluster IP", Service: passthrough, Backends: nobody, From: "pod", To: "cluster",
			Want: "reject"},
		{Name: "KEP-6272, local ones", Service: passthrough, From: "outside", To: "vip", Want: "local"},
		{Name: "KEP-6272, ETP Cluster", Service: passthroughCluster, Backends: nobody, From: "outside", To: "vip",
			Want: "none"},
		{Name: "KEP-6272, ETP Cluster, pod", Service: passthroughCluster, Backends: nobody, From: "pod", To: "vip",
			Want: "none"},
		{Name: "KEP-6272, ETP Cluster, node port", Service: passthroughCluster, Backends: nobody, From: "outside",
			To: "nodeport", Want: "reject"},
		{Name: "KEP-6272, ETP Cluster, none local", Service: passthroughCluster, Backends: onlyThere, From: "outside",
			To: "vip", Want: "remote", SNAT: true},
		{Name: "KEP-6272, ipMode Router, none local", Service: both(etpLocal, routed), Backends: onlyThere,
			From: "outside", To: "vip", Want: "none"},
		{Name: "KEP-6272, ipMode Router, none local, another VIP", Service: both(etpLocal, routed), Backends: onlyThere,
			From: "outside", To: "vip2", Want: "drop"},
		{Name: "KEP-6272, ipMode Router, none local, external IP", Service: both(etpLocal, routed), Backends: onlyThere,
			From: "outside", To: "external", Want: "drop"},
		{Name: "KEP-6272, ipMode Router, none local, pod", Service: both(etpLocal, routed), Backends: onlyThere,
			From: "pod", To: "vip", Want: "remote"},
		{Name: "KEP-6272, ipMode Router, none local, node port", Service: both(etpLocal, routed), Backends: onlyThere,
			From: "outside", To: "nodeport", Want: "drop"},
		{Name: "KEP-6272, ipMode Router, none at all", Service: routed, Backends: nobody, From: "outside", To: "vip",
			Want: "none"},
		{Name: "KEP-6272, ipMode Router, none at all, UDP", Service: routed, Backends: nobody, From: "outside", To: "vip",
			Protocol: lb.UDP, Want: "none"},
		{Name: "KEP-6272, ipMode Router, none at all, another VIP", Service: routed, Backends: nobody, From: "outside",
			To: "vip2", Want: "reject"},
		{Name: "KEP-6272, ipMode Router, endpoints", Service: routed, From: "outside", To: "vip", Want: "local remote",
			SNAT: true},
		{Name: "KEP-6272, ipMode Router, not in the source ranges", Service: both(ranged, routed), From: "stranger",
			To: "vip", Want: "drop"},
		{Name: "17 UDP, ETP Local", Service: etpLocal, From: "outside", To: "vip", Protocol: lb.UDP, Want: "local"},
		{Name: "16 UDP without endpoints", Backends: nobody, From: "outside", To: "vip", Protocol: lb.UDP, Want: "reject"},
		{Name: "18 UDP to a TCP port", Service: tcpOnly, From: "outside", To: "vip", Protocol: lb.UDP, Want: "reject"},
		{Name: "18 SCTP to a TCP port", Service: tcpOnly, From: "outside", To: "vip", Protocol: lb.SCTP, Want: "reject"},
		{Name: "18 UDP to a TCP port of a ClusterIP", Service: tcpOnly, From: "pod", To: "cluster", Protocol: lb.UDP,
			Want: "reject"},
		{Name: "19 undefined port of a ClusterIP", Service: otherPort, From: "pod", To: "cluster", Want: "reject"},
		{Name: "19 undefined port of a ClusterIP, outside", Service: otherPort, From: "outside", To: "cluster",
			Want: "reject"},
		{Name: "19 undefined port of a ClusterIP, node", Service: otherPort, From: "node", To: "cluster", Want: "reject"},
		{Name: "19 undefined port of a VIP", Service: otherPort, From: "outside", To: "vip", Want: "reject"},
		{Name: "19 undefined port of a VIP, pod", Service: otherPort, From: "pod", To: "vip", Want: "reject"},
		{Name: "19 undefined port of a VIP, node", Service: otherPort, From: "node", To: "vip", Want: "reject"},
		{Name: "19 undefined port of a VIP, its endpoint", Service: otherPort, From: "local", To: "vip", Want: "reject"},
		{Name: "19 undefined port of the second VIP", Service: otherPort, From: "outside", To: "vip2", Want: "reject"},
		{Name: "19 undefined port of a VIP, no endpoints", Service: otherPort, Backends: nobody, From: "outside", To: "vip",
			Want: "reject"},
		{Name: "19 undefined port of a VIP, ETP Local without local ones", Backends: onlyThere, From: "outside", To: "vip",
			Want: "reject", Service: func(w World, s *lb.Service) { etpLocal(w, s); otherPort(w, s) }},
		{Name: "19 undefined port of a VIP, source ranges", From: "stranger", To: "vip", Want: "reject",
			Service: func(w World, s *lb.Service) { ranged(w, s); otherPort(w, s) }},
		{Name: "19 undefined port of a VIP, masqueradeAll", Service: otherPort, Config: masqueradeAll, From: "outside",
			To: "vip", Want: "reject"},
		{Name: "19 undefined port of a VIP in no pool", Service: otherPort, Unpooled: true, From: "outside", To: "vip",
			Want: "none"},
		{Name: "19 undefined port of a VIP in no pool, pod", Service: otherPort, Unpooled: true, From: "pod", To: "vip",
			Want: "none"},
		{Name: "19 undefined port of a VIP on the node", Own: true, Service: otherPort, From: "outside", To: "vip",
			Want: "none"},
		{Name: "19 undefined port of a VIP on the node, node", Own: true, Service: otherPort, From: "node", To: "vip",
			Want: "none"},
		{Name: "19 undefined port of an external IP", Service: otherPort, From: "outside", To: "external", Want: "none"},
		{Name: "15 localhost to node port", From: "node", To: "loopback", Only: lb.IPv4, Want: "local remote", SNAT: true},
		{Name: "15 localhost to node port, IPv6", From: "node", To: "loopback", Only: lb.IPv6, Want: "none"},
		{Name: "15 localhost to node port, off", Config: func(_ World, c *plan.Config) { c.LoopbackNodePorts = false },
			From: "node", To: "loopback", Want: "none"},
		{Name: "pods by bridge", Config: byBridge, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "pods by bridge, another one", Config: byBridge, From: "local", Backends: onlyThere, To: "cluster",
			Want: "remote", SNAT: true},
		{Name: "pods by interface", Config: byInterface, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "pods by interface, outside", Config: byInterface, From: "outside", To: "cluster", Want: "local remote",
			SNAT: true},
		{Name: "pods by interface, pod to VIP with ETP Local", Service: etpLocal, Config: byInterface, From: "pod", To: "vip",
			Want: "local remote"},
		{Name: "another mark", Config: func(_ World, c *plan.Config) { c.MasqueradeBit = 31 }, From: "outside", To: "vip",
			Want: "local remote", SNAT: true},
	}
}

// everywhere are those that hold at each frontend and for everybody.
func everywhere() (all []Case) {
	for _, to := range []string{"vip", "external", "nodeport"} {
		for _, from := range []string{"outside", "pod", "node"} {
			all = append(all,
				Case{Name: "4 ETP Cluster, " + from + " to " + to, From: from, To: to, Want: "local remote", SNAT: true},
				Case{Name: "16 no endpoints, " + from + " to " + to, Backends: nobody, From: from, To: to, Want: "reject"})
		}
		all = append(all,
			Case{Name: "5 ETP Local, outside to " + to, Service: etpLocal, From: "outside", To: to, Want: "local"},
			Case{Name: "6 ETP Local, pod to " + to, Service: etpLocal, From: "pod", To: to, Want: "local remote"},
			Case{Name: "7 ETP Local, node to " + to, Service: etpLocal, From: "node", To: to, Want: "local remote", SNAT: true},
			Case{Name: "8 ETP Local without local ones, outside to " + to, Service: etpLocal, Backends: onlyThere,
				From: "outside", To: to, Want: "drop"},
			Case{Name: "8 ETP Local without local ones, pod to " + to, Service: etpLocal, Backends: onlyThere, From: "pod",
				To: to, Want: "remote"},
			Case{Name: "8 ETP Local without local ones, node to " + to, Service: etpLocal, Backends: onlyThere, From: "node",
				To: to, Want: "remote", SNAT: true})
	}
	for _, from := range []string{"outside", "pod", "node"} {
		all = append(all, Case{Name: "16 no endpoints, " + from + " to ClusterIP", Backends: nobody, From: from,
			To: "cluster", Want: "reject"})
	}
	return all
}

func nodePortsAtNode(w World, c *plan.Config) {
	c.NodePortAddresses = map[lb.Family][]netip.Addr{w.Family: {w.Node}}
}
