package iptables

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// The actor keeps the note on route_localnet among the rules of IPv4, and removes it with them.
func TestNoteOnRouteLocalnet(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			ns := nstest.New(t)
			v4 := nsKernel{t, ns, variant(lb.IPv4, kind)}
			kernels := map[lb.Family]Kernel{lb.IPv4: v4, lb.IPv6: nsKernel{t, ns, variant(lb.IPv6, kind)}}
			expect := func(when string, v4 bool) {
				t.Helper()
				for family, want := range map[lb.Family]bool{lb.IPv4: v4, lb.IPv6: false} {
					if set, needed, err := (Localnet{kernels[family]}).Set(t.Context()); err != nil || set != want || needed {
						t.Errorf("%s: %s: set %v, needed %v, %v; want set %v", when, family, set, needed, err, want)
					}
				}
			}
			settled := func(config plan.Config) *testActor {
				t.Helper()
				a := newActor(kernels, config)
				a.Set(seed(func(*lb.Service) {}))
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				return a
			}
			expect("at first", false)
			if err := (Localnet{v4}).Mark(t.Context()); err != nil {
				t.Fatal(err)
			}
			expect("noted", true)
			config := seedConfig
			config.SetRouteLocalnet = true
			a := settled(config)
			expect("with rules", true)
			ns.Run(t, v4.commands.String(), "-X", chainLocalnet)
			expect("others remove it", false)
			if err := settle(a, true); err != nil {
				t.Fatal(err)
			}
			expect("repaired", true)
			if kind == "nft" {
				ns.Run(t, "nft", "flush", "ruleset")
			} else {
				ns.Run(t, "sh", "-c", `for t in filter nat; do "$0" -t $t -F; "$0" -t $t -X; done`, v4.commands.String())
			}
			expect("others flush everything", false)
			if err := settle(a, true); err != nil {
				t.Fatal(err)
			}
			expect("repaired after the flush", true)
			unset := 0
			for range 2 {
				for _, k := range kernels {
					if err := cleanup(t.Context(), k, func() { unset++ }); err != nil {
						t.Fatal(err)
					}
				}
			}
			expect("cleaned up", false)
			if unset != 1 {
				t.Errorf("set back %d times", unset)
			}
			settled(config)
			settled(seedConfig)
			expect("not set by us any more", false)
		})
	}
}
