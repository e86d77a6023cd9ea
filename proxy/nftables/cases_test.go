package nftables

import (
	"maps"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Each case, walked through the rendered rules and elements.
func TestPacketWalk(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range cases.For(family, true) {
			t.Run(string(family)+"/"+c.Name, func(t *testing.T) {
				walk := walkOf(t, w, c)
				if c.Sticky {
					walkSticky(t, w, c, walk)
					return
				}
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
					t.Errorf("ends (-want +got):\n%s\nmasqueraded %v, want %v; %.3f of %d accounted for", d, masqueraded, c.SNAT,
						total, sources)
				}
			})
		}
	}
}

// walkSticky walks many clients that are not remembered yet: each ends at one endpoint, and at the
// same one wherever it connects to.
func walkSticky(t *testing.T, w cases.World, c cases.Case, walk *walker) {
	t.Helper()
	reached := map[string]bool{}
	client := c.Source(w)
	for port := range uint16(60) {
		for slices.Contains(c.LocalAddresses(w), client) { // the node is a client of another kind
			client = client.Next()
		}
		at := ""
		for _, leg := range c.Legs() {
			p := packetOf(w, leg)
			p.src = netip.AddrPortFrom(client, 40000+port)
			shares, masqueraded := walk.fate(p)
			if len(shares) != 1 || masqueraded != c.SNAT {
				t.Fatalf("%s to %s ends at %v, masqueraded %v", client, leg.To, shares, masqueraded)
			}
			for end := range shares {
				if at == "" {
					at = end
				}
				if end != at {
					t.Errorf("%s: at %s, and at %s when it connects to %s", client, at, end, leg.To)
				}
			}
		}
		reached[at] = true
		client = client.Next()
	}
	if ends := slices.Sorted(maps.Keys(reached)); !slices.Equal(ends, c.Ends(w)) {
		t.Errorf("clients end at %v, want %v", ends, c.Ends(w))
	}
}

// Each case with real packets through a real kernel.
func TestPackets(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel() // they wait for answers most of the time
			s := cases.NewSite(t, cases.WorldOf(family))
			s.Run(t, cases.For(family, true), program(t, s))
		})
	}
}

// program starts an actor on the site's node, and returns what puts a case into the kernel.
func program(t *testing.T, s *cases.Site) func(*testing.T, cases.Case) {
	a := newTestActor(t, s.Node)
	return func(t *testing.T, c cases.Case) {
		t.Helper()
		service, config := serviceOf(s.World, c)
		a.Configure(config)
		a.settle(t, map[lb.Key]plan.Service{service.Key: service})
	}
}
