// Package links tells what network interfaces the node has, as the kernel reports them over netlink.
package links

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Interface is one network interface of the node.
type Interface struct {
	Index int
	Name  string
	MAC   net.HardwareAddr // nil when the interface has no link-layer address
	// Up is set when the interface is switched on and has a carrier (IFF_UP and IFF_RUNNING): what is sent can leave.
	Up       bool
	Loopback bool
	// Enslaved is set for a port of a bridge, bond or VRF: its traffic belongs to the master.
	Enslaved bool
	// NoARP is set for an interface that neither asks nor answers ARP and NDP (IFF_NOARP).
	NoARP bool
	// Addresses are the interface's addresses with the length of their subnet, sorted.
	Addresses []netip.Prefix
}

// Equal tells whether two interfaces are the same in every respect.
func (i Interface) Equal(other Interface) bool {
	return i.Index == other.Index && i.Name == other.Name && bytes.Equal(i.MAC, other.MAC) && i.Up == other.Up &&
		i.Loopback == other.Loopback && i.Enslaved == other.Enslaved && i.NoARP == other.NoARP &&
		slices.Equal(i.Addresses, other.Addresses)
}

// Subnet returns the subnet of the interface that contains addr, if there is one.
func (i Interface) Subnet(addr netip.Addr) (netip.Prefix, bool) {
	for _, p := range i.Addresses {
		if p.Contains(addr) {
			return p.Masked(), true
		}
	}
	return netip.Prefix{}, false
}

// translate turns netlink's view into ours, sorted by name.
func translate(links []netlink.Link, addrs []netlink.Addr) []Interface {
	byIndex := map[int][]netip.Prefix{}
	for _, a := range addrs {
		if p, ok := toPrefix(a); ok {
			byIndex[a.LinkIndex] = append(byIndex[a.LinkIndex], p)
		}
	}
	interfaces := make([]Interface, 0, len(links))
	for _, l := range links {
		attrs := l.Attrs()
		i := Interface{
			Index:     attrs.Index,
			Name:      attrs.Name,
			Up:        attrs.RawFlags&unix.IFF_UP != 0 && attrs.RawFlags&unix.IFF_RUNNING != 0,
			Loopback:  attrs.RawFlags&unix.IFF_LOOPBACK != 0,
			Enslaved:  attrs.MasterIndex != 0,
			NoARP:     attrs.RawFlags&unix.IFF_NOARP != 0,
			Addresses: byIndex[attrs.Index],
		}
		if len(attrs.HardwareAddr) > 0 {
			i.MAC = slices.Clone(attrs.HardwareAddr)
		}
		slices.SortFunc(i.Addresses, comparePrefixes)
		interfaces = append(interfaces, i)
	}
	slices.SortFunc(interfaces, func(a, b Interface) int { return strings.Compare(a.Name, b.Name) })
	return interfaces
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
		return netip.Prefix{}, false // a mask that is not of the address's family, or has holes
	}
	return netip.PrefixFrom(addr, bits), true
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}
