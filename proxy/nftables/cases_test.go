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

// Each case, walked through the rendered rules and elements: with the numbered sets that it needs, and with others that
// were needed before.
func TestPacketWalk(t *testing.T) {
	t.Parallel()
	kept := needs{{setRemember, 7}, {setRemember, 7 | 5<<secondsBits}, {setSourceRanges, 4}, {setSourceRanges, 24},
		{set: setDirect}}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range cases.For(family, true) {
			t.Run(string(family)+"/"+c.Name, func(t *testing.T) { walkCase(t, w, c, walkOf(t, w, c)) })
			t.Run(string(family)+"/"+c.Name+", more sets", func(t *testing.T) { walkCase(t, w, c, walkOf(t, w, c, kept...)) })
		}
	}
}

func walkCase(t *testing.T, w cases.World, c cases.Case, walk *walker) {
	t.Helper()
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
}

// walkSticky walks many clients. One that is not remembered may end at each endpoint; from then on
// it ends at that one, wherever it connects to.
func walkSticky(t *testing.T, w cases.World, c cases.Case, walk *walker) {
	t.Helper()
	client := c.Source(w)
	for i := range 20 {
		for slices.Contains(c.LocalAddresses(w), client) { // the node is a client of another kind
			client = client.Next()
		}
		from := func(leg cases.Case) packet {
			p := packetOf(w, leg)
			p.src = netip.AddrPortFrom(client, uint16(40000+i))
			return p
		}
		shares, masqueraded := walk.fate(from(c))
		ends := slices.Sorted(maps.Keys(shares))
		if !slices.Equal(ends, c.Ends(w)) || masqueraded != c.SNAT {
			t.Fatalf("%s ends at %v, want %v; masqueraded %v", client, ends, c.Ends(w), masqueraded)
		}
		end := ends[i%len(ends)]
		walk.establish(from(c), netip.MustParseAddrPort(end))
		for _, leg := range c.Legs() {
			shares, masqueraded := walk.fate(from(leg))
			if shares[end] != 1 || masqueraded != c.SNAT {
				t.Fatalf("%s was at %s; to %s it ends at %v, masqueraded %v", client, end, leg.To, shares, masqueraded)
			}
		}
		client = client.Next()
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
