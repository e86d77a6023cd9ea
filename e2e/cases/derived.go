package cases

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// hinted is a ready endpoint meant for zones; hintedNode one meant for nodes as well.
func hinted(at string, zones ...string) Backend {
	return Backend{At: at, Ready: true, Serving: true, Zones: zones}
}

func hintedNode(at, zone, node string) Backend {
	b := hinted(at, zone)
	b.Nodes = []string{node}
	return b
}

func unready(b Backend) Backend {
	b.Ready, b.Serving = false, false
	return b
}

func sticky(_ World, s *lb.Service) { s.AffinityTimeout = 3 * time.Hour }

func both(change ...func(World, *lb.Service)) func(World, *lb.Service) {
	return func(w World, s *lb.Service) {
		for _, f := range change {
			f(w, s)
		}
	}
}

// derived are cases that follow from the documentation and the KEPs of the features.
func derived() []Case {
	return append(append(hints(), unserved()...), []Case{
		// Terminating endpoints (KEP-1669) and internal traffic policy (KEP-2086).
		{Name: "27 ready and terminating, node port", Backends: append([]Backend{going("local2", true)}, bothReady...),
			From: "outside", To: "nodeport", Want: "local remote", SNAT: true},
		{Name: "28 only terminating, here and not there", Backends: []Backend{going("local", true)}, From: "outside",
			To: "vip", Want: "local", SNAT: true},
		{Name: "28 only terminating, UDP", Backends: []Backend{going("remote", true)}, From: "pod", To: "cluster",
			Protocol: lb.UDP, Want: "remote"},
		{Name: "29 only terminating and not serving, ETP Local", Service: etpLocal,
			Backends: []Backend{going("local", false)}, From: "outside", To: "vip", Want: "reject"},
		{Name: "30 ITP Local, local one terminates", Service: itpLocal,
			Backends: []Backend{going("local", true), onlyThere[0]}, From: "pod", To: "cluster", Want: "local"},
		{Name: "30 ETP Local, local one does not serve", Service: etpLocal,
			Backends: []Backend{going("local", false), onlyThere[0]}, From: "outside", To: "vip", Want: "drop"},
		{Name: "30 ETP Local, local ones terminate, node port", Service: etpLocal,
			Backends: []Backend{going("local", true), onlyThere[0]}, From: "outside", To: "nodeport", Want: "local"},
		{Name: "11 ITP Local, none local, outside", Service: itpLocal, Backends: onlyThere, From: "outside", To: "cluster",
			Want: "drop"},
		{Name: "11 ITP Local, none local, node", Service: itpLocal, Backends: onlyThere, From: "node", To: "cluster",
			Want: "drop"},
		{Name: "9 ITP Local and node port", Service: itpLocal, Backends: onlyThere, From: "outside", To: "nodeport",
			Want: "remote", SNAT: true},
		{Name: "9 both Local, outside to VIP", Service: both(etpLocal, itpLocal), From: "outside", To: "vip", Want: "local"},
		{Name: "9 both Local, pod to VIP", Service: both(etpLocal, itpLocal), From: "pod", To: "vip", Want: "local remote"},
		{Name: "9 both Local, pod to ClusterIP", Service: both(etpLocal, itpLocal), From: "pod", To: "cluster",
			Want: "local"},
		// publishNotReadyAddresses makes endpoints ready in their slices, whatever else they are.
		{Name: "52 published though not ready", Backends: []Backend{{At: "local", Ready: true},
			{At: "remote", Ready: true, Terminating: true}}, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "52 not ready and not published", Backends: []Backend{{At: "local"}, going("remote", false)}, From: "pod",
			To: "cluster", Want: "reject"},
		// ipMode (KEP-1860).
		{Name: "24 ipMode Proxy of one VIP, the other",
			Service: func(_ World, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy }, From: "outside", To: "vip2",
			Want: "local remote", SNAT: true},
		{Name: "24 ipMode Proxy, pod", Service: func(_ World, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy },
			From: "pod", To: "vip", Want: "none"},
		{Name: "24 ipMode Proxy, ETP Local without local ones",
			Service: both(etpLocal, func(_ World, s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy }), Backends: onlyThere,
			From: "outside", To: "vip", Want: "none"},
		// loadBalancerSourceRanges.
		{Name: "20 source ranges, ETP Local, listed", Service: both(etpLocal, ranged), From: "outside", To: "vip",
			Want: "local"},
		{Name: "20 source ranges, ETP Local, unlisted", Service: both(etpLocal, ranged), From: "stranger", To: "vip",
			Want: "drop"},
		{Name: "20 source ranges, ETP Local, pods listed",
			Service: both(etpLocal, func(w World, s *lb.Service) { s.SourceRanges = []netip.Prefix{w.Pods} }), From: "pod",
			To: "vip", Want: "local remote"},
		{Name: "20 source ranges, ETP Local without local ones, listed", Service: both(etpLocal, ranged), Backends: onlyThere,
			From: "outside", To: "vip", Want: "drop"},
		{Name: "20 source ranges, UDP, unlisted", Service: ranged, From: "stranger", To: "vip", Protocol: lb.UDP,
			Want: "drop"},
		{Name: "20 source ranges, second VIP, unlisted", Service: ranged, From: "stranger", To: "vip2", Want: "drop"},
		{Name: "20 source ranges of several lengths, listed", Service: lengths, From: "stranger", To: "vip",
			Want: "local remote", SNAT: true},
		{Name: "20 source ranges of several lengths, unlisted", Service: lengths, From: "node", To: "vip", Want: "drop"},
		{Name: "20 source ranges and ClusterIP", Service: ranged, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "45 source ranges of the other family only",
			Service: func(w World, s *lb.Service) { s.SourceRanges = []netip.Prefix{Host(w.Other().Outside)} }, From: "stranger",
			To: "vip", Want: "local remote", SNAT: true},
		{Name: "45 source ranges of both families", Service: func(w World, s *lb.Service) {
			s.SourceRanges = []netip.Prefix{Host(w.Other().Outside), Host(w.Outside)}
		}, From: "stranger", To: "vip", Want: "drop"},
		// Dual stack.
		{Name: "45 dual stack, ClusterIP", Service: dual, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "45 dual stack, VIP", Service: dual, From: "outside", To: "vip", Want: "local remote", SNAT: true},
		{Name: "45 dual stack, endpoints of the other family only", Service: dual, Backends: nobody, From: "outside",
			To: "vip", Want: "reject"},
		{Name: "45 other family only, VIP", Service: foreign, From: "outside", To: "vip", Want: "none"},
		{Name: "45 other family only, node port", Service: foreign, From: "outside", To: "nodeport", Want: "none"},
		// Types.
		{Name: "42 headless", Service: func(_ World, s *lb.Service) { s.ClusterIPs = nil }, From: "pod", To: "cluster",
			Want: "none"},
		{Name: "42 ExternalName", Service: func(_ World, s *lb.Service) { s.Type = lb.ExternalName }, From: "pod",
			To: "cluster", Want: "none"},
		{Name: "42 ClusterIP has no node port", Service: clusterIPOnly, From: "outside", To: "nodeport", Want: "none"},
		{Name: "42 ClusterIP", Service: clusterIPOnly, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "no node port allocated, VIP", Service: noNodePort, From: "outside", To: "vip", Want: "local remote",
			SNAT: true},
		{Name: "no node port allocated, node port", Service: noNodePort, From: "outside", To: "nodeport", Want: "none"},
		// Protocols.
		{Name: "17 UDP, pod to ClusterIP", From: "pod", To: "cluster", Protocol: lb.UDP, Want: "local remote"},
		{Name: "17 UDP, outside to node port", From: "outside", To: "nodeport", Protocol: lb.UDP, Want: "local remote",
			SNAT: true},
		{Name: "17 SCTP, pod to ClusterIP", From: "pod", To: "cluster", Protocol: lb.SCTP, Want: "local remote"},
		{Name: "17 SCTP, outside to VIP", From: "outside", To: "vip", Protocol: lb.SCTP, Want: "local remote", SNAT: true},
		{Name: "17 SCTP, ETP Local", Service: etpLocal, From: "outside", To: "nodeport", Protocol: lb.SCTP, Want: "local"},
		{Name: "17 SCTP, ITP Local, none local", Service: itpLocal, Backends: onlyThere, From: "pod", To: "cluster",
			Protocol: lb.SCTP, Want: "drop"},
		{Name: "16 SCTP without endpoints", Backends: nobody, From: "outside", To: "vip", Protocol: lb.SCTP, Want: "reject"},
		{Name: "8 UDP, ETP Local without local ones", Service: etpLocal, Backends: onlyThere, From: "outside", To: "vip",
			Protocol: lb.UDP, Want: "drop"},
		// masqueradeAll is for cluster IPs.
		{Name: "13 masqueradeAll, ETP Local, outside to VIP", Config: masqueradeAll, Service: etpLocal, From: "outside",
			To: "vip", Want: "local"},
		{Name: "13 masqueradeAll, ITP Local, pod", Config: masqueradeAll, Service: itpLocal, From: "pod", To: "cluster",
			Want: "local", SNAT: true},
		{Name: "12 no detector, pod to ClusterIP", Config: blind, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "12 no detector, pod to VIP with ETP Local, none local", Config: blind, Service: etpLocal, Backends: onlyThere,
			From: "pod", To: "vip", Want: "drop"},
		// Session affinity.
		{Name: "affinity, pod to ClusterIP", Service: sticky, Sticky: true, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "affinity, outside to VIP", Service: sticky, Sticky: true, From: "outside", To: "vip", Want: "local remote",
			SNAT: true},
		{Name: "affinity, UDP", Service: sticky, Sticky: true, From: "outside", To: "nodeport", Protocol: lb.UDP,
			Want: "local remote", SNAT: true},
		{Name: "affinity, ETP Local", Service: both(etpLocal, sticky), Backends: twoHere, Sticky: true, From: "outside",
			To: "vip", Want: "local local2"},
		{Name: "affinity, the same endpoint at all addresses", Service: sticky, Sticky: true, From: "outside", To: "vip",
			Also: []string{"nodeport", "cluster", "external", "vip2"}, Want: "local remote", SNAT: true},
		{Name: "affinity, the same endpoint at all addresses, pod", Service: both(etpLocal, sticky), Sticky: true,
			From: "pod", To: "cluster", Also: []string{"vip", "nodeport", "external"}, Want: "local remote"},
		{Name: "affinity, ETP Local, the same endpoint at all addresses", Service: both(etpLocal, sticky), Backends: twoHere,
			Sticky: true, From: "outside", To: "nodeport", Also: []string{"vip", "external"}, Want: "local local2"},
		{Name: "affinity, the same endpoint at all addresses, UDP", Service: sticky, Sticky: true, From: "outside",
			To: "cluster", Also: []string{"vip", "nodeport2"}, Protocol: lb.UDP, Want: "local remote", SNAT: true},
		{Name: "affinity without endpoints", Service: sticky, Backends: nobody, From: "outside", To: "vip", Want: "reject"},
		// What conntrack finds invalid.
		{Name: "INVALID from a pod", Invalid: true, From: "pod", To: "client", Want: "drop"},
		{Name: "INVALID from a pod, liberal", Config: func(_ World, c *plan.Config) { c.DropInvalid = false }, Invalid: true,
			From: "pod", To: "client", Want: "none"},
	}...)
}

// unserved are connections to addresses in the Service networks (KEP-1880).
func unserved() []Case {
	known := func(w World, c *plan.Config) { c.ServiceNetworks = []netip.Prefix{w.Other().ClusterIPs, w.ClusterIPs} }
	only := func(network func(World) netip.Addr) func(World, *plan.Config) {
		return func(w World, c *plan.Config) { c.ServiceNetworks = []netip.Prefix{Host(network(w))} }
	}
	client := func(w World) netip.Addr { return w.Outside }
	return []Case{
		{Name: "19 unallocated cluster IP, pod", Config: known, From: "pod", To: "unallocated", Want: "drop"},
		{Name: "19 unallocated cluster IP, outside", Config: known, From: "outside", To: "unallocated", Want: "drop"},
		{Name: "19 unallocated cluster IP, node", Config: known, From: "node", To: "unallocated", Want: "drop"},
		{Name: "19 unallocated cluster IP, UDP", Config: known, From: "pod", To: "unallocated", Protocol: lb.UDP,
			Want: "drop"},
		{Name: "19 unallocated cluster IP, SCTP", Config: known, From: "pod", To: "unallocated", Protocol: lb.SCTP,
			Want: "drop"},
		{Name: "19 unallocated cluster IP that somebody else has", Config: only(client), From: "pod", To: "client",
			Want: "drop"},
		{Name: "19 no Service network is known", From: "pod", To: "client", Want: "none"},
		{Name: "19 Service networks, pod to ClusterIP", Config: known, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "19 Service networks, outside to ClusterIP", Config: known, From: "outside", To: "cluster",
			Want: "local remote", SNAT: true},
		{Name: "19 Service networks, node to ClusterIP, UDP", Config: known, From: "node", To: "cluster", Protocol: lb.UDP,
			Want: "local remote", SNAT: true},
		{Name: "19 Service networks, ClusterIP without endpoints", Config: known, Backends: nobody, From: "pod",
			To: "cluster", Want: "reject"},
		{Name: "19 Service networks, undefined port of a ClusterIP", Config: known, Service: otherPort, From: "pod",
			To: "cluster", Want: "reject"},
		{Name: "19 Service networks, UDP to a TCP port of a ClusterIP", Config: known, Service: tcpOnly, From: "pod",
			To: "cluster", Protocol: lb.UDP, Want: "reject"},
		{Name: "19 Service networks, a VIP in one", Config: only(func(w World) netip.Addr { return w.VIP }), From: "outside",
			To: "vip", Want: "local remote", SNAT: true},
		{Name: "19 Service networks, an address of the node in one",
			Config: changes(nodePortsAtNode, only(func(w World) netip.Addr { return w.Node2 })), From: "outside",
			To: "nodeport2", Want: "none"},
	}
}

func changes(change ...func(World, *plan.Config)) func(World, *plan.Config) {
	return func(w World, c *plan.Config) {
		for _, f := range change {
			f(w, c)
		}
	}
}

// hints are topology hints: of zones (KEP-2433) and of nodes (KEP-3015), as trafficDistribution
// asks for them.
func hints() []Case {
	here, there := hinted("local", ZoneHere), hinted("remote", ZoneThere)
	return []Case{
		{Name: "39 zone", Zone: ZoneHere, Backends: []Backend{here, there}, From: "pod", To: "cluster", Want: "local"},
		{Name: "39 zone, not the node", Zone: ZoneThere, Backends: []Backend{here, there}, From: "pod", To: "cluster",
			Want: "remote"},
		{Name: "39 zone of several", Zone: ZoneHere, Backends: []Backend{here, hinted("remote", ZoneThere, ZoneHere)},
			From: "pod", To: "cluster", Want: "local remote"},
		{Name: "39 zone, outside to VIP", Zone: ZoneThere, Backends: []Backend{here, there}, From: "outside", To: "vip",
			Want: "remote", SNAT: true},
		{Name: "39 zone, outside to node port", Zone: ZoneHere, Backends: []Backend{here, there}, From: "outside",
			To: "nodeport", Want: "local", SNAT: true},
		{Name: "39 zone, UDP", Zone: ZoneHere, Backends: []Backend{here, there}, From: "pod", To: "cluster", Protocol: lb.UDP,
			Want: "local"},
		{Name: "39 one without a hint", Zone: ZoneHere, Backends: []Backend{here, hinted("remote")}, From: "pod",
			To: "cluster", Want: "local remote"},
		{Name: "39 the node has no zone", Backends: []Backend{here, there}, From: "pod", To: "cluster", Want: "local remote"},
		{Name: "39 none for the zone", Zone: "c", Backends: []Backend{here, there}, From: "pod", To: "cluster",
			Want: "local remote"},
		{Name: "39 only an unready one for the zone", Zone: ZoneHere,
			Backends: []Backend{unready(here), hinted("local2", ZoneThere), there}, From: "pod", To: "cluster",
			Want: "local2 remote"},
		{Name: "40 node", Zone: ZoneHere, Backends: []Backend{hintedNode("local", ZoneHere, Here),
			hintedNode("local2", ZoneHere, There), hintedNode("remote", ZoneHere, There)}, From: "pod", To: "cluster",
			Want: "local"},
		{Name: "40 none for the node: its zone", Zone: ZoneHere,
			Backends: []Backend{hintedNode("local", ZoneThere, There), hintedNode("remote", ZoneHere, There)}, From: "pod",
			To: "cluster", Want: "remote"},
		{Name: "40 one without a hint for nodes: the zone", Zone: ZoneHere,
			Backends: []Backend{hintedNode("local", ZoneHere, Here), hinted("local2", ZoneHere),
				hintedNode("remote", ZoneThere, There)}, From: "pod", To: "cluster", Want: "local local2"},
		{Name: "40 one without any hint", Zone: ZoneHere,
			Backends: []Backend{hintedNode("local", ZoneHere, Here), hinted("remote")}, From: "pod", To: "cluster",
			Want: "local remote"},
		{Name: "41 ETP Local ignores hints", Zone: ZoneHere, Service: etpLocal,
			Backends: []Backend{hintedNode("local", ZoneThere, There), hintedNode("remote", ZoneHere, Here)}, From: "outside",
			To: "vip", Want: "local"},
		{Name: "41 ITP Local ignores hints", Zone: ZoneHere, Service: itpLocal,
			Backends: []Backend{hinted("local", ZoneThere), hinted("remote", ZoneHere)}, From: "pod", To: "cluster",
			Want: "local"},
		{Name: "41 ETP Local, pod to VIP", Zone: ZoneHere, Service: etpLocal,
			Backends: []Backend{hinted("local", ZoneThere), hinted("remote", ZoneHere)}, From: "pod", To: "vip", Want: "remote"},
	}
}

func dual(w World, s *lb.Service) {
	s.ClusterIPs = append(s.ClusterIPs, w.Other().ClusterIP)
	s.ExternalIPs = append(s.ExternalIPs, w.Other().External)
	s.Ingress = append(s.Ingress, lb.Ingress{Addr: w.Other().VIP})
}

func foreign(w World, s *lb.Service) { s.ClusterIPs = []netip.Addr{w.Other().ClusterIP} }

func clusterIPOnly(_ World, s *lb.Service) { s.Type = lb.ClusterIP }

func noNodePort(_ World, s *lb.Service) {
	for i := range s.Ports {
		s.Ports[i].NodePort = 0
	}
}

// schedulers are the ways of choosing an endpoint that only nftables has.
func schedulers() []Case {
	all := []Case{
		{Name: "source-hash, only one endpoint", Scheduler: plan.SourceHash, Backends: onlyThere, From: "pod", To: "cluster",
			Want: "remote"},
		{Name: "source-hash, no endpoints", Scheduler: plan.SourceHash, Backends: nobody, From: "pod", To: "cluster",
			Want: "reject"},
		{Name: "destination-hash, only one endpoint", Scheduler: plan.DestinationHash, Backends: onlyThere, From: "outside",
			To: "vip", Want: "remote", SNAT: true},
	}
	for _, s := range []plan.Scheduler{plan.RoundRobin, plan.WeightedRoundRobin, plan.Maglev, plan.LeastConnections} {
		name := string(s)
		all = append(all,
			Case{Name: name + ", pod to ClusterIP", Scheduler: s, From: "pod", To: "cluster", Want: "local remote"},
			Case{Name: name + ", outside to VIP", Scheduler: s, From: "outside", To: "vip", Want: "local remote", SNAT: true},
			Case{Name: name + ", UDP", Scheduler: s, From: "outside", To: "vip", Protocol: lb.UDP, Want: "local remote",
				SNAT: true},
			Case{Name: name + ", ETP Local, outside", Scheduler: s, Service: etpLocal, From: "outside", To: "vip",
				Want: "local"},
			Case{Name: name + ", ETP Local, two here", Scheduler: s, Service: etpLocal, Backends: twoHere, From: "outside",
				To: "nodeport", Want: "local local2"},
			Case{Name: name + ", no endpoints", Scheduler: s, Backends: nobody, From: "outside", To: "vip", Want: "reject"})
	}
	return all
}
