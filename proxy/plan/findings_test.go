package plan

import (
	"net/netip"
	"slices"
	"testing"

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
	// What Docker has in its chains, and ufw.
	docker := ForwardChain{Family: "ip", Table: "filter", Name: "FORWARD", Drops: true, Accepts: []Accept{
		{Chain: "FORWARD", Established: true}, {Chain: "DOCKER-FORWARD", Interfaces: []string{"docker0"}},
		{Chain: "DOCKER", Interfaces: []string{"br-1f3c5a7b9d0e"}}, {Chain: "ufw-before-forward", ICMP: true}}}
	also := func(accepts ...Accept) ForwardChain {
		c := docker
		c.Accepts = slices.Concat(docker.Accepts, accepts)
		return c
	}
	docker6 := docker
	docker6.Family = "ip6"
	cidr := prefixes("10.0.1.0/24")
	const off4, off6 = "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"
	for name, c := range map[string]struct {
		host Host
		want string // reasons, each with a part of its message
	}{
		"nothing is known": {},
		"all is well": {host: Host{Pods: addrs("10.0.1.2", "fd00::2"), PodNetworks: prefixes("10.0.0.0/16", "fd00::/56"),
			Chains: []ForwardChain{{Family: "inet", Table: "filter", Name: "forward"},
				also(Accept{Chain: "FLANNEL-FWD"})}}},
		"no forwarding": {host: Host{PodCIDRs: prefixes("10.0.1.0/24"),
			NotForwarding: map[lb.Family]string{lb.IPv4: off4, lb.IPv6: off6}},
			want: "ForwardingOff: n has net.ipv4.ip_forward=0"},
		"no forwarding of IPv6": {host: Host{Pods: addrs("10.0.1.2", "fd00::2"),
			NotForwarding: map[lb.Family]string{lb.IPv6: off6}}, want: "ForwardingOff: n has net.ipv6.conf.all.forwarding=0"},
		"no pods yet": {host: Host{NotForwarding: map[lb.Family]string{lb.IPv4: off4}}},
		"Docker": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{docker}},
			want: "ForwardDropped: chain ip filter FORWARD is drop"},
		"Docker, and the pod network": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{also(Accept{Chain: "FORWARD"})}}},
		"Docker, and an interface": {host: Host{PodCIDRs: cidr,
			Chains: []ForwardChain{also(Accept{Chain: "DOCKER-USER", Interfaces: []string{"cali*"}})}}},
		"Docker, and kube-proxy": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{also(Accept{Chain: "KUBE-FORWARD"})}},
			want: "ForwardDropped: chain ip filter FORWARD is drop"},
		"Docker, and iptables":         {host: Host{PodCIDRs: cidr, Iptables: true, Chains: []ForwardChain{docker}}},
		"Docker for IPv6, pods of one": {host: Host{PodCIDRs: cidr, Chains: []ForwardChain{docker6}}},
		"Docker for IPv6": {host: Host{Pods: addrs("fd00::2"), Chains: []ForwardChain{docker6, docker}},
			want: "ForwardDropped: chain ip6 filter FORWARD is drop"},
		"Docker, no pods yet": {host: Host{Chains: []ForwardChain{docker}}},
		"another table, and iptables": {host: Host{PodCIDRs: cidr, Iptables: true, Chains: []ForwardChain{
			{Family: "inet", Table: "mine", Name: "fw", Drops: true}}}, want: "ForwardDropped: chain inet mine fw is drop"},
		"firewalld": {host: Host{PodCIDRs: cidr, Iptables: true, Chains: []ForwardChain{
			{Family: "inet", Table: "firewalld", Name: "filter_FORWARD"}}}, want: "note ForwardDropped: firewalld runs"},
		"another pod network": {host: Host{Pods: addrs("10.42.1.3", "10.42.1.2"), PodNetworks: prefixes("10.244.0.0/16")},
			want: "PodNetworkUnmatched: in the pod network 10.244.0.0/16 (clusterCIDR), but 10.42.1.2 is one"},
		"one pod is in it": {host: Host{Pods: addrs("10.42.1.3", "10.244.1.2"),
			PodNetworks: prefixes("10.244.0.0/16")}},
		"pods of another family": {host: Host{Pods: addrs("fd00::2"), PodNetworks: prefixes("10.244.0.0/16")}},
	} {
		c.host.Node = "n"
		findingtest.Check(t, name, Findings(c.host), c.want)
	}
}
