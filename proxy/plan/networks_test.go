package plan

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What a node or a pod has is not refused as an unused cluster IP, whatever the networks of cluster IPs are said to be.
func TestContract11ServiceNetworksWithNodesOrPods(t *testing.T) {
	addrs := func(all ...string) (addrs []netip.Addr) {
		for _, one := range all {
			addrs = append(addrs, addr(one))
		}
		return addrs
	}
	prefixes := func(all ...string) (prefixes []netip.Prefix) {
		for _, one := range all {
			prefixes = append(prefixes, netip.MustParsePrefix(one))
		}
		return prefixes
	}
	nodes := map[string]lb.Node{
		"a": {Addresses: addrs("10.1.0.1", "fd00:1::1")},
		"b": {ExternalAddresses: addrs("10.2.0.1"), PodCIDRs: prefixes("10.3.1.0/24", "fd00:3:0:1::/64")},
	}
	for networks, want := range map[string]string{
		"10.96.0.0/12":               "10.96.0.0/12",
		"10.96.0.0/12 fd00:96::/108": "10.96.0.0/12 fd00:96::/108",
		"10.1.0.0/24":                "10.1.0.0/24: 10.1.0.1, an address of the Node a,",
		"10.2.0.0/16 10.96.0.0/12":   "10.96.0.0/12 10.2.0.0/16: 10.2.0.1, an address of the Node b,",
		"10.3.0.0/16":                "10.3.0.0/16: 10.3.1.0/24, the network of pods on the Node b,",
		"10.0.0.0/14":                "10.0.0.0/14: 10.1.0.1, an address of the Node a,",
		"10.3.1.128/25":              "10.3.1.128/25: 10.3.1.0/24, the network of pods on the Node b,",
		"10.3.2.0/24":                "10.3.2.0/24",
		"10.4.1.0/24":                "10.4.1.0/24: 10.4.0.0/16, the network of pods,",
		"fd00:1::/112":               "fd00:1::/112: fd00:1::1, an address of the Node a,",
		"fd00:3::/48":                "fd00:3::/48: fd00:3:0:1::/64, the network of pods on the Node b,",
	} {
		unshared, shared := OnlyServices(prefixes(strings.Fields(networks)...), nodes, prefixes("10.4.0.0/16"))
		var got []string
		for _, network := range unshared {
			got = append(got, network.String())
		}
		for _, s := range shared {
			got = append(got, fmt.Sprintf("%s: %s", s.Network, s.What))
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("%s: %s, want %s", networks, got, want)
		}
	}
}

// BenchmarkOnlyServices is part of each step of a proxy.
func BenchmarkOnlyServices(b *testing.B) {
	nodes := map[string]lb.Node{}
	for i := range 1000 {
		nodes[fmt.Sprintf("node-%d", i)] = lb.Node{
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})},
			PodCIDRs:  []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 4 + byte(i>>8), byte(i), 0}), 24)},
		}
	}
	networks := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:96::/108")}
	for b.Loop() {
		OnlyServices(networks, nodes, nil)
	}
}
