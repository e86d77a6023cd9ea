package plan

import (
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// SameRules reports whether two plans ask the same of the kernel in one address family.
func SameRules(a, b Service, family lb.Family) bool {
	portsA, portsB := a.Only(family).Ports, b.Only(family).Ports
	return len(portsA) == 0 && len(portsB) == 0 || a.HealthPort == b.HealthPort &&
		a.AffinityTimeout == b.AffinityTimeout && a.Scheduler == b.Scheduler && samePorts(portsA, portsB) &&
		slices.Equal(a.SoleOf(family), b.SoleOf(family))
}
