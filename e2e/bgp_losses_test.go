package e2e

import (
	"testing"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestOnlyOthersLost shows which changes of routes let TestBGPFaults try once more: those that have
// nothing to do with the node that it restarts.
func TestOnlyOthersLost(t *testing.T) {
	const (
		v4, v6  = "tor-1: 203.0.113.180 proto bgp metric 20 ", "tor-1: fd00:203:0:113::180 proto bgp metric 20 "
		touched = "nexthop via 172.26.236.177 dev tor weight 1 "
		second  = "nexthop via 172.26.236.178 dev tor weight 1 "
		third   = "nexthop via 172.26.236.179 dev tor weight 1 "
		six177  = "nexthop via fd00:172:26:236::177 dev tor weight 1 "
		six178  = "nexthop via fd00:172:26:236::178 dev tor weight 1 "
		six179  = "nexthop via fd00:172:26:236::179 dev tor weight 1 "
	)
	for _, test := range []struct {
		name    string
		changes []string
		want    bool
	}{
		{"nothing", nil, false},
		{"another node's", []string{v4 + touched + second, v4 + touched + second + third}, true},
		{"another node's, IPv6", []string{v6 + six177 + six178, v6 + six177 + six178 + six179}, true},
		{"all, IPv6", []string{"tor-1: Deleted fd00:203:0:113::180 " + six177, v6 + six177 + six178}, false},
		{"its own", []string{v4 + second + third, v4 + touched + second + third}, false},
		{"its own and another's", []string{v4 + touched + second, v4 + second + third}, false},
		{"its own, IPv6, and another's", []string{v6 + six178, v4 + touched + second}, false},
		{"all", []string{"tor-1: Deleted 203.0.113.180 proto bgp metric 20", v4 + touched}, false},
		{"written anew", []string{v4 + touched + second + third}, false},
	} {
		if got := onlyOthersLost(lab.SeedCluster().Nodes, test.changes); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}
