package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// namedBy returns the interfaces that advertisements name.
func namedBy(ads map[string]lb.L2Advertisement) map[string]bool {
	names := map[string]bool{}
	for _, ad := range ads {
		for _, name := range ad.Interfaces {
			names[name] = true
		}
	}
	return names
}

// lasting reports whether an interface is one of the node's own, on a network: not the port of
// another, and none that comes and goes with a pod, whatever its name. A pod's has no address on
// the node, or one of its own and no network.
func lasting(i lb.Interface) bool {
	return !i.Enslaved && slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool {
		return !i.Guest || !p.Addr().IsLinkLocalUnicast() && !p.IsSingleIP()
	})
}

// mayAnswer reports whether an interface may answer for some VIP: names are those that
// advertisements name.
func mayAnswer(exclude []string, names map[string]bool, i lb.Interface) bool {
	return len(i.MAC) > 0 && !i.Loopback && !i.NoARP &&
		(names[i.Name] || lasting(i) && !matchesAny(exclude, i.Name))
}

// Carriers returns the interfaces with a carrier on which a node may answer, and whether it has any
// such interface, with a carrier or without: those that an advertisement names, and its own that
// are not excluded by a shell pattern.
func Carriers(exclude []string, ads map[string]lb.L2Advertisement, interfaces []lb.Interface) (up []string, some bool) {
	names := namedBy(ads)
	for _, i := range interfaces {
		if !mayAnswer(exclude, names, i) {
			continue
		}
		some = true
		if i.Up {
			up = append(up, i.Name)
		}
	}
	return up, some
}

// Candidates returns the interfaces that may answer for some VIP.
func Candidates(f Facts) []lb.Interface {
	names := namedBy(f.Advertisements)
	var found []lb.Interface
	for _, i := range f.Interfaces {
		if mayAnswer(f.Exclude, names, i) {
			found = append(found, i)
		}
	}
	return found
}
