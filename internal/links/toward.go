package links

import (
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Toward returns the indexes of the interfaces that lead to a peer: that of the route, from a local address if it is
// valid, and those in a network of the peer, as a host with several may be answered on any of them. Without a route
// there is none.
func Toward(peer, local netip.Addr) (indexes []int) {
	var options *netlink.RouteGetOptions
	if local.IsValid() {
		options = &netlink.RouteGetOptions{SrcAddr: local.AsSlice()}
	}
	routes, err := netlink.RouteGetWithOptions(peer.AsSlice(), options)
	if err != nil {
		return nil
	}
	for _, r := range routes {
		indexes = append(indexes, r.LinkIndex)
	}
	addresses, err := netlink.AddrList(nil, familyNumber(lb.FamilyOf(peer)))
	if err != nil {
		return nil
	}
	for _, a := range addresses {
		if a.Contains(peer.AsSlice()) {
			indexes = append(indexes, a.LinkIndex)
		}
	}
	return indexes
}
