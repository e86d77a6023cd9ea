package lb

import (
	"net/netip"
	"testing"
)

func TestWitnessServes(t *testing.T) {
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	w := Witness{Live: []string{"a", "b"}, Unserved: []netip.Addr{two}}
	partial := w
	partial.Partial = true
	for _, c := range []struct {
		name string
		w    Witness
		node string
		vip  netip.Addr
		want bool
	}{
		{"served elsewhere", w, "c", one, true},
		{"not served", w, "c", two, false},
		{"seen by them, so that they may count on it", w, "b", one, false},
		{"they cannot say all", partial, "c", one, false},
	} {
		if got := c.w.Serves(c.node, c.vip); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
