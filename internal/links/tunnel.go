package links

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Tunnel is an interface that carries packets of a family to known nodes in a VXLAN (RFC 7348), and
// what leads to it. Only who asks for a route over the interface gets one.
type Tunnel struct {
	Family lb.Family
	// Name and Network (the VNI) are by what it is recognised.
	Name    string
	Network int
	// Port is the UDP port that all nodes listen on, Self the address that this one sends from.
	Port uint16
	Self netip.Addr
	// MTU is the size of the packets that it takes; 0 to leave it alone.
	MTU int
	// MAC is the link-layer address of a node in the tunnel.
	MAC func(node netip.Addr) [6]byte
	// Peers are the nodes that packets may be sent to.
	Peers []netip.Addr
	// Alias is another address of a node, in the network Aliases, at which this node alone knows it; zero for none.
	// There the tunnel leads, and nothing else, without its interface being named.
	Alias   func(node netip.Addr) netip.Addr
	Aliases netip.Prefix
	// Routes is the number of the routing table that has each node on the interface's link, and the
	// priority of the rules that lead there. It also has that no other way leads to Aliases.
	Routes int
}

// Tunnels is the way to the node's tunnels. It is not safe for concurrent use.
type Tunnels struct{ handle *netlink.Handle }

// OpenTunnels opens the way to the tunnels in the calling thread's network namespace.
func OpenTunnels() (Tunnels, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return Tunnels{}, fmt.Errorf("open netlink for tunnels: %w", err)
	}
	return Tunnels{handle}, nil
}

// Close closes it. The tunnels stay.
func (t Tunnels) Close() { t.handle.Close() }

// Self returns the address that an interface sends from, if it is there.
func (t Tunnels) Self(name string, network int) (self netip.Addr, found bool, err error) {
	link, err := t.find(name, network)
	if err != nil || link == nil {
		return self, false, err
	}
	self, found = netip.AddrFromSlice(link.SrcAddr)
	return self.Unmap(), found, nil
}

// TunnelState is how a tunnel is.
type TunnelState struct {
	// Link is the interface's index, and MTU its MTU.
	Link, MTU int
	// Diverted is set while the kernel has another way to Aliases than the tunnel, as by a rule ahead of the tunnel's.
	Diverted bool
}

// Set makes a tunnel as it shall be, and returns how it is. It changes only what differs.
func (t Tunnels) Set(want Tunnel) (s TunnelState, err error) {
	link, err := t.find(want.Name, want.Network)
	if err != nil {
		return s, err
	}
	if link, err = t.setLink(want, link); err != nil {
		return s, err
	}
	diverted, err := t.setRoute(want, link.Index)
	if err != nil {
		return s, err
	}
	return TunnelState{link.Index, link.MTU, diverted}, t.setPeers(want, link.Index)
}

// Remove removes a tunnel, if it is there, and nothing else.
func (t Tunnels) Remove(it Tunnel) error {
	link, err := t.find(it.Name, it.Network)
	if err == nil && link != nil {
		err = t.handle.LinkDel(link)
	}
	if err != nil {
		return err
	}
	for _, end := range it.ends() {
		err := t.handle.RouteDel(end)
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EAFNOSUPPORT) {
			return fmt.Errorf("remove the route: %w", err)
		}
	}
	for _, rule := range it.rules() {
		for err = nil; err == nil; { // the kernel takes the same rule twice
			err = t.handle.RuleDel(rule)
		}
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EAFNOSUPPORT) {
			return fmt.Errorf("remove the rule: %w", err)
		}
	}
	return nil
}

// find returns the interface, nil if it is not there. One of another kind is not ours.
func (t Tunnels) find(name string, network int) (*netlink.Vxlan, error) {
	link, err := t.handle.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the interface: %w", err)
	}
	ours, ok := link.(*netlink.Vxlan)
	if !ok || ours.VxlanId != network {
		return nil, fmt.Errorf("an interface of this name is there that is not Landfall's (%s)", link.Type())
	}
	return ours, nil
}

// unused is an interface's address in IPv4: without one the kernel refuses all packets there
// wherever rp_filter is on. RFC 7600 sets it aside as the source of nothing, and its scope keeps it
// from being chosen as one.
var unused = &net.IPNet{IP: net.IPv4(192, 0, 0, 8).To4(), Mask: net.CIDRMask(32, 32)}

// setLink makes the interface. One that differs in what cannot be changed is made anew.
func (t Tunnels) setLink(want Tunnel, link *netlink.Vxlan) (*netlink.Vxlan, error) {
	self := want.MAC(want.Self)
	if link != nil && (link.Port != int(want.Port) || !link.SrcAddr.Equal(want.Self.AsSlice()) || link.Learning ||
		!bytes.Equal(link.HardwareAddr, self[:])) {
		if err := t.handle.LinkDel(link); err != nil {
			return nil, fmt.Errorf("remove the interface: %w", err)
		}
		link = nil
	}
	if link == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = want.Name, want.MTU, self[:]
		made := netlink.Vxlan{LinkAttrs: attrs, VxlanId: want.Network, Port: int(want.Port), SrcAddr: want.Self.AsSlice()}
		if err := t.handle.LinkAdd(&made); err != nil {
			return nil, fmt.Errorf("add the interface: %w", err)
		}
		var err error
		if link, err = t.find(want.Name, want.Network); err != nil {
			return nil, err
		}
		if link == nil {
			return nil, errors.New("the interface has gone again")
		}
	}
	if want.MTU != 0 && link.MTU != want.MTU {
		if err := t.handle.LinkSetMTU(link, want.MTU); err != nil {
			return nil, fmt.Errorf("set the MTU to %d: %w", want.MTU, err)
		}
		link.MTU = want.MTU
	}
	if want.Family == lb.IPv4 {
		err := t.handle.AddrAdd(link, &netlink.Addr{IPNet: unused, Scope: unix.RT_SCOPE_HOST})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("set the address: %w", err)
		}
	}
	if link.RawFlags&unix.IFF_UP == 0 {
		if err := t.handle.LinkSetUp(link); err != nil {
			return nil, fmt.Errorf("set the interface up: %w", err)
		}
	}
	return link, nil
}

// familyNumber returns what the kernel calls an address family.
func familyNumber(family lb.Family) int {
	if family == lb.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// setRoute has the kernel take each node for being on the interface's link, if somebody asks for a
// route over this interface, or to an alias. Nobody else follows the rules. It reports whether another rule takes
// what is for an alias elsewhere.
func (t Tunnels) setRoute(want Tunnel, link int) (diverted bool, err error) {
	nowhere, all := netip.MustParseAddr("192.0.2.1"), netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	scope := netlink.Scope(unix.RT_SCOPE_LINK)
	if want.Family == lb.IPv6 {
		nowhere, all = netip.MustParseAddr("2001:db8::1"), netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		scope = unix.RT_SCOPE_UNIVERSE
	}
	leads := func(to netip.Addr, over int) bool {
		found, err := t.handle.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{OifIndex: over})
		return err == nil && len(found) == 1 && found[0].Table == want.Routes && found[0].LinkIndex == link
	}
	alias, routed := want.Aliases.Addr().Next(), leads(nowhere, link)
	if routed && leads(alias, 0) {
		return false, nil
	}
	if !routed {
		routes := append(want.ends(), &netlink.Route{LinkIndex: link, Table: want.Routes, Scope: scope,
			Family: familyNumber(want.Family),
			Dst:    &net.IPNet{IP: all.Addr().AsSlice(), Mask: net.CIDRMask(0, all.Addr().BitLen())}})
		for _, route := range routes {
			if err := t.handle.RouteReplace(route); err != nil {
				return false, fmt.Errorf("add the route: %w", err)
			}
		}
	}
	for _, rule := range want.rules() {
		if err := t.handle.RuleAdd(rule); err != nil && !errors.Is(err, unix.EEXIST) {
			return false, fmt.Errorf("add the rule: %w", err)
		}
	}
	return !leads(alias, 0), nil
}

// ends are the routes of the table that stay when the interface goes. A router would send back what is for an alias,
// so that ends here; the address of all on a network (RFC 919) is not the tunnel's, though it is in 255.0.0.0/8.
func (t Tunnel) ends() []*netlink.Route {
	const last = 4096 // behind the interface's
	end := netlink.Route{Family: familyNumber(t.Family), Table: t.Routes, Type: unix.RTN_UNREACHABLE, Priority: last,
		Dst: &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}}
	if t.Family == lb.IPv6 {
		return []*netlink.Route{&end}
	}
	end.Dst = &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	others := end
	others.Type, others.Dst = unix.RTN_THROW, &net.IPNet{IP: net.IPv4bcast.To4(), Mask: net.CIDRMask(32, 32)}
	return []*netlink.Route{&others, &end}
}

// rules lead to the table of routes.
func (t Tunnel) rules() []*netlink.Rule {
	rule := func() *netlink.Rule {
		r := netlink.NewRule()
		r.Family, r.Table, r.Priority = familyNumber(t.Family), t.Routes, t.Routes
		return r
	}
	over, to := rule(), rule()
	over.OifName = t.Name
	to.Dst = &net.IPNet{IP: t.Aliases.Addr().AsSlice(), Mask: net.CIDRMask(t.Aliases.Bits(), t.Aliases.Addr().BitLen())}
	return []*netlink.Rule{over, to}
}

// setPeers says which node has which MAC address, and where that is.
func (t Tunnels) setPeers(want Tunnel, link int) error {
	var errs []error
	for _, of := range []struct{ family, state, flags int }{
		{familyNumber(want.Family), netlink.NUD_PERMANENT, 0},
		{unix.AF_BRIDGE, netlink.NUD_PERMANENT | netlink.NUD_NOARP, netlink.NTF_SELF},
	} {
		list, err := complete(func() ([]netlink.Neigh, error) { return t.handle.NeighList(link, of.family) })
		if err != nil {
			return fmt.Errorf("list the neighbors: %w", err)
		}
		type entry struct {
			mac  [6]byte
			node netip.Addr
		}
		missing := map[entry]bool{}
		for _, node := range want.Peers {
			missing[entry{want.MAC(node), node}] = true
			if alias := want.Alias(node); alias.IsValid() && of.family != unix.AF_BRIDGE {
				missing[entry{want.MAC(node), alias}] = true
			}
		}
		var extra []netlink.Neigh
		for _, n := range list {
			node, _ := netip.AddrFromSlice(n.IP)
			var mac [6]byte
			copy(mac[:], n.HardwareAddr)
			e := entry{mac, node.Unmap()}
			switch {
			case n.LinkIndex != link || n.IP.IsMulticast() && of.family != unix.AF_BRIDGE:
			case missing[e] && n.State&netlink.NUD_PERMANENT != 0:
				delete(missing, e)
			default:
				extra = append(extra, n)
			}
		}
		for e := range missing {
			err := t.handle.NeighSet(&netlink.Neigh{LinkIndex: link, Family: of.family, State: of.state, Flags: of.flags,
				IP: e.node.AsSlice(), HardwareAddr: e.mac[:]})
			if err != nil {
				errs = append(errs, fmt.Errorf("add neighbor %s: %w", e.node, err))
			}
		}
		for _, n := range extra {
			n.Flags = of.flags
			if err := t.handle.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove neighbor %s: %w", n.IP, err))
			}
		}
	}
	return errors.Join(errs...)
}
