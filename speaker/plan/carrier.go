package plan

import "github.com/landfall-lb/landfall/internal/lb"

// Carriers returns the interfaces with a carrier on which a node may answer: those that are not
// excluded by a shell pattern, or that an advertisement names.
func Carriers(exclude []string, ads map[string]lb.L2Advertisement, interfaces []lb.Interface) []string {
	named := map[string]bool{}
	for _, ad := range ads {
		for _, name := range ad.Interfaces {
			named[name] = true
		}
	}
	var names []string
	for _, i := range interfaces {
		if i.Up && len(i.MAC) > 0 && !i.Loopback && !i.NoARP && (named[i.Name] || !matchesAny(exclude, i.Name)) {
			names = append(names, i.Name)
		}
	}
	return names
}
