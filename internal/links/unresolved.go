package links

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Unresolved is a neighbor that the kernel has asked for without an answer so far.
type Unresolved struct {
	Addr netip.Addr
	Link int // index of the interface
	// Failed is set if the kernel has given up. It asks anew for the next packet.
	Failed bool
}

// Unresolved returns the neighbors of both families whose link-layer address the kernel does not
// know, though it has asked or is asking for it.
func (n *Neighbors) Unresolved() (all []Unresolved, err error) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := complete(func() ([]netlink.Neigh, error) { return n.handle.NeighList(0, family) })
		if err != nil {
			return nil, fmt.Errorf("list neighbors: %w", err)
		}
		for _, entry := range list {
			addr, ok := netip.AddrFromSlice(entry.IP)
			if ok && entry.State&(netlink.NUD_INCOMPLETE|netlink.NUD_FAILED) != 0 {
				all = append(all, Unresolved{addr.Unmap(), entry.LinkIndex, entry.State&netlink.NUD_FAILED != 0})
			}
		}
	}
	return all, nil
}

// Renew has the kernel ask for a neighbor at once and from the beginning, however often it has asked
// before. Packets that wait for the answer go on waiting: an entry that is deleted, or that fails,
// drops them, and their senders learn that the host is unreachable.
func (n *Neighbors) Renew(u Unresolved) error {
	family := familyNumber(lb.FamilyOf(u.Addr))
	err := n.handle.NeighSet(&netlink.Neigh{
		LinkIndex: u.Link, Family: family, IP: u.Addr.AsSlice(), State: netlink.NUD_NONE,
		HardwareAddr: make(net.HardwareAddr, len(Neighbor{}.MAC)),
	})
	if err == nil {
		err = n.ask(u.Link, family, u.Addr)
	}
	if err != nil {
		return fmt.Errorf("ask for %s anew: %w", u.Addr, err)
	}
	return nil
}
