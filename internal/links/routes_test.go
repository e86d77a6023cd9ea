package links

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestGateways reads routes of a kernel: one next hop, several, over another interface, and none.
func TestGateways(t *testing.T) {
	node, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "eth0", "192.0.2.9/24", router, "eth0", "192.0.2.1/24")
	read := func() []netip.Addr {
		var found []Gateway
		node.Do(t, func() (err error) {
			found, err = Gateways(netns.None())
			return err
		})
		var addrs []netip.Addr
		for _, g := range found {
			if g.Interface == 0 {
				t.Errorf("%s has no interface", g.Addr)
			}
			addrs = append(addrs, g.Addr)
		}
		slices.SortFunc(addrs, netip.Addr.Compare)
		return addrs
	}
	if got := read(); len(got) > 0 {
		t.Errorf("without a default route: %v", got)
	}
	node.Run(t, "ip", "route", "add", "198.51.100.0/24", "via", "192.0.2.7")
	node.Run(t, "ip", "route", "add", "default", "via", "192.0.2.1")
	if got := read(); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("192.0.2.1")}) {
		t.Errorf("one next hop: %v", got)
	}
	node.Run(t, "ip", "route", "replace", "default", "nexthop", "via", "192.0.2.1", "nexthop", "via", "192.0.2.2")
	if got := read(); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("192.0.2.1"),
		netip.MustParseAddr("192.0.2.2")}) {
		t.Errorf("two next hops: %v", got)
	}
}
