package nft

import (
	"cmp"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestForwardChains reads what other programs do with forwarded packets.
func TestForwardChains(t *testing.T) {
	ns := nstest.New(t)
	c := open(t, ns)
	if chains, err := ForwardChains(c); err != nil || len(chains) > 0 {
		t.Errorf("%v, %v in an empty namespace", chains, err)
	}
	ns.Run(t, "nft", `
table ip filter {
	chain FLANNEL-FWD { ip saddr 10.0.0.0/8 accept; }
	chain OTHER { accept; }
	chain INPUT { type filter hook input priority 0; policy drop; }
	chain FORWARD {
		type filter hook forward priority 0; policy drop;
		counter jump FLANNEL-FWD
		tcp dport 1 goto OTHER
	}
}
table inet firewalld {
	chain filter_FORWARD { type filter hook forward priority 10; reject; }
}
table ip6 mine {
	chain fw { type filter hook forward priority 5; policy drop; }
}
table arp mine {
	chain fw { type filter hook input priority 5; policy drop; }
}`)
	chains, err := ForwardChains(c)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(chains, func(a, b ForwardChain) int { return cmp.Compare(a.Family, b.Family) })
	want := []ForwardChain{
		{Family: "inet", Table: "firewalld", Name: "filter_FORWARD"},
		{Family: "ip", Table: "filter", Name: "FORWARD", Drops: true, Jumps: []string{"FLANNEL-FWD", "OTHER"}},
		{Family: "ip6", Table: "mine", Name: "fw", Drops: true},
	}
	if diff := gocmp.Diff(want, chains); diff != "" {
		t.Errorf("chains (-want +got):\n%s", diff)
	}
}
