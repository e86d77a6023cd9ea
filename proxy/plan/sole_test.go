package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func lan(from, to string) map[string][]lb.Range {
	return map[string][]lb.Range{"lan": {{From: addr(from), To: addr(to)}}}
}

// Contract clause 11: ports are refused only at addresses that a pool gives to Services, and that no
// Node and no pod has.
func TestContract11SoleVIPs(t *testing.T) {
	nodes := NewNodes(map[string]lb.Node{
		"a": {Addresses: []netip.Addr{addr("192.0.2.7"), addr("2001:db8::7")},
			ExternalAddresses: []netip.Addr{addr("192.0.2.8")},
			PodCIDRs:          []netip.Prefix{netip.MustParsePrefix("192.0.2.64/28"), netip.MustParsePrefix("2001:db8:1::/64")}},
	})
	pools := lan("192.0.2.0", "192.0.2.99")
	pools["six"] = []lb.Range{{From: addr("2001:db8::"), To: addr("2001:db8:1::ffff")}}
	for _, tt := range []struct {
		name, vip string
		external  ExternalIPs
		want      bool
	}{
		{"in a pool", "192.0.2.1", ExternalIPs{Pools: pools, Nodes: nodes}, true},
		{"in a pool, the last", "192.0.2.99", ExternalIPs{Pools: pools, Nodes: nodes}, true},
		{"in a pool, IPv6", "2001:db8::1", ExternalIPs{Pools: pools, Nodes: nodes}, true},
		{"external IPs are denied", "192.0.2.1", ExternalIPs{Pools: pools, Nodes: nodes, Deny: true}, true},
		{"in no pool", "192.0.2.100", ExternalIPs{Pools: pools, Nodes: nodes}, false},
		{"there is no pool", "192.0.2.1", ExternalIPs{Nodes: nodes}, false},
		{"an address of a Node", "192.0.2.7", ExternalIPs{Pools: pools, Nodes: nodes}, false},
		{"an address of a Node that may be an external IP", "192.0.2.7", ExternalIPs{Pools: pools, Nodes: nodes,
			Allowed: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}}, false},
		{"an external address of a Node", "192.0.2.8", ExternalIPs{Pools: pools, Nodes: nodes}, false},
		{"an address of a Node, IPv6", "2001:db8::7", ExternalIPs{Pools: pools, Nodes: nodes}, false},
		{"in a network of pods", "192.0.2.70", ExternalIPs{Pools: pools, Nodes: nodes}, false},
		{"in a network of pods, IPv6", "2001:db8:1::1", ExternalIPs{Pools: pools, Nodes: nodes}, false},
		{"the Nodes are not known", "192.0.2.7", ExternalIPs{Pools: pools}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			claims := NewClaims()
			claims.Configure(tt.external, nil)
			dual := func(s *lb.Service) { s.ClusterIPs = []netip.Addr{addr("10.96.0.1"), addr("fd00::1")} }
			s := New(tenant("shop/web", 1, vip(tt.vip), dual), nil, here)
			claims.Set(s)
			got := claims.Grant(s)
			if sole := slices.Contains(got.Sole, addr(tt.vip)); sole != tt.want || len(got.Sole) > 1 {
				t.Errorf("sole: %v, want %v of %s", got.Sole, tt.want, tt.vip)
			}
			if of := got.SoleOf(lb.FamilyOf(addr(tt.vip))); !slices.Equal(of, got.Sole) {
				t.Errorf("in its family: %v of %v", of, got.Sole)
			}
		})
	}
}

// Only VIPs count: not external IPs, cluster IPs, nor VIPs of which the Service has lost hold. A
// change of pools names the Services that it concerns, and no others.
func TestContract11PoolsDecideAboutSoleVIPs(t *testing.T) {
	claims := NewClaims()
	web := New(tenant("shop/web", 1, vip("192.0.2.1"), external("192.0.2.2")), nil, here)
	other := New(tenant("shop/other", 2, vip("192.0.2.9")), nil, here)
	claims.Set(web)
	claims.Set(other)
	for i, step := range []struct {
		pools     map[string][]lb.Range
		concerned []lb.Key
		sole      []netip.Addr
	}{
		{lan("192.0.2.0", "192.0.2.5"), []lb.Key{web.Key}, []netip.Addr{addr("192.0.2.1")}},
		{lan("192.0.2.1", "192.0.2.5"), []lb.Key{web.Key}, []netip.Addr{addr("192.0.2.1")}}, // for its external IP
		{lan("192.0.2.1", "192.0.2.9"), []lb.Key{other.Key, web.Key}, []netip.Addr{addr("192.0.2.1")}},
		{lan("192.0.2.2", "192.0.2.9"), []lb.Key{web.Key}, nil},
		{nil, []lb.Key{other.Key, web.Key}, nil},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			keys := claims.Configure(ExternalIPs{Pools: step.pools}, nil)
			if slices.SortFunc(keys, lb.Key.Compare); !slices.Equal(keys, step.concerned) {
				t.Errorf("concerned: %v, want %v", keys, step.concerned)
			}
			if got := claims.Grant(web).Sole; !slices.Equal(got, step.sole) {
				t.Errorf("sole: %v, want %v", got, step.sole)
			}
		})
	}
}

// A VIP that is sole in one family changes the rules of that one alone.
func TestSoleVIPsAreOfOneFamily(t *testing.T) {
	before := New(service(func(s *lb.Service) { s.ClusterIPs = []netip.Addr{addr("10.96.0.1"), addr("fd00::1")} }), nil, here)
	now := before
	now.Sole = []netip.Addr{addr("2001:db8::1")}
	if !SameRules(before, now, lb.IPv4) || SameRules(before, now, lb.IPv6) {
		t.Error("not the same in IPv4, or the same in IPv6")
	}
}

// What a change of the Nodes costs where nothing changes for any VIP.
func BenchmarkConfigure(b *testing.B) {
	claims := NewClaims()
	for i := range 10_000 {
		claims.Set(New(tenant(fmt.Sprint("shop/", i), 1, vip(fmt.Sprintf("192.0.%d.%d", i/250, 1+i%250))), nil, here))
	}
	pools, all := lan("192.0.0.0", "192.0.255.255"), map[string]lb.Node{}
	for i := range 500 {
		all[fmt.Sprint(i)] = lb.Node{Addresses: []netip.Addr{netip.AddrFrom4([4]byte{172, 31, byte(i / 250), byte(i)})},
			PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i / 250), byte(i), 0}), 24)}}
	}
	before := NewNodes(all)
	delete(all, "7")
	nodes := []*Nodes{NewNodes(all), before}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		claims.Configure(ExternalIPs{Pools: pools, Nodes: nodes[i%2]}, nil)
	}
}
