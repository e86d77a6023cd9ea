package iptables

import (
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
			r := renderer{plan.Config{MasqueradeBit: 14, LoopbackNodePorts: true}, c.Family}
			var all []contribution
			for _, s := range c.Plans {
				all = append(all, r.service(s))
			}
			walk := walker{t: t, hooks: r.hooks(), rules: r.ruleset(all), local: []netip.Addr{c.Own}}
			client := netip.MustParseAddr("203.0.113.7")
			if c.Family == lb.IPv6 {
				client = netip.MustParseAddr("2001:db8:7::7")
			}
			ends, _ := walk.fate(packet{src: netip.AddrPortFrom(client, 40000), dst: c.To, in: "eth0", protocol: c.Protocol})
			ends = slices.DeleteFunc(ends, func(end string) bool { return end == "none" || end == "drop" || end == "reject" })
			want := []string{c.End}
			if c.End == "" {
				want = []string{}
			}
			if !slices.Equal(ends, want) {
				t.Errorf("ends at %v, want %v", ends, want)
			}
		})
	}
}
