package links

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Path is where the kernel sends packets for an address.
type Path struct {
	// Local is set for the node's own addresses.
	Local bool
	// Interface is where packets go out; that of the address itself if it is local.
	Interface string
}

// PathTo asks the routing tables in the network namespace of the calling thread; found is false if
// there is no route.
func PathTo(addr netip.Addr) (p Path, found bool, err error) {
	routes, err := netlink.RouteGet(addr.AsSlice())
	switch {
	case slices.ContainsFunc([]error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EINVAL, unix.EACCES},
		func(no error) bool { return errors.Is(err, no) }): // none, or one of type unreachable, blackhole or prohibit
		return p, false, nil
	case err != nil:
		return p, false, fmt.Errorf("route to %s: %w", addr, err)
	case len(routes) == 0:
		return p, false, nil
	}
	if routes[0].Type == unix.RTN_UNREACHABLE || routes[0].Type == unix.RTN_BLACKHOLE ||
		routes[0].Type == unix.RTN_PROHIBIT {
		return p, false, nil
	}
	p.Local = routes[0].Type == unix.RTN_LOCAL
	if link, err := netlink.LinkByIndex(routes[0].LinkIndex); err == nil {
		p.Interface = link.Attrs().Name
	}
	return p, true, nil
}

// usualRules is how many policy routing rules a node has that nobody has changed: for the tables
// local, main and default.
const usualRules = 3

// Uplink returns the interface over which packets of IPv4 leave to the rest of the world, in the
// network namespace of the calling thread; "" if there is no default route, or if policy routing
// decides by more than where they go.
func Uplink() string {
	rules, err := netlink.RuleList(unix.AF_INET)
	if err != nil || len(rules) > usualRules {
		return ""
	}
	p, found, err := PathTo(netip.AddrFrom4([4]byte{192, 0, 2, 1})) // of no network (RFC 5737)
	if err != nil || !found || p.Local {
		return ""
	}
	return p.Interface
}
