package links

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Gateway is a next hop of a route.
type Gateway struct {
	Addr      netip.Addr
	Interface int // index of the interface that leads to it
}

// Gateways returns the next hops of the default routes in the main table and in those of VRFs. netns.None() is
// the namespace of the calling process.
func Gateways(ns netns.NsHandle) ([]Gateway, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	links, err := complete(handle.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	routes, err := routesIn(handle, MainTable)
	for _, l := range links {
		if vrf, ok := l.(*netlink.Vrf); ok && err == nil {
			var inside []netlink.Route
			inside, err = routesIn(handle, int(vrf.Table))
			routes = append(routes, inside...)
		}
	}
	if err != nil {
		return nil, err
	}
	return gateways(slices.DeleteFunc(routes, func(r netlink.Route) bool { return !isDefault(r) })), nil
}

// NextHops returns the next hops of all routes in the main table, each once. netns.None() is the
// namespace of the calling process.
func NextHops(ns netns.NsHandle) ([]Gateway, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	routes, err := routesIn(handle, MainTable)
	if err != nil {
		return nil, err
	}
	all := gateways(routes)
	slices.SortFunc(all, func(a, b Gateway) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Interface, b.Interface))
	})
	return slices.Compact(all), nil
}

func routesIn(handle *netlink.Handle, table int) ([]netlink.Route, error) {
	routes, err := complete(func() ([]netlink.Route, error) {
		return handle.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: table},
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

// RoutesTo returns which routes the kernel takes to some addresses; RouteUnknown where it drops the
// packets without a word. netns.None() is the namespace of
// the calling process.
func RoutesTo(ns netns.NsHandle, addrs []netip.Addr) (map[netip.Addr]lb.RouteKind, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	kinds := make(map[netip.Addr]lb.RouteKind, len(addrs))
	for _, addr := range addrs {
		routes, err := handle.RouteGetWithOptions(addr.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
		kinds[addr] = kindOf(routes, err)
	}
	return kinds, nil
}

func kindOf(routes []netlink.Route, err error) lb.RouteKind {
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES):
		return lb.RouteNone
	case err != nil || len(routes) == 0:
		return lb.RouteUnknown
	case routes[0].Type == unix.RTN_UNREACHABLE, routes[0].Type == unix.RTN_PROHIBIT:
		return lb.RouteNone
	case isDefault(routes[0]):
		return lb.RouteDefault
	}
	return lb.RouteOwn
}
