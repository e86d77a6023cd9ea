package rescue

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Sets in our table with names that are like ours may be anybody's.
func TestNamesOfOthersAreNotOurs(t *testing.T) {
	for text, families := range map[string][2]bool{
		name(prefixVIPs, addr("10.0.0.2")):     {true, false},
		name(prefixVIPs, addr("fd00::2")):      {false, true},
		"vips-":                                {},
		"vips-0a00000":                         {},
		"vips-0A000002":                        {},
		"0a000002":                             {},
		"flows-0a000002":                       {},
		"vips-vips-0a000002":                   {},
		"vips-00000000000000000000ffff0a00000": {},
	} {
		for i, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			if node, ok := headerOf(family).nodeOf(prefixVIPs, text); ok != families[i] {
				t.Errorf("%s, %s: %s, %v", text, family, node, ok)
			}
		}
	}
}

// FuzzNames has names of sets read back: what is taken for a node's is what that node's would be.
func FuzzNames(f *testing.F) {
	for _, node := range []string{"10.0.0.2", "fd00::2", "::ffff:10.0.0.2"} {
		for _, prefix := range []string{prefixVIPs, prefixFlows} {
			f.Add(name(prefix, addr(node)))
		}
	}
	f.Add("vips-0A000002")
	f.Fuzz(func(t *testing.T, text string) {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			for _, prefix := range []string{prefixVIPs, prefixFlows} {
				node, ok := headerOf(family).nodeOf(prefix, text)
				if ok && (name(prefix, node) != text || node == (netip.Addr{}) || node.Is4() != (family == lb.IPv4)) {
					t.Errorf("%s: %q is taken for the set of %s", family, text, node)
				}
			}
		}
	})
}

// The marks of the ring and that of direct forwarding are apart, as other packages know them.
func TestMarksAreApart(t *testing.T) {
	if floor != lb.LeastMovedTTL || spent+maxHops >= lb.HandedTTL {
		t.Errorf("marks from %d to %d, and lb has %d and %d", floor, spent+maxHops, lb.LeastMovedTTL, lb.HandedTTL)
	}
}
