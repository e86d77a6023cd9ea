package nftables

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// What the trace reads are the rules that were written: each expression comes back from its encoding.
func TestRulesAreReadBack(t *testing.T) {
	config := seedConfig
	config.Offload, config.OffloadUDP = map[lb.Family]bool{lb.IPv4: true, lb.IPv6: true}, true
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, c := range newRuleset(family, config, needs{{setRemember, 3600}, {setSourceRanges, 24}}).chains {
			for i, r := range c.rules {
				if d := cmp.Diff(r.Exprs, expr.Decode(expr.Encode(r.Exprs))); d != "" {
					t.Errorf("%s, chain %s, rule %d (-written +read):\n%s", family, c.name, i+1, d)
				}
			}
		}
	}
}
