package plan

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/preflight/findingtest"
)

func TestFindings(t *testing.T) {
	addrs := func(all ...string) (parsed []netip.Addr) {
		for _, a := range all {
			parsed = append(parsed, netip.MustParseAddr(a))
		}
		return parsed
	}
	prefixes := func(all ...string) (parsed []netip.Prefix) {
		for _, p := range all {
			parsed = append(parsed, netip.MustParsePrefix(p))
		}
		return parsed
	}
	const in = "FORWARD"
	accept := func(a Accept) ForwardRule { return ForwardRule{Accept: a, Conditional: true, Verdict: VerdictAccept} }
	to := func(chain string) ForwardRule { return ForwardRule{To: chain} }
	reject := ForwardRule{Verdict: VerdictDrop}
	// What Docker has in its chains, and ufw.
	docker := ForwardChain{Family: "ip", Table: "filter", Name: in, Drops: true, Rules: map[string][]ForwardRule{
		in: {to("DOCKER-USER"), to("DOCKER-FORWARD"), accept(Accept{Established: true}),
			to("ufw-before-forward")},
		"DOCKER-FORWARD":     {accept(Accept{Interfaces: []string{"docker0"}}), to("DOCKER")},
		"DOCKER":             {accept(Accept{Interfaces: []string{"br-1f3c5a7b9d0e"}})},
		"ufw-before-forward": {accept(Accept{ICMP: true})}}}
	with := func(c ForwardChain, chain string, rules ...ForwardRule) ForwardChain {
		c.Rules = maps.Clone(c.Rules)
		c.Rules[chain] = slices.Concat(c.Rules[chain], rules)
		return c
	}
	own := func(c ForwardChain) ForwardChain { // as --accept-forwarded has it
		c.Rules = maps.Clone(c.Rules)
		c.Rules[in] = slices.Concat([]ForwardRule{to(ChainAccept)}, c.Rules[in])
		c.Rules[ChainAccept] = []ForwardRule{accept(Accept{})}
		return c
	}
	// Its policy accepts, but "ufw default reject routed" has a rule behind all others.
	ufw := ForwardChain{Family: "ip", Table: "filter", Name: in, Rules: map[string][]ForwardRule{
		in: {to("ufw-before-forward"), to("ufw-reject-forward")}, "ufw-reject-forward": {reject},
		"ufw-before-forward": {accept(Accept{Established: true})}}}
	legacy := docker
	legacy.Legacy = true
	mine := ForwardChain{Family: "inet", Table: "mine", Name: "fw", Drops: true, Rules: map[string][]ForwardRule{}}
	docker6 := docker
	docker6.Family = "ip6"
	input := ForwardChain{Family: "ip", Table: "filter", Name: "INPUT", Drops: true, Rules: map[string][]ForwardRule{
		"INPUT": {accept(Accept{Interfaces: []string{"lo"}}), accept(Accept{Established: true}), accept(Accept{NotTCP: true}),
			to("ufw-user-input")}, "ufw-user-input": {accept(Accept{Ports: []uint16{22}})}}}
	input6 := input
	input6.Family = "ip6"
	tcpOnly := ForwardChain{Family: "ip", Table: "filter", Name: "INPUT", Drops: true, Rules: map[string][]ForwardRule{
		"INPUT": {accept(Accept{Ports: []uint16{7484}, NotUDP: true})}}}
	thereToo := HostRelay{Services: 2, UDP: 1, Connected: true, Ports: map[lb.Family]uint16{lb.IPv4: 7484}}
	there := HostRelay{Services: 2, Connected: true, Ports: map[lb.Family]uint16{lb.IPv4: 7484}}
	cidr, pod := prefixes("10.0.1.0/24"), netip.MustParseAddr("10.0.2.9")
	const off4, off6 = "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"
	for name, c := range map[string]struct {
		host Host
		want string // reasons, each with a part of its message
	}{
		"nothing is known": {},
		"all is well": {host: Host{Pods: addrs("10.0.1.2", "fd00::2"), PodNetworks: prefixes("10.0.0.0/16", "fd00::/56"),
			Chains: []ForwardChain{{Family: "inet", Table: "filter", Name: "forward"},
				with(docker, in, accept(Accept{}))}}},
		"room for more connections": {host: Host{Connections: 94_000, Most: 100_000}},
		"no room for more": {host: Host{Connections: 95_000, Most: 100_000},
			want: "ConntrackFull: n is full, so its kernel drops new ones: it has 95000 of at most 100000"},
		"it is not known how many": {host: Host{Connections: 5}},
		"a network of cluster IPs that nodes are in": {host: Host{Shared: []SharedNetwork{
			{netip.MustParsePrefix("10.0.0.0/8"), "10.0.0.1, an address of the Node a,"}}},
			want: "ServiceNetworkShared: 10.0.0.1, an address of the Node a, lies in 10.0.0.0/8, a network of cluster IPs: n " +
				"refuses no connections"},
		"strict": {host: Host{Strict: "net.ipv4.conf.eth1.rp_filter is 1"},
			want: "StrictReversePath: on n net.ipv4.conf.eth1.rp_filter is 1"},
		"no tunnel": {host: Host{NoTunnel: "tunnel landfall4: operation not supported"},
			want: "TunnelUnavailable: n cannot pass on connections to nodes behind routers: tunnel landfall4: operation not " +
				"supported"},
		"routes to all pods": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: pod, Near: true, Kind: lb.RouteOwn}, {Node: "b", Pod: pod, Kind: lb.RouteDefault},
			{Node: "c", Pod: pod, Near: true, Kind: lb.RouteUnknown}}}},
		"no route to the pods of one": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: pod, Near: true, Kind: lb.RouteOwn}, {Node: "b", Pod: pod, Kind: lb.RouteNone}}},
			want: "PodRouteMissing: n has no route to the pods on b, such as 10.0.2.9 (the kernel finds none)"},
		"the default route to one": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: pod, Near: true, Kind: lb.RouteOwn}, {Node: "b", Pod: pod, Near: true, Kind: lb.RouteDefault},
			{Node: "c", Pod: pod, Near: true, Kind: lb.RouteDefault}}},
			want: "PodRouteMissing: pods on b and 1 more, such as 10.0.2.9 (it takes the default route, unlike to those on a)"},
		"the default route to all": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: pod, Near: true, Kind: lb.RouteDefault}, {Node: "b", Pod: pod, Near: true, Kind: lb.RouteDefault}}}},
		"no route to what one namespace says is a pod of it": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: pod, Near: true, Kind: lb.RouteOwn}, {Node: "a", Pod: pod.Next(), Near: true, Kind: lb.RouteNone}}}},
		"an address of the LAN that one namespace says is a pod": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: pod, Near: true, Kind: lb.RouteDefault}, {Node: "a", Pod: pod.Next(), Near: true, Kind: lb.RouteOwn},
			{Node: "b", Pod: pod, Near: true, Kind: lb.RouteDefault}}}},
		"no route to the IPv6 pods of one": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: netip.MustParseAddr("fd00::9"), Kind: lb.RouteNone}, {Node: "a", Pod: pod, Kind: lb.RouteOwn}}},
			want: "PodRouteMissing: n has no route to the pods on a, such as fd00::9"},
		"routes of the other family": {host: Host{Routes: []PodRoute{
			{Node: "a", Pod: netip.MustParseAddr("fd00::9"), Near: true, Kind: lb.RouteOwn},
			{Node: "b", Pod: pod, Near: true, Kind: lb.RouteDefault}}}},
		"no forwarding": {host: Host{PodCIDRs: prefixes("10.0.1.0/24"),
			NotForwarding: map[lb.Family]string{lb.IPv4: off4, lb.IPv6: off6}},
			want: "ForwardingOff: n has net.ipv4.ip_forward=0"},
		"no forwarding of IPv6": {host: Host{Pods: addrs("10.0.1.2", "fd00::2"),
			NotForwarding: map[lb.Family]string{lb.IPv6: off6}}, want: "ForwardingOff: n has net.ipv6.conf.all.forwarding=0"},
		"no pods yet": {host: Host{NotForwarding: map[lb.Family]string{lb.IPv4: off4}}},
		"Docker": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{docker}},
			want: "ForwardDropped: on n the chain ip filter FORWARD drops new connections of pods"},
		"Docker, what cures it": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{docker}},
			want: "ForwardDropped: or set --accept-forwarded (chart: proxy.acceptForwarded=true)"},
		"Docker, and the pod network": {host: Host{PodCIDRs: cidr,
			Chains: []ForwardChain{with(docker, in, accept(Accept{}))}}},
		"Docker, and an interface": {host: Host{PodCIDRs: cidr,
			Chains: []ForwardChain{with(docker, "DOCKER-USER", accept(Accept{Interfaces: []string{"cali*"}}))}}},
		"Docker, and kube-proxy": {host: Host{PodCIDRs: cidr,
			Chains: []ForwardChain{with(with(docker, in, to("KUBE-FORWARD")), "KUBE-FORWARD", accept(Accept{}))}},
			want: "ForwardDropped: chain ip filter FORWARD drops"},
		"Docker, and Landfall's iptables mode": {host: Host{PodCIDRs: cidr,
			Chains: []ForwardChain{with(with(docker, in, to("LF-FORWARD")), "LF-FORWARD", accept(Accept{}))}},
			want: "ForwardDropped: chain ip filter FORWARD drops"},
		"Docker in iptables-legacy": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{legacy}},
			want: "ForwardDropped: chain ip filter FORWARD (iptables-legacy) drops"},
		"Docker for IPv6, pods of one": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{docker6}}},
		"Docker for IPv6": {host: Host{Pods: addrs("fd00::2"), Chains: []ForwardChain{docker6, docker}},
			want: "ForwardDropped: chain ip6 filter FORWARD drops"},
		"Docker, no pods yet": {host: Host{Chains: []ForwardChain{docker}}},
		"accepted behind what takes all": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{
			with(docker, in, reject, accept(Accept{}))}}, want: "ForwardDropped: FORWARD drops"},
		"accepted before what takes all": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{
			with(docker, in, accept(Accept{}), reject)}}},
		"ufw": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{ufw}}, want: "ForwardDropped: FORWARD drops"},
		"ufw, and an interface": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{
			with(ufw, "ufw-before-forward", accept(Accept{Interfaces: []string{"cni0"}}))}}},
		"ufw, not for all": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{{Family: "ip", Table: "filter", Name: in,
			Rules: map[string][]ForwardRule{in: {{Conditional: true, To: "ufw-reject-forward"}},
				"ufw-reject-forward": {reject}}}}}},
		"a chain that returns": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{{Family: "ip", Table: "filter", Name: in,
			Rules: map[string][]ForwardRule{in: {to("a")}, "a": {{Verdict: VerdictReturn}, reject}}}}}},
		"a chain that goes on elsewhere": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{{Family: "ip", Table: "filter",
			Name: in, Rules: map[string][]ForwardRule{in: {{To: "a", Goto: true}, accept(Accept{})}, "a": {reject}}}}},
			want: "ForwardDropped: FORWARD drops"},
		"accepted": {host: Host{PodCIDRs: cidr, AcceptForwarded: true, Chains: []ForwardChain{own(docker), own(ufw)}}},
		"accepted, not asked for any more": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{own(docker)}},
			want: "ForwardDropped: or set --accept-forwarded"},
		"accepted too late": {host: Host{PodCIDRs: cidr, AcceptForwarded: true, Chains: []ForwardChain{
			with(ufw, in, to(ChainAccept))}}, want: "ForwardDropped: a rule that takes all packets stands before Landfall's"},
		"accepted for some": {host: Host{PodCIDRs: cidr, AcceptForwarded: true, Chains: []ForwardChain{
			with(docker, in, ForwardRule{To: ChainAccept, Conditional: true})}}, want: "ForwardDropped: does not help"},
		"accepting fails": {host: Host{PodCIDRs: cidr, AcceptForwarded: true, Chains: []ForwardChain{docker},
			AcceptFailed: map[string]string{"ip filter FORWARD": "no such program"}},
			want: "ForwardDropped: --accept-forwarded does not help: no such program"},
		"another table": {host: Host{PodCIDRs: cidr, AcceptForwarded: true, Chains: []ForwardChain{own(mine)}},
			want: "ForwardDropped: chain inet mine fw drops new connections of pods"},
		"another table, what cures it": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{mine}},
			want: "ForwardDropped: no rule of Landfall can accept what this table drops"},
		"firewalld": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{
			{Family: "inet", Table: "firewalld", Name: "filter_FORWARD"}}}, want: "note ForwardDropped: firewalld runs"},
		"another pod network": {host: Host{Pods: addrs("10.42.1.3", "10.42.1.2"), PodNetworks: prefixes("10.244.0.0/16")},
			want: "PodNetworkUnmatched: in the pod network 10.244.0.0/16 (clusterCIDR), but 10.42.1.2 is one"},
		"pods are not in the Node's network": {
			host: Host{Pods: addrs("10.42.1.3", "10.42.1.2"), NodeCIDR: true, PodCIDRs: prefixes("10.244.0.0/24")},
			want: "PodNetworkUnmatched: in the pod network 10.244.0.0/24 (spec.podCIDRs of the Node), but 10.42.1.2 is one"},
		"pods are in the Node's network": {
			host: Host{Pods: addrs("10.244.0.3"), NodeCIDR: true, PodCIDRs: prefixes("10.244.0.0/24")}},
		"another mode": {host: Host{Pods: addrs("10.42.1.3"), PodCIDRs: prefixes("10.244.0.0/24")}},
		"one pod is in it": {host: Host{Pods: addrs("10.42.1.3", "10.244.1.2"),
			PodNetworks: prefixes("10.244.0.0/16")}},
		"pods of another family":   {host: Host{Pods: addrs("fd00::2"), PodNetworks: prefixes("10.244.0.0/16")}},
		"a relay":                  {host: Host{Relay: &there}},
		"a relay without Services": {host: Host{Relay: &HostRelay{}, Inputs: []ForwardChain{input}}},
		"no relay": {host: Host{Relay: &HostRelay{Services: 2}},
			want: "RelayAway: the relay of n is not there, or not ready: connections to 2 Services go straight to endpoints"},
		"a relay of another release": {host: Host{Relay: &HostRelay{Services: 2, OtherRelease: true}},
			want: "RelayAway: the relay of n is of another release than the proxy: connections to 2 Services go straight"},
		"a full relay": {host: Host{Relay: &HostRelay{Services: 2, Connected: true, Full: true, Connections: 9000}},
			want: "RelayFull: has as many connections as it may (9000 open), or too little time or memory for more: new "},
		"a relay that is behind": {host: Host{Relay: &HostRelay{Services: 2, UDP: 1, Connected: true, Behind: true}},
			want: "RelayFull: more slowly than they come: those to 1 Services go straight to endpoints for a while"},
		"a relay that is behind, and no UDP is relayed": {host: Host{Relay: &HostRelay{Services: 2, Connected: true,
			Behind: true}}},
		"another program has the relay's port of UDP": {host: Host{Relay: &HostRelay{Services: 2, UDP: 1, Connected: true,
			Ports: map[lb.Family]uint16{lb.IPv4: 7484}, NoUDP: map[lb.Family]string{lb.IPv4: "address already in use"}}},
			want: "RelayWithoutUDP: the relay of n receives no UDP at port 7484 (IPv4): address already in use; UDP to 1 Services"},
		"another program has the relay's port of a family": {host: Host{Relay: &HostRelay{Services: 3, Connected: true,
			Families: map[lb.Family]int{lb.IPv4: 3, lb.IPv6: 2}, Ports: map[lb.Family]uint16{lb.IPv4: 7484},
			NoPort: map[lb.Family]string{lb.IPv6: "listen (IPv6): bind: address already in use"}}},
			want: "RelayWithoutPort: the relay of n cannot open its port for IPv6: listen (IPv6): bind: address already in use; " +
				"IPv6 connections to 2 Services go straight to endpoints"},
		"it has that of a family that no relayed Service has": {host: Host{Relay: &HostRelay{Services: 3, Connected: true,
			Families: map[lb.Family]int{lb.IPv4: 3}, NoPort: map[lb.Family]string{lb.IPv6: "address already in use"}}}},
		"a lease that cannot be written": {host: Host{Relay: &HostRelay{Services: 2, Connected: true,
			Unled: "open /proc/thread-self/net/xt_recent/LF-RELAY-10.0.0.1-7484: permission denied"}},
			want: "RelayLeaseFailed: the proxy of n cannot write the lease that has its rules lead to the relay (open /proc/"},
		"no Service has UDP relayed": {host: Host{Relay: &HostRelay{Services: 2, Connected: true,
			NoUDP: map[lb.Family]string{lb.IPv4: "the relay runs without --udp"}}}},
		"ufw, and the relay": {host: Host{Relay: &there, Inputs: []ForwardChain{input, input6}},
			want: "RelayDropped: on n the chain ip filter INPUT drops what comes to TCP port 7484"},
		"a firewall that lets only TCP through, and no UDP is relayed": {host: Host{Relay: &there,
			Inputs: []ForwardChain{tcpOnly}}},
		"a firewall that lets only TCP through": {host: Host{Relay: &thereToo, Inputs: []ForwardChain{tcpOnly}},
			want: "RelayDropped: on n the chain ip filter INPUT drops what comes to UDP port 7484"},
		"ufw, and the relay's port is open": {host: Host{Relay: &there, Inputs: []ForwardChain{input6,
			with(input, "INPUT", accept(Accept{Ports: []uint16{22, 7484}}))}}},
	} {
		c.host.Node = "n"
		findingtest.Check(t, name, Findings(c.host), c.want)
	}
}

// TestAcceptances has Landfall accept connections only where they are dropped, in a chain that
// iptables manages.
func TestAcceptances(t *testing.T) {
	pods4, pods6 := netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00::/56")
	node4, node6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	comparable := cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})
	drops := ForwardChain{Family: "ip", Table: "filter", Name: "FORWARD", Drops: true}
	drops6, legacy, mine, accepts, free := drops, drops, drops, drops, drops
	drops6.Family, legacy.Legacy, mine.Table, free.Drops = "ip6", true, "mine", false
	accepts.Rules = map[string][]ForwardRule{"FORWARD": {{Verdict: VerdictAccept}}}
	h := Host{AcceptForwarded: true, PodNetworks: []netip.Prefix{pods4, pods6}, PodCIDRs: []netip.Prefix{pods4},
		Nodes: []netip.Addr{node4, node6}, Chains: []ForwardChain{drops, drops6, legacy, mine, accepts, free}}
	want4 := Acceptance{Networks: []netip.Prefix{pods4}, Nodes: []netip.Addr{node4}}
	want6 := Acceptance{Networks: []netip.Prefix{pods6}, Nodes: []netip.Addr{node6}}
	if diff := cmp.Diff([]Acceptance{want4, {}, want4, {}, {}, {}}, Acceptances(h), comparable); diff != "" {
		t.Errorf("one family (-want +got):\n%s", diff)
	}
	h.PodCIDRs = append(h.PodCIDRs, pods6)
	if diff := cmp.Diff([]Acceptance{want4, want6, want4, {}, {}, {}}, Acceptances(h), comparable); diff != "" {
		t.Errorf("two families (-want +got):\n%s", diff)
	}
	h.AcceptForwarded = false
	if diff := cmp.Diff(make([]Acceptance, 6), Acceptances(h), comparable); diff != "" {
		t.Errorf("not asked for (-want +got):\n%s", diff)
	}
}
