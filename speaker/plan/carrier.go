package plan

import "github.com/landfall-lb/landfall/internal/lb"

// Carriers returns the interfaces with a carrier on which a node may answer, and whether it has any
// such interface, with a carrier or without: those that an advertisement names, and those with an
// address that are neither excluded by a shell pattern nor the port of another. Those of pods have
// no address on the node, and come and go with them.
func Carriers(exclude []string, ads map[string]lb.L2Advertisement, interfaces []lb.Interface) (up []string, some bool) {
	named := map[string]bool{}
	for _, ad := range ads {
		for _, name := range ad.Interfaces {
			named[name] = true
		}
	}
	for _, i := range interfaces {
		own := !i.Enslaved && len(i.Addresses) > 0 && !matchesAny(exclude, i.Name)
		if len(i.MAC) == 0 || i.Loopback || i.NoARP || !own && !named[i.Name] {
			continue
		}
		some = true
		if i.Up {
			up = append(up, i.Name)
		}
	}
	return up, some
}
