package links

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Gateway is a next hop of a route in the main table.
type Gateway struct {
	Addr      netip.Addr
	Interface int // index of the interface that leads to it
}

// Gateways returns the next hops of all default routes in the kernel. netns.None() is the namespace
// of the calling process.
func Gateways(ns netns.NsHandle) ([]Gateway, error) {
	routes, err := mainRoutes(ns)
	if err != nil {
		return nil, err
	}
	return gateways(slices.DeleteFunc(routes, func(r netlink.Route) bool { return !isDefault(r) })), nil
}

// NextHops returns the next hops of all routes in the kernel, each once. netns.None() is the
// namespace of the calling process.
func NextHops(ns netns.NsHandle) ([]Gateway, error) {
	routes, err := mainRoutes(ns)
	if err != nil {
		return nil, err
	}
	all := gateways(routes)
	slices.SortFunc(all, func(a, b Gateway) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Interface, b.Interface))
	})
	return slices.Compact(all), nil
}

func mainRoutes(ns netns.NsHandle) ([]netlink.Route, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	routes, err := complete(func() ([]netlink.Route, error) {
		return handle.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_MAIN},
			netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return routes, nil
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0 && r.Dst.IP.IsUnspecified()
}

func gateways(routes []netlink.Route) []Gateway {
	var found []Gateway
	add := func(link int, ip []byte, via netlink.Destination) {
		if v, ok := via.(*netlink.Via); ok && len(ip) == 0 {
			ip = v.Addr // an IPv4 route over an IPv6 next hop (RFC 5549)
		}
		if addr, ok := netip.AddrFromSlice(ip); ok {
			found = append(found, Gateway{Addr: addr.Unmap(), Interface: link})
		}
	}
	for _, r := range routes {
		add(r.LinkIndex, r.Gw, r.Via)
		for _, hop := range r.MultiPath {
			add(hop.LinkIndex, hop.Gw, hop.Via)
		}
	}
	return found
}
