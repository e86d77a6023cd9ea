package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// SameRules reports whether two plans ask the same of the kernel in one address family.
func SameRules(a, b Service, family lb.Family) bool {
	portsA, portsB := a.Only(family).Ports, b.Only(family).Ports
	return len(portsA) == 0 && len(portsB) == 0 || a.HealthPort == b.HealthPort &&
		a.AffinityTimeout == b.AffinityTimeout && a.Places == b.Places && a.Scheduler == b.Scheduler && a.Relay == b.Relay &&
		a.ProxyProtocol == b.ProxyProtocol && a.sameDirect(b) && samePorts(portsA, portsB) &&
		slices.Equal(a.SoleOf(family), b.SoleOf(family))
}

// Within returns the plan with only those frontends, addresses and health check node port that
// another plan of the Service has too.
func (s Service) Within(other Service) Service {
	type wish struct {
		kind Kind
		slot
	}
	has := map[wish]bool{}
	for _, p := range other.Ports {
		for _, f := range p.Frontends {
			has[wish{f.Kind, slotOf(p.Protocol, f.Addr, f.Port)}] = true
		}
	}
	ports := s.Ports
	s.Ports = nil
	for _, p := range ports {
		p.Frontends = slices.DeleteFunc(slices.Clone(p.Frontends), func(f Frontend) bool {
			return !has[wish{f.Kind, slotOf(p.Protocol, f.Addr, f.Port)}]
		})
		if len(p.Frontends) > 0 {
			s.Ports = append(s.Ports, p)
		}
	}
	gone := func(vip netip.Addr) bool { return !slices.Contains(other.Sole, vip) }
	s.Sole = slices.DeleteFunc(slices.Clone(s.Sole), gone)
	if s.HealthPort != other.HealthPort {
		s.HealthPort = 0
	}
	return s
}
