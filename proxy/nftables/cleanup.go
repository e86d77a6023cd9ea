package nftables

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Cleanup removes our tables of both families, and nothing else. Another proxy on the node, which
// serves the same Services, loses no connection by it.
func Cleanup(n *Netlink) error { return nft.Remove(n.commands, TableName) }

// EndRelay has the rules of both families lead to no relay, and returns the frontends of UDP that they have led to one.
// It returns after the last packet that they lead there.
func EndRelay(n *Netlink) (relayed []netip.AddrPort, err error) {
	lease := Lease{n.commands}
	var errs []error
	for _, way := range plan.RelayWays {
		errs = append(errs, lease.End(way))
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		found, err := netlinkKernel{family, n.commands}.relayedUDP()
		if err != nil {
			errs = append(errs, fmt.Errorf("list what is relayed of %s: %w", family, err))
		}
		relayed = append(relayed, found...)
	}
	if len(relayed) > 0 {
		nfnetlink.WaitForPackets()
	}
	return relayed, errors.Join(errs...)
}

// relayedUDP returns the frontends of UDP in setRelayed; none without the table.
func (k netlinkKernel) relayedUDP() (all []netip.AddrPort, err error) {
	err = nfnetlink.Complete(func() error {
		all = nil
		sets, err := k.listing().Sets()
		if _, ok := sets[setNames[setRelayed]]; err != nil || !ok {
			return err
		}
		return k.listing().Elements(setNames[setRelayed], func(e nft.Element) {
			f, err := decode(element{set: setRelayed}, k.family, e)
			if err == nil && f.protocol == udp {
				all = append(all, netip.AddrPortFrom(f.addr.ip(k.family), f.port))
			}
		})
	})
	if errors.Is(err, unix.ENOENT) { // the table is not there, or no longer
		return nil, nil
	}
	return all, err
}
