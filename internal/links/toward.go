package links

import (
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Toward returns the indexes of the interfaces that lead to a peer: that of the route, from a local address if it is
// valid, and those in a network of the peer, as a host with several may be answered on any of them. With a vrf, they
// are those in that VRF, and the VRF itself, which the kernel may name in place of its port. Without a route there is
// none.
func Toward(peer, local netip.Addr, vrf string) (indexes []int) {
	options := &netlink.RouteGetOptions{VrfName: vrf}
	if local.IsValid() {
		options.SrcAddr = local.AsSlice()
	}
	routes, err := netlink.RouteGetWithOptions(peer.AsSlice(), options)
	if err != nil {
		return nil
	}
	for _, r := range routes {
		indexes = append(indexes, r.LinkIndex)
	}
	in := func(int) bool { return true }
	if vrf != "" {
		ports, err := portsOf(vrf)
		if err != nil {
			return nil
		}
		indexes = append(indexes, ports[0])
		in = func(index int) bool { return slices.Contains(ports, index) }
	}
	addresses, err := netlink.AddrList(nil, familyNumber(lb.FamilyOf(peer)))
	if err != nil {
		return nil
	}
	for _, a := range addresses {
		if a.Contains(peer.AsSlice()) && in(a.LinkIndex) {
			indexes = append(indexes, a.LinkIndex)
		}
	}
	return indexes
}

// portsOf returns the index of a VRF, and then those of its ports.
func portsOf(vrf string) (indexes []int, err error) {
	master, err := netlink.LinkByName(vrf)
	if err != nil {
		return nil, err
	}
	indexes = []int{master.Attrs().Index}
	all, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		if l.Attrs().MasterIndex == indexes[0] {
			indexes = append(indexes, l.Attrs().Index)
		}
	}
	return indexes, nil
}
