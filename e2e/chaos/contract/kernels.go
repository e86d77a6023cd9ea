package contract

import (
	"fmt"
	"maps"
	"slices"
)

// The clauses about what the nodes' kernels hold.

// announcersHaveTheRules: where an address is answered for on the LAN, or where the router leads it, the kernel leads
// each of its ports to endpoints.
func announcersHaveTheRules(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		for _, a := range svc.Addresses {
			for _, node := range slices.Concat(s.Heard[a], s.Routed[a]) {
				k, seen := s.Kernels[node]
				for _, p := range svc.Ports(a) {
					if seen && svc.HasReady() && !k.Delivered[p] {
						bad = append(bad, fmt.Sprintf("%s announces %s of %s, and has no rules for %s port %d", node, a, svc.Name,
							p.Network, p.To.Port()))
					}
				}
			}
		}
	}
	return bad
}

// rulesGoWithTheirService: rules and elements of sets are about ports that a Service has.
func rulesGoWithTheirService(s Snapshot) (bad []string) {
	there := map[Port]bool{}
	for _, svc := range s.Services {
		for _, a := range svc.Addresses {
			there[addressOnly(a)] = true
			for _, p := range svc.Ports(a) {
				there[p] = true
			}
		}
	}
	for _, node := range slices.Sorted(maps.Keys(s.Kernels)) {
		told := map[Port]bool{}
		for _, p := range s.Kernels[node].Named {
			if !there[p] && !slices.Contains(s.ClusterIPs, p.To.Addr()) && !told[p] {
				told[p] = true
				bad = append(bad, fmt.Sprintf("%s has rules for %s %s, which no Service has", node, p.Network, p.To))
			}
		}
	}
	return bad
}

// flowsEndWithTheirBackend: conntrack knows no flow over UDP to a Service that a pod answers that is gone.
func flowsEndWithTheirBackend(s Snapshot) (bad []string) {
	for _, node := range slices.Sorted(maps.Keys(s.Kernels)) {
		for _, f := range s.Kernels[node].UDP {
			for _, svc := range s.Services {
				if slices.Contains(svc.Ports(f.To.Addr()), Port{"udp", f.To}) && slices.Contains(svc.Addresses, f.To.Addr()) &&
					f.Backend != f.To.Addr() && !slices.Contains(svc.Endpoints, f.Backend) {
					bad = append(bad, fmt.Sprintf("%s knows a flow to %s of %s, which leads to %s, where no pod is", node, f.To,
						svc.Name, f.Backend))
				}
			}
		}
	}
	return bad
}

// rulesOutliveAnnouncements: what no longer exists is withdrawn before it is unprogrammed.
func rulesOutliveAnnouncements(e Evidence) (bad []Violation) {
	for _, s := range e.Spans {
		if len(s.Bare) > 0 {
			bad = append(bad, Violation{At: s.Ended, Text: fmt.Sprintf("%s: %v announced it after their rules were gone",
				s.Event, s.Bare)})
		}
	}
	return bad
}
