package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/nftables"
)

// cutFlowsOfRelay cuts the flows of UDP that the rules of nftables mode have led to a relay that is gone. They
// would lead to its closed port for as long as their clients send, also without the rules. If nothing is relayed,
// it lists no flow, else it lists all once.
func cutFlowsOfRelay(rules *nftables.Netlink) error {
	relayed, err := nftables.EndRelay(rules)
	if len(relayed) == 0 {
		return err
	}
	own, ownErr := net.InterfaceAddrs()
	table, tableErr := conntrack.Open()
	if err := errors.Join(err, ownErr, tableErr); err != nil {
		return err
	}
	defer table.Close()
	if _, err := table.Delete(conntrack.About{}, leadsNowhere(relayed, own, isFree)); err != nil {
		return fmt.Errorf("cut flows to a relay that is gone: %w", err)
	}
	return nil
}

// leadsNowhere returns whether a flow is of UDP to a relayed frontend, and led to a free port of the node itself:
// only a relay can have been there, as no frontend with an endpoint at the node's own address is relayed.
func leadsNowhere(relayed []netip.AddrPort, own []net.Addr, free func(netip.AddrPort) bool) func(conntrack.Flow) bool {
	frontends, local, known := map[netip.AddrPort]bool{}, map[netip.Addr]bool{}, map[netip.AddrPort]bool{}
	for _, f := range relayed {
		frontends[f] = true
	}
	for _, a := range own {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			local[prefix.Addr()] = true
		}
	}
	return func(f conntrack.Flow) bool {
		if f.Protocol != unix.IPPROTO_UDP || !frontends[f.To] || !local[f.From.Addr()] {
			return false
		}
		is, ok := known[f.From]
		if !ok {
			is = free(f.From)
			known[f.From] = is
		}
		return is
	}
}

// isFree reports whether no program has a port of UDP open at an address of the node, as far as the kernel tells.
func isFree(at netip.AddrPort) bool {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return false
	}
	conn.Close()
	return true
}
