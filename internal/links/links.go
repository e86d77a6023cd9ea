// Package links watches the node's network interfaces over netlink.
package links

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// translate converts netlink's links and addresses to lb.Interface values, sorted by name.
func translate(links []netlink.Link, addrs []netlink.Addr) []lb.Interface {
	byIndex, secondary := map[int][]netip.Prefix{}, map[int][]netip.Addr{}
	for _, a := range addrs {
		if p, ok := toPrefix(a); ok {
			byIndex[a.LinkIndex] = append(byIndex[a.LinkIndex], p)
			if isSecondary(p.Addr(), a.Flags) {
				secondary[a.LinkIndex] = append(secondary[a.LinkIndex], p.Addr())
			}
		}
	}
	vrfs := map[int]string{}
	for _, l := range links {
		if l.Type() == "vrf" {
			vrfs[l.Attrs().Index] = l.Attrs().Name
		}
	}
	interfaces := make([]lb.Interface, 0, len(links))
	for _, l := range links {
		attrs := l.Attrs()
		if lb.IsTunnel(attrs.Name) {
			continue // nothing is announced there, and clients reach no address there
		}
		i := lb.Interface{
			Index:     attrs.Index,
			Name:      attrs.Name,
			MTU:       attrs.MTU,
			Up:        attrs.RawFlags&unix.IFF_UP != 0 && attrs.RawFlags&unix.IFF_RUNNING != 0,
			Disabled:  attrs.RawFlags&unix.IFF_UP == 0,
			Loopback:  attrs.RawFlags&unix.IFF_LOOPBACK != 0,
			Enslaved:  attrs.MasterIndex != 0,
			VRF:       cmp.Or(vrfs[attrs.Index], vrfs[attrs.MasterIndex]),
			Guest:     l.Type() == "tuntap" || l.Type() == "veth" && attrs.NetNsID >= 0,
			NoARP:     attrs.RawFlags&unix.IFF_NOARP != 0,
			Dummy:     l.Type() == "dummy",
			Port:      activePort(links, l, maxLayers),
			Addresses: byIndex[attrs.Index],
			Secondary: secondary[attrs.Index],
		}
		if vrf, ok := l.(*netlink.Vrf); ok {
			i.Table = int(vrf.Table)
		}
		if len(attrs.HardwareAddr) > 0 {
			i.MAC = slices.Clone(attrs.HardwareAddr)
		}
		slices.SortFunc(i.Addresses, comparePrefixes)
		slices.SortFunc(i.Secondary, netip.Addr.Compare)
		interfaces = append(interfaces, i)
	}
	slices.SortFunc(interfaces, func(a, b lb.Interface) int { return strings.Compare(a.Name, b.Name) })
	return interfaces
}

// isSecondary reports whether the kernel prefers another address. Of IPv6 the same bit says that an address is
// temporary.
func isSecondary(addr netip.Addr, flags int) bool {
	if addr.Is4() {
		return flags&unix.IFA_F_SECONDARY != 0
	}
	return flags&unix.IFA_F_DEPRECATED != 0
}

// maxLayers bounds how deep interfaces lie on one another: Linux allows 8.
const maxLayers = 8

// activePort returns the index of the port that the bond sends by which a link is or lies on; 0 for
// none.
func activePort(links []netlink.Link, l netlink.Link, layers int) int {
	below := func(netlink.Link) bool { return false }
	switch l.Type() {
	case "bond":
		if bond, ok := l.(*netlink.Bond); ok {
			return max(bond.ActiveSlave, 0)
		}
	case "vlan", "macvlan":
		below = func(other netlink.Link) bool { return other.Attrs().Index == l.Attrs().ParentIndex }
	case "bridge":
		below = func(other netlink.Link) bool { return other.Attrs().MasterIndex == l.Attrs().Index }
	}
	for _, other := range links {
		if layers > 0 && below(other) {
			if port := activePort(links, other, layers-1); port > 0 {
				return port
			}
		}
	}
	return 0
}

func toPrefix(a netlink.Addr) (netip.Prefix, bool) {
	if a.IPNet == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(a.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	addr = addr.Unmap()
	bits, size := a.Mask.Size()
	if size != addr.BitLen() {
		return netip.Prefix{}, false // the mask is of another family, or has holes
	}
	return netip.PrefixFrom(addr, bits), true
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
