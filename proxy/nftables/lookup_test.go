package nftables

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Linux 6.1 refuses a rule that looks up a key of a map and does not load the value, and with it the whole table.
func TestMapsAreAskedForTheirValues(t *testing.T) {
	config := plan.Config{DropInvalid: true, AnswerPing: true, Relay: true, RelayUDPRate: 100,
		Offload: map[lb.Family]bool{lb.IPv4: true, lb.IPv6: true}, OffloadUDP: true}
	maps := 0
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		rules := newRuleset(family, config, needs{{setRemember, 1}, {setSourceRanges, 8}, {set: setDirect}})
		for _, c := range rules.chains {
			for _, r := range c.rules {
				for _, e := range r.Exprs {
					lookup, ok := e.(*expr.Lookup)
					if !ok {
						continue
					}
					of, found := rules.set(lookup.SetName)
					isMap := of.flags&unix.NFT_SET_MAP != 0
					if isMap {
						maps++
					}
					if !found || isMap != lookup.IsDestRegSet {
						t.Errorf("%s, chain %s: a rule loads a value: %v; %s is a map: %v", family, c.name, lookup.IsDestRegSet,
							lookup.SetName, isMap)
					}
				}
			}
		}
	}
	if maps == 0 {
		t.Error("no rule asks a map")
	}
}
