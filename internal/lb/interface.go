package lb

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
)

// Interface is one network interface of the node, as the kernel reports it.
type Interface struct {
	Index int
	Name  string
	MAC   net.HardwareAddr // nil when the interface has no link-layer address
	// Up is set when the interface is switched on and has a carrier (IFF_UP and IFF_RUNNING): what is
	// sent can leave.
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
