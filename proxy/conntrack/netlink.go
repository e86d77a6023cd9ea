package conntrack

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Netlink is the kernel's own table.
type Netlink struct{ Handle *netlink.Handle }

var _ Table = Netlink{}

// DeleteUDP implements Table. The kernel deletes by the flow's identity, so a flow that came anew in between is not hit.
func (n Netlink) DeleteUDP(family lb.Family, gone func(Flow) bool) (int, error) {
	inet := netlink.InetFamily(unix.AF_INET)
	if family == lb.IPv6 {
		inet = unix.AF_INET6
	}
	deleted, err := n.Handle.ConntrackDeleteFilters(netlink.ConntrackTable, inet, filter(gone))
	return int(deleted), err
}

type filter func(Flow) bool

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (f filter) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	return flow.Forward.Protocol == unix.IPPROTO_UDP && f(Flow{
		To:   addrPort(flow.Forward.DstIP, flow.Forward.DstPort),
		From: addrPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort),
	})
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr.Unmap(), port)
}
