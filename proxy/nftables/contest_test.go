package nftables

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// A frontend that several Services ask for leads to the one that comes first, whatever their names
// and their order.
func TestContract11ContestsThroughTheRules(t *testing.T) {
	for _, c := range suite.Contests() {
		t.Run(c.Name, func(t *testing.T) {
			config := WithAddresses(plan.Config{MasqueradeBit: 14}, []netip.Addr{c.Own})
			a := fakeActor(fakeKernels())
			a.Configure(config)
			for _, s := range c.Plans {
				a.Set(map[lb.Key]plan.Service{s.Key: s})
				settled(t, a)
			}
			walk := newWalker(t, newRuleset(c.Family, config, a.table(c.Family).needed()), []netip.Addr{c.Own})
			table := a.table(c.Family)
			for _, entries := range table.have.parts {
				for _, e := range entries {
					walk.insert(e)
				}
			}
			for e := range table.have.shared {
				walk.insert(entry{element: e.element()})
			}
			client := netip.MustParseAddr("203.0.113.7")
			if c.Family == lb.IPv6 {
				client = netip.MustParseAddr("2001:db8:7::7")
			}
			protocol, _ := protocolOf(c.Protocol)
			shares, _ := walk.fate(packet{src: netip.AddrPortFrom(client, 40000), dst: c.To, in: "eth0", protocol: protocol})
			ends := slices.Collect(maps.Keys(shares))
			ends = slices.DeleteFunc(ends, func(end string) bool { return end == "none" || end == "drop" || end == "reject" })
			want := []string{c.End}
			if c.End == "" {
				want = []string{}
			}
			if !slices.Equal(ends, want) {
				t.Errorf("ends at %v, want %v", shares, want)
			}
		})
	}
}
