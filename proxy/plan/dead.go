package plan

import "github.com/landfall-lb/landfall/internal/lb"

// Without returns the slices without the endpoints on dead nodes. A family of a Service keeps all
// of its endpoints if none would be left.
func Without(all []lb.Slice, dead map[string]bool) []lb.Slice {
	if len(dead) == 0 {
		return all
	}
	some, dropped := map[lb.Family]bool{}, map[lb.Family]bool{}
	for _, slice := range all {
		for _, ep := range slice.Endpoints {
			if dead[ep.Node] {
				dropped[slice.Family] = true
			} else if ep.Ready || ep.Serving && ep.Terminating {
				some[slice.Family] = true
			}
		}
	}
	left := make([]lb.Slice, 0, len(all))
	for _, slice := range all {
		if dropped[slice.Family] && some[slice.Family] {
			var endpoints []lb.Endpoint
			for _, ep := range slice.Endpoints {
				if !dead[ep.Node] {
					endpoints = append(endpoints, ep)
				}
			}
			slice.Endpoints = endpoints
		}
		left = append(left, slice)
	}
	return left
}
