package links

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Neighbor is what the kernel knows of an address on a network of the node.
type Neighbor struct {
	// MAC is the link-layer address, if Found is set.
	MAC [6]byte
	// Link is the index of the interface that leads there.
	Link int
	// Found is set if the neighbor has answered, Failed if it answers no more.
	Found, Failed bool
	// Routed is set, with only Link and MTU beside it, for an address behind a router. MTU is that of
	// the interface.
	Routed bool
	MTU    int
}

// Neighbors is the way to the kernel's table of neighbors (ARP, RFC 826; NDP, RFC 4861). It is not
// safe for concurrent use.
type Neighbors struct {
	handle *netlink.Handle
	// silent are the links that had no carrier when they were last looked at, for each family: their
	// neighbors are looked at apart.
	silent map[int]map[int]bool
}

// OpenNeighbors opens the way to the table of the calling thread's network namespace.
func OpenNeighbors() (*Neighbors, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink for neighbors: %w", err)
	}
	return &Neighbors{handle, map[int]map[int]bool{unix.AF_INET: {}, unix.AF_INET6: {}}}, nil
}

// Close closes it.
func (n *Neighbors) Close() { n.handle.Close() }

// States of an entry (linux/neighbour.h).
const (
	hasAddress = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
	isFresh    = netlink.NUD_REACHABLE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
)

// Look returns what the kernel knows of addresses of a family, and has it ask for those of which it
// knows nothing fresh. It leaves out the addresses that it knows nothing of. Behind a link that has
// no carrier, or has just got one again, nobody counts as failed: the link was away, not the
// neighbor.
func (n *Neighbors) Look(family lb.Family, addrs []netip.Addr) (map[netip.Addr]Neighbor, error) {
	number := familyNumber(family)
	list, err := complete(func() ([]netlink.Neigh, error) { return n.handle.NeighList(0, number) })
	if err != nil {
		return nil, fmt.Errorf("list neighbors: %w", err)
	}
	all, silent := map[netip.Addr]Neighbor{}, n.silent[number]
	carriers := map[int]bool{}
	for _, addr := range addrs {
		routes, err := n.handle.RouteGet(addr.AsSlice())
		if err != nil || len(routes) != 1 || routes[0].Type != unix.RTN_UNICAST {
			continue
		}
		link := routes[0].LinkIndex
		if routes[0].Gw != nil || routes[0].Via != nil {
			if l, err := n.handle.LinkByIndex(link); err == nil {
				all[addr] = Neighbor{Link: link, Routed: true, MTU: l.Attrs().MTU}
			}
			continue
		}
		if _, looked := carriers[link]; !looked {
			carriers[link] = n.carrier(link)
		}
		if !carriers[link] {
			silent[link] = true
			continue
		}
		state := netlink.NUD_NONE
		if i := slices.IndexFunc(list, func(entry netlink.Neigh) bool {
			return entry.LinkIndex == link && entry.IP.Equal(net.IP(addr.AsSlice()))
		}); i >= 0 {
			state = list[i].State
			found := neighbor(list[i])
			if found.Link = link; !found.Failed || !silent[link] {
				all[addr] = found
			}
		}
		if state&isFresh != 0 {
			continue
		}
		if err := n.ask(link, number, addr); err != nil {
			return all, fmt.Errorf("ask for %s: %w", addr, err)
		}
	}
	for link, carrier := range carriers {
		if carrier {
			delete(silent, link)
		}
	}
	return all, nil
}

// carrier reports whether a link has a carrier, as far as can be known.
func (n *Neighbors) carrier(index int) bool {
	link, err := n.handle.LinkByIndex(index)
	return err != nil || link.Attrs().RawFlags&unix.IFF_RUNNING != 0
}

func neighbor(entry netlink.Neigh) Neighbor {
	found := Neighbor{Failed: entry.State&netlink.NUD_FAILED != 0}
	if len(entry.HardwareAddr) == len(found.MAC) && entry.State&hasAddress != 0 {
		found.MAC, found.Found = [6]byte(entry.HardwareAddr), true
	}
	return found
}

// ask has the kernel act as if it were to send a packet: it asks for an address that it does not
// know, and probes one that is stale. The MAC address of zeros has to be there, and is not looked
// at.
func (n *Neighbors) ask(link, family int, addr netip.Addr) error {
	return n.handle.NeighSet(&netlink.Neigh{
		LinkIndex: link, Family: family, IP: addr.AsSlice(), State: netlink.NUD_NONE, Flags: netlink.NTF_USE,
		HardwareAddr: make(net.HardwareAddr, len(Neighbor{}.MAC)),
	})
}

// Name returns the name of an interface. The error is fs.ErrNotExist if there is none.
func (n *Neighbors) Name(link int) (string, error) {
	l, err := n.handle.LinkByIndex(link)
	if errors.Is(err, unix.ENODEV) || errors.As(err, &netlink.LinkNotFoundError{}) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return "", fmt.Errorf("find interface %d: %w", link, err)
	}
	return l.Attrs().Name, nil
}

// Uplink returns the interface over which packets to the rest of the world leave, and 0 if there is
// no default route in IPv4.
func (n *Neighbors) Uplink() int {
	nowhere := net.IPv4(192, 0, 2, 1) // of no network (RFC 5737)
	routes, err := n.handle.RouteGet(nowhere)
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return 0
	}
	return routes[0].LinkIndex
}
