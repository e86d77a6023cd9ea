package nftables

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// ownCases are cases that this dialect has beside those that both have.
func ownCases() []semantics {
	tcpOnly := func(_ world, s *lb.Service) { s.Ports = s.Ports[:1] }
	all := []semantics{
		{name: "18 UDP to a TCP port of a ClusterIP", service: tcpOnly, from: "pod", to: "cluster", udp: true, want: "reject"},
		{name: "19 undefined port of a ClusterIP", service: func(_ world, s *lb.Service) { s.Ports[0].Port, s.Ports[1].Port = 81, 81 }, from: "pod", to: "cluster", want: "reject"},
		{name: "25 no node port addresses", config: func(w world, c *plan.Config) {
			c.NodePortAddresses = map[lb.Family][]netip.Addr{w.family: nil}
		}, from: "outside", to: "nodeport", want: "none"},
		{name: "20 source ranges, one within another", service: func(w world, s *lb.Service) {
			s.SourceRanges = []netip.Prefix{netip.PrefixFrom(w.outside, w.outside.BitLen()-1), host(w.outside)}
		}, from: "outside", to: "vip", want: "local remote", snat: true},
	}
	for _, s := range []Scheduler{RoundRobin, Maglev} {
		name := string(s)
		all = append(all,
			semantics{name: name + ", pod to ClusterIP", scheduler: s, from: "pod", to: "cluster", want: "local remote"},
			semantics{name: name + ", outside to VIP", scheduler: s, from: "outside", to: "vip", want: "local remote", snat: true},
			semantics{name: name + ", UDP", scheduler: s, from: "outside", to: "vip", udp: true, want: "local remote", snat: true},
			semantics{name: name + ", ETP Local, outside", scheduler: s, service: etpLocal, from: "outside", to: "vip", want: "local"},
			semantics{name: name + ", ETP Local, two here", scheduler: s, service: etpLocal, backends: twoHere, from: "outside", to: "nodeport", want: "local local2"},
			semantics{name: name + ", no endpoints", scheduler: s, backends: []backend{}, from: "outside", to: "vip", want: "reject"})
	}
	return append(all,
		semantics{name: "source-hash, only one endpoint", scheduler: SourceHash, backends: onlyThere, from: "pod", to: "cluster", want: "remote"},
		semantics{name: "source-hash, no endpoints", scheduler: SourceHash, backends: []backend{}, from: "pod", to: "cluster", want: "reject"})
}

var twoHere = []backend{{at: "local", ready: true, serving: true}, {at: "local2", ready: true, serving: true}, {at: "remote", ready: true, serving: true}}
