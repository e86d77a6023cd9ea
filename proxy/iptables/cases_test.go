package iptables

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Each case, walked through the rendered rules.
func TestPacketWalk(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range cases.For(family, false) {
			t.Run(string(family)+"/"+c.Name, func(t *testing.T) {
				service, config := c.Plan(w)
				r := renderer{config, family}
				walk := walker{
					t: t, hooks: r.hooks(), rules: r.ruleset([]contribution{r.service(service)}),
					local: c.LocalAddresses(w),
				}
				for _, leg := range c.Legs() {
					ends, masqueraded := walk.fate(packet{
						src: netip.AddrPortFrom(c.Source(w), 40000), dst: leg.Destination(w), in: c.Interface(), protocol: c.Transport(),
						invalid: c.Invalid,
					})
					if want := c.Ends(w); !slices.Equal(ends, want) || masqueraded != c.SNAT {
						t.Errorf("to %s: ends at %v, masqueraded %v; want %v, %v", leg.To, ends, masqueraded, want, c.SNAT)
					}
				}
			})
		}
	}
}

// Each case with real packets through a real kernel.
func TestPackets(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel() // they wait for answers most of the time
			s := cases.NewSite(t, cases.WorldOf(family))
			s.Run(t, cases.For(family, false), program(t, s))
		})
	}
}

// program starts an actor on the site's node, and returns what puts a case into the kernel.
func program(t *testing.T, s *cases.Site) func(*testing.T, cases.Case) {
	family := s.World.Family
	a := newActor(map[lb.Family]Kernel{family: nsKernel{t, s.Node, variant(family, "nft")}}, seedConfig)
	return func(t *testing.T, c cases.Case) {
		t.Helper()
		service, config := c.Plan(s.World)
		a.Configure(config)
		a.Set(plans(service))
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
	}
}
