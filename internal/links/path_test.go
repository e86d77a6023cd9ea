package links

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestPaths asks a kernel for the ways to its own address, to a neighbor and to the rest of the
// world, and for its uplink.
func TestPaths(t *testing.T) {
	node, other := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "lan", "198.51.100.1/24", other, "lan", "198.51.100.2/24")
	nstest.Veth(t, node, "wan", "203.0.113.1/24", other, "wan", "203.0.113.2/24")
	want := func(what, uplink string) {
		t.Helper()
		node.Do(t, func() error {
			if got := Uplink(); got != uplink {
				t.Errorf("%s: the uplink is %q, want %q", what, got, uplink)
			}
			return nil
		})
	}
	want("no default route", "")
	node.Run(t, "ip", "route", "add", "default", "via", "203.0.113.2")
	want("a default route", "wan")
	for addr, path := range map[string]Path{"198.51.100.1": {Local: true, Interface: "lo"}, "198.51.100.2": {Interface: "lan"},
		"192.0.2.9": {Interface: "wan"}} {
		node.Do(t, func() error {
			got, found, err := PathTo(netip.MustParseAddr(addr))
			if err == nil && (!found || got.Local != path.Local || !path.Local && got != path) {
				t.Errorf("the way to %s is %+v, %v; want %+v", addr, got, found, path)
			}
			return err
		})
	}
	node.Run(t, "ip", "rule", "add", "from", "198.51.100.0/24", "table", "100")
	want("policy routing", "")
	node.Run(t, "ip", "rule", "del", "from", "198.51.100.0/24", "table", "100")
	node.Run(t, "ip", "route", "replace", "unreachable", "default")
	want("an unreachable default route", "")
}
