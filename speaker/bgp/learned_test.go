package bgp

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// A router decides what attributes its routes have, and how many: what is kept of each has a bound.
func TestReceivedRoutesAreBounded(t *testing.T) {
	asns, communities := make([]uint32, 250), make([]uint32, 700)
	for i := range asns {
		asns[i] = 4_200_000_000 + uint32(i)
	}
	for i := range communities {
		communities[i] = 4_200_000_000 + uint32(i)
	}
	s := newSession("tor", Options{Log: slog.New(slog.DiscardHandler)}, plan.BGPSession{})
	for i := range maxLearned + 1 {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0})
		m, err := bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{
			bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP),
			bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, asns)}),
			bgp.NewPathAttributeNextHop("10.0.0.2"), bgp.NewPathAttributeCommunities(communities),
		}, []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(24, addr.String())}).Serialize()
		if err != nil || len(m) > maxMessage {
			t.Fatal(err, len(m))
		}
		changes, err := parseUpdate(m[headerLength:], Negotiated{FourOctetASN: true, Families: []lb.Family{lb.IPv4}}, true)
		if err != nil {
			t.Fatal(err)
		}
		s.learn(changes)
	}
	bytes := 0
	for _, r := range s.learned {
		bytes += len(r.ASPath) + len(strings.Join(r.Communities, " ")) + 16*cap(r.Communities)
	}
	if len(s.learned) != maxLearned || bytes > 20<<20 {
		t.Errorf("%d routes take %d KiB", len(s.learned), bytes>>10)
	}
	status := s.snapshot(true)
	first := status.Routes[0]
	if !strings.HasPrefix(first.ASPath, "4200000000 4200000001 ") || !strings.HasSuffix(first.ASPath, " 4200000022 ...") {
		t.Errorf("AS path %q", first.ASPath)
	}
	if last := first.Communities[len(first.Communities)-1]; last != "and 668 more" {
		t.Errorf("the last community is %q", last)
	}
}

func TestBoundsOfReceivedPaths(t *testing.T) {
	set := "{" + strings.Repeat("64501,", 100) + "64502}"
	for path, want := range map[string]string{
		"": "", "64501": "64501", "64501 {64502,64503}": "64501 {64502,64503}",
		strings.Repeat("9", maxKeptPath):   strings.Repeat("9", maxKeptPath),
		strings.Repeat("9", maxKeptPath+1): " ...",
		set:                                "{" + strings.Repeat("64501,", 41) + "64501 ...",
	} {
		if got := (ReceivedRoute{ASPath: path}).bounded(); got.ASPath != want {
			t.Errorf("%q became %q, want %q", path, got.ASPath, want)
		}
	}
}
