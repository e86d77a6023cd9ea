package plan

import (
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Withdrawn returns the ports of before with the frontends of those VIPs that before holds and now
// does not, marked as lingering.
func Withdrawn(before, now Service) []Port {
	var ports []Port
	for _, p := range before.Ports {
		p.Frontends = vipFrontends(p, func(f Frontend) bool { return !f.Lingering && !slices.Contains(now.VIPs, f.Addr) })
		if len(p.Frontends) > 0 {
			ports = append(ports, p)
		}
	}
	return ports
}

func vipFrontends(p Port, want func(Frontend) bool) []Frontend {
	var frontends []Frontend
	for _, f := range p.Frontends {
		if f.Kind == LoadBalancer && want(f) {
			f.Lingering = true
			frontends = append(frontends, f)
		}
	}
	return frontends
}

// WithLingering returns the plan with lingering frontends added to it. Those of a port that the
// Service still has follow its present backends; a port that is gone keeps its last ones. What the
// Service serves by itself again does not linger.
func (s Service) WithLingering(ports []Port) Service {
	if len(ports) == 0 {
		return s
	}
	s.Ports = slices.Clone(s.Ports)
	served, at := map[slot]bool{}, map[portID]int{}
	for i, p := range s.Ports {
		at[p.id()] = i
		for _, f := range p.Frontends {
			if !f.Lingering {
				served[slotOf(p.Protocol, f.Addr, f.Port)] = true
			}
		}
	}
	for _, p := range ports {
		p.Frontends = slices.DeleteFunc(slices.Clone(p.Frontends),
			func(f Frontend) bool { return served[slotOf(p.Protocol, f.Addr, f.Port)] })
		if len(p.Frontends) == 0 {
			continue
		}
		i, ok := at[p.id()]
		if !ok {
			at[p.id()] = len(s.Ports)
			s.Ports = append(s.Ports, p)
			continue
		}
		live := &s.Ports[i]
		for i := range p.Frontends {
			p.Frontends[i].Action = action(live.Backends, live.External)
		}
		live.Frontends = append(slices.Clip(live.Frontends), p.Frontends...)
	}
	return s
}

// Serves reports whether the plan has a frontend that is not lingering at this address and port.
func (s Service) Serves(protocol lb.Protocol, addr netip.Addr, port uint16) bool {
	return slices.ContainsFunc(s.Ports, func(p Port) bool {
		return p.Protocol == protocol && slices.ContainsFunc(p.Frontends, func(f Frontend) bool {
			return !f.Lingering && f.Addr == addr && f.Port == port
		})
	})
}

// Lingering are frontends of a Service that were withdrawn together, and until when they linger.
type Lingering struct {
	Key   lb.Key
	Ports []Port
	Until time.Time
}

// frontends returns the address and port of each frontend that lingers.
func (l *Lingering) frontends() iter.Seq[slot] {
	return func(yield func(slot) bool) {
		for _, p := range l.Ports {
			for _, f := range p.Frontends {
				if !yield(slotOf(p.Protocol, f.Addr, f.Port)) {
					return
				}
			}
		}
	}
}

// LingeringAt is what lingers, by address and port, so that Claims.Taken need not go through all that lingers.
type LingeringAt map[slot][]*Lingering

// Add adds what lingers.
func (at LingeringAt) Add(l *Lingering) {
	alone := []*Lingering{l} // for all frontends where nothing else lingers
	for f := range l.frontends() {
		if others := at[f]; len(others) == 0 {
			at[f] = alone
		} else if !slices.Contains(others, l) {
			at[f] = append(slices.Clone(others), l)
		}
	}
}

// Remove removes what was added and has not changed since.
func (at LingeringAt) Remove(l *Lingering) {
	for f := range l.frontends() {
		others := at[f]
		i := slices.Index(others, l)
		switch {
		case i >= 0 && len(others) == 1:
			delete(at, f)
		case i >= 0:
			at[f] = slices.Concat(others[:i], others[i+1:])
		}
	}
}

// Yield returns the lingering ports without the frontends that some Service serves now.
func Yield(ports []Port, serves func(protocol lb.Protocol, addr netip.Addr, port uint16) bool) []Port {
	var left []Port
	for _, p := range ports {
		p.Frontends = slices.DeleteFunc(slices.Clone(p.Frontends), func(f Frontend) bool {
			return serves(p.Protocol, f.Addr, f.Port)
		})
		if len(p.Frontends) > 0 {
			left = append(left, p)
		}
	}
	return left
}

// Tightened reports whether the external policy has become Local, so that nodes without an endpoint
// of the Service no longer deliver what routers may still send to them.
func Tightened(before, now Service) bool {
	return before.Policy == lb.Cluster && now.Policy == lb.Local
}

// AsCluster returns the plan with policy Cluster for the ports that the node would drop by policy
// Local. What Report says of it is the same: the node has no endpoint of its own.
func (s Service) AsCluster() Service {
	drops := func(f Frontend) bool { return f.Kind != ClusterIP && (f.Action == Drop || f.Action == Pass) }
	s.Ports = slices.Clone(s.Ports)
	for i := range s.Ports {
		p := &s.Ports[i]
		if !slices.ContainsFunc(p.Frontends, drops) {
			continue
		}
		p.External, p.Frontends = lb.Cluster, slices.Clone(p.Frontends)
		for j, f := range p.Frontends {
			if drops(f) && len(p.Backends.Cluster) > 0 {
				p.Frontends[j].Action = ToCluster
			}
		}
	}
	return s
}
