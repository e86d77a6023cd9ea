package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What one Service may cost. Whatever is beyond is said: see Service.Excess and Service.Denied.
const (
	// maxFrontends is how many frontends a Service has at most: its ports times its addresses.
	maxFrontends = 1 << 14
	// maxDeliveries is how many pairs of port and endpoint a Service has at most.
	maxDeliveries = 1 << 17
	// maxVIPs is how many VIPs a Service has at most. The controller assigns 32.
	maxVIPs = 64
	// maxSources is how many source ranges a Service has at most.
	maxSources = 10_000
)

// TooLarge says that a Service needs more than one Service may.
type TooLarge struct {
	Elements, Limit int
	// Of is what is counted; "" for elements of the kernel's sets.
	Of string
}

// Error implements error.
func (e TooLarge) Error() string {
	of := e.Of
	if of == "" {
		of = "elements of the kernel's sets"
	}
	return fmt.Sprintf("its ports, addresses, endpoints and source ranges need up to %d %s, "+
		"more than the %d that one Service may have; what was programmed before stays", e.Elements, of, e.Limit)
}

// IsLarge reports whether a Service with these endpoints takes long enough to plan that others should
// not wait for several of them: some 0.1 ms for each 1,000 pairs of port and endpoint.
func IsLarge(endpoints []lb.Slice) bool { return deliveries(endpoints) > maxDeliveries/32 }

// deliveries returns how many pairs of port and endpoint there are.
func deliveries(endpoints []lb.Slice) int {
	n := 0
	for _, slice := range endpoints {
		n += len(slice.Ports) * len(slice.Endpoints)
	}
	return n
}

// bound leaves out of a Service what is beyond the bounds, in this order: source ranges, VIPs and
// external IPs, each those that are named last. It returns what it leaves out, or why the Service is
// not planned at all.
func bound(svc *lb.Service, endpoints []lb.Slice) (denied []Denied, excess *TooLarge) {
	leftOut := func(kind Kind, field string, n, of int) {
		denied = append(denied, Denied{Kind: kind, Refusal: *lb.Refuse(lb.ReasonTooLarge,
			"%s: the last %d of %d are left out; a Service has at most %d source ranges, %d VIPs, and %d ports times "+
				"addresses", field, n, of, maxSources, maxVIPs, maxFrontends)})
	}
	frontends := 2 * len(svc.Ports) * len(svc.ClusterIPs) // with node ports
	if n := deliveries(endpoints); n > maxDeliveries {
		return nil, &TooLarge{Elements: n, Limit: maxDeliveries, Of: "pairs of port and endpoint"}
	}
	if frontends > maxFrontends {
		return nil, &TooLarge{Elements: frontends, Limit: maxFrontends, Of: "frontends"}
	}
	if n := len(svc.SourceRanges); n > maxSources {
		svc.SourceRanges = svc.SourceRanges[:maxSources]
		leftOut(LoadBalancer, "spec.loadBalancerSourceRanges", n-maxSources, n)
	}
	fitting := func(most int) int {
		if len(svc.Ports) > 0 {
			most = min(most, (maxFrontends-frontends)/len(svc.Ports))
		}
		return most
	}
	if n, fit := len(svc.Ingress), fitting(maxVIPs); n > fit {
		svc.Ingress = svc.Ingress[:fit]
		leftOut(LoadBalancer, "status.loadBalancer", n-fit, n)
	}
	frontends += len(svc.Ports) * len(svc.Ingress)
	if n, fit := len(svc.ExternalIPs), fitting(maxFrontends); n > fit {
		svc.ExternalIPs = svc.ExternalIPs[:fit]
		leftOut(ExternalIP, "spec.externalIPs", n-fit, n)
	}
	return denied, nil
}

// Frozen returns what stays of the plan s while svc, whose plan is now, is too large: the frontends
// that s has and svc still asks for, as another Service may get the others. Of an earlier Service
// with the same name nothing stays.
func (s Service) Frozen(now Service, svc lb.Service) Service {
	if s.UID != now.UID {
		return now
	}
	asked := asked(svc, now.VIPs)
	before := s.Ports
	s.Key, s.Age, s.VIPs, s.Excess, s.Ports = now.Key, now.Age, now.VIPs, now.Excess, nil
	for _, p := range before {
		gone := func(f Frontend) bool { return !asked.frontend(p.Protocol, f) }
		if slices.ContainsFunc(p.Frontends, gone) {
			p.Frontends = slices.DeleteFunc(slices.Clone(p.Frontends), gone)
		}
		if len(p.Frontends) > 0 {
			s.Ports = append(s.Ports, p)
		}
	}
	if s.HealthPort != healthPort(svc) {
		s.HealthPort = 0
	}
	return s
}

// wishes are the frontends that a Service asks for: its addresses, each at all of its ports, and its
// node ports.
type wishes struct {
	addrs map[Kind]map[netip.Addr]bool
	ports map[slot]bool // of all addresses
	nodes map[slot]bool
}

func asked(svc lb.Service, vips []netip.Addr) wishes {
	w := wishes{map[Kind]map[netip.Addr]bool{}, map[slot]bool{}, map[slot]bool{}}
	for kind, addrs := range map[Kind][]netip.Addr{ClusterIP: svc.ClusterIPs, ExternalIP: svc.ExternalIPs,
		LoadBalancer: vips} {
		w.addrs[kind] = make(map[netip.Addr]bool, len(addrs))
		for _, addr := range addrs {
			w.addrs[kind][addr] = true
		}
	}
	for _, p := range svc.Ports {
		w.ports[slotOf(p.Protocol, netip.Addr{}, p.Port)] = true
		if hasNodePorts(svc) {
			w.nodes[slotOf(p.Protocol, netip.Addr{}, p.NodePort)] = true
		}
	}
	return w
}

func (w wishes) frontend(protocol lb.Protocol, f Frontend) bool {
	at := slotOf(protocol, netip.Addr{}, f.Port)
	if f.Kind == NodePort {
		return w.nodes[at]
	}
	return w.ports[at] && w.addrs[f.Kind][f.Addr]
}

// Equal reports whether two plans are the same.
func (s Service) Equal(other Service) bool {
	return s.Key == other.Key && s.Age == other.Age && s.Policy == other.Policy && s.HealthPort == other.HealthPort &&
		s.Affinity == other.Affinity && s.AffinityTimeout == other.AffinityTimeout && s.Scheduler == other.Scheduler &&
		equal(s.VIPs, other.VIPs) && equal(s.Sole, other.Sole) &&
		equal(s.Denied, other.Denied) && samePorts(s.Ports, other.Ports) &&
		(s.Excess == nil) == (other.Excess == nil) && (s.Excess == nil || *s.Excess == *other.Excess)
}

// equal reports whether two lists are the same. One that is kept is not gone through.
func equal[T comparable](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	if len(a) == 0 || &a[0] == &b[0] {
		return true
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// samePorts reports whether two lists of ports are the same, in all that they have.
func samePorts(a, b []Port) bool {
	if len(a) != len(b) {
		return false
	}
	var lists sameSources
	for i, p := range a {
		if !p.same(b[i]) || p.External != b[i].External || !p.Backends.Equal(b[i].Backends) ||
			!equal(p.Serving, b[i].Serving) || !lists.frontends(p.Frontends, b[i].Frontends) {
			return false
		}
	}
	return true
}

// sameSources compares frontends. It remembers the last lists of sources that it found equal, as
// frontends share them.
type sameSources struct{ a, b *Sources }

func (l *sameSources) frontends(a, b []Frontend) bool {
	if len(a) != len(b) {
		return false
	}
	for i, f := range a {
		other := b[i]
		if !l.sources(f.Sources, other.Sources) {
			return false
		}
		if other.Sources = f.Sources; f != other {
			return false
		}
	}
	return true
}

func (l *sameSources) sources(a, b *Sources) bool {
	switch {
	case a == b, a == l.a && b == l.b:
		return true
	case a == nil || b == nil || !equal[netip.Prefix](a.Networks, b.Networks):
		return false
	}
	l.a, l.b = a, b
	return true
}
