package lb

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
)

// Interface is one network interface of the node.
type Interface struct {
	Index int
	Name  string
	MAC   net.HardwareAddr // nil when the interface has no link-layer address
	MTU   int              // bytes of the largest packet that it sends
	// Up is set while the interface is up and has a carrier (IFF_UP and IFF_RUNNING), so that packets
	// can leave.
	Up bool
	// Disabled is set while the interface is administratively down (no IFF_UP). Linux answers for the
	// IPv4 addresses of such an interface all the same.
	Disabled bool
	Loopback bool
	// Enslaved is set for a port of a bridge, bond or VRF: its traffic belongs to the master.
	Enslaved bool
	// VRF is the name of the VRF that the interface is a port of, or is itself; "" outside of VRFs.
	VRF string
	// Table is the number of the VRF's routing table if the interface is a VRF itself; 0 for any other.
	Table int
	// Guest is set where the other end belongs to a pod or a virtual machine: that of a veth pair is
	// in another network namespace, or a program holds it (tap). Nodes that run in namespaces have
	// such interfaces too.
	Guest bool
	// Unforwarded4 and Unforwarded6 are set where the kernel forwards no IPv4 or IPv6 packets that come
	// in, by its parameters ip_forward and forwarding; not while that is unknown.
	Unforwarded4, Unforwarded6 bool
	// NoARP is set for an interface that neither asks nor answers ARP and NDP (IFF_NOARP).
	NoARP bool
	// Dummy is set for an interface at which no packet ever comes in: of the kind dummy, as kube-ipvs0 is.
	Dummy bool
	// Port is the index of the port that a bond in active-backup mode sends by; 0 for none. A VLAN or a
	// bridge on the bond has the same. When it changes, switches still send the node's addresses to the
	// previous port.
	Port int
	// Addresses are the interface's addresses with the length of their subnet, sorted.
	Addresses []netip.Prefix
	// Secondary are those that the kernel prefers another one to, sorted: further IPv4 addresses of a subnet in which
	// the interface had one, and IPv6 addresses that are deprecated. Programs that move addresses between machines add
	// such.
	Secondary []netip.Addr
}

// Equal reports whether two interfaces are equal in every field.
func (i Interface) Equal(other Interface) bool {
	return i.Index == other.Index && i.Name == other.Name && i.MTU == other.MTU && bytes.Equal(i.MAC, other.MAC) &&
		i.Up == other.Up && i.Disabled == other.Disabled && i.Guest == other.Guest &&
		i.Unforwarded4 == other.Unforwarded4 && i.Unforwarded6 == other.Unforwarded6 &&
		i.Loopback == other.Loopback && i.Enslaved == other.Enslaved && i.NoARP == other.NoARP &&
		i.Dummy == other.Dummy && i.VRF == other.VRF && i.Table == other.Table &&
		i.Port == other.Port && slices.Equal(i.Addresses, other.Addresses) &&
		slices.Equal(i.Secondary, other.Secondary)
}

// Forwards reports whether the kernel forwards packets of a family that come in at the interface, as
// far as is known.
func (i Interface) Forwards(family Family) bool {
	if family == IPv4 {
		return !i.Unforwarded4
	}
	return !i.Unforwarded6
}

// FindVRF returns the VRF of a name.
func FindVRF(interfaces []Interface, name string) (vrf Interface, found bool) {
	at := slices.IndexFunc(interfaces, func(i Interface) bool { return i.Table != 0 && i.Name == name })
	if at < 0 {
		return Interface{}, false
	}
	return interfaces[at], true
}

// Subnet returns the interface's subnet that contains addr, and reports whether there is one.
func (i Interface) Subnet(addr netip.Addr) (netip.Prefix, bool) {
	for _, p := range i.Addresses {
		if p.Contains(addr) {
			return p.Masked(), true
		}
	}
	return netip.Prefix{}, false
}
