package lb

import (
	"net/netip"
	"slices"
	"testing"
)

func TestCommunities(t *testing.T) {
	for s, want := range map[string]Community{
		"64512:100": {A: 64512, B: 100}, "0:65535": {B: 65535}, "large:4294967295:0:7": {Large: true, A: 4294967295, C: 7},
	} {
		if got, err := ParseCommunity(s); err != nil || got != want || got.String() != s {
			t.Errorf("%s: %+v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "1", "1:2:3", "65536:1", "1:65536", "large:1:2", "large:1:2:4294967296", "-1:2", "+1:2",
		"a:b", "large:", "1:2 "} {
		if got, err := ParseCommunity(s); err == nil {
			t.Errorf("%q was taken for %v", s, got)
		}
	}
	list := []Community{{Large: true}, {A: 2}, {A: 1, B: 5}, {A: 1, B: 4}}
	slices.SortFunc(list, Community.Compare)
	if want := []Community{{A: 1, B: 4}, {A: 1, B: 5}, {A: 2}, {Large: true}}; !slices.Equal(list, want) {
		t.Errorf("sorted: %v", list)
	}
}

func FuzzParseCommunity(f *testing.F) {
	for _, s := range []string{"64512:100", "large:1:2:3", "large:", ":", "::::"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseCommunity(s)
		if err != nil {
			return
		}
		if again, err := ParseCommunity(c.String()); err != nil || again != c {
			t.Errorf("%q is %v, which reads back as %v, %v", s, c, again, err)
		}
	})
}

func TestAggregate(t *testing.T) {
	a := BGPAdvertisement{AggregationLength: 24, AggregationLengthV6: 64}
	for addr, want := range map[string]string{"192.0.2.77": "192.0.2.0/24", "2001:db8::1:2": "2001:db8::/64"} {
		if got := a.Aggregate(netip.MustParseAddr(addr)); got.String() != want {
			t.Errorf("%s: %v, want %s", addr, got, want)
		}
	}
}
