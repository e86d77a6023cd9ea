package nftables

import (
	"math"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/cases"
)

// Each case, walked through the rendered rules and elements.
func TestPacketWalk(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range cases.For(family, true) {
			t.Run(string(family)+"/"+c.Name, func(t *testing.T) {
				walk := walkOf(t, w, c)
				ends, total, masqueraded := map[string]bool{}, 0.0, false
				const sources = 60 // where the source decides, many
				for port := range sources {
					p := packetOf(w, c)
					p.src = netip.AddrPortFrom(p.src.Addr(), uint16(40000+port))
					shares, snat := walk.fate(p)
					masqueraded = masqueraded || snat
					for end, share := range shares {
						ends[end] = true
						total += share
					}
				}
				want := map[string]bool{}
				for _, end := range c.Ends(w) {
					want[end] = true
				}
				if d := cmp.Diff(want, ends); d != "" || masqueraded != c.SNAT || math.Abs(total-sources) > 0.01 {
					t.Errorf("ends (-want +got):\n%s\nmasqueraded %v, want %v; %.3f of %d accounted for", d, masqueraded, c.SNAT, total, sources)
				}
			})
		}
	}
}

// Each case with real packets through a real kernel.
func TestPackets(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			s := cases.NewSite(t, cases.WorldOf(family))
			a := newTestActor(t, s.Node)
			s.Run(t, cases.For(family, true), func(t *testing.T, c cases.Case) {
				service, config := serviceOf(s.World, c)
				a.Configure(config)
				a.settle(t, map[lb.Key]Service{service.Key: service})
			})
		})
	}
}
