package plan

import (
	"fmt"
	"maps"
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

// TooLarge says that a Service needs more than one Service may, or than its namespace has room for.
type TooLarge struct {
	Elements, Limit int
	// Of is what is counted; "" for elements of the kernel's sets.
	Of string
	// Together is set if the limit is one for all Services of a namespace.
	Together bool
	// Slices is set if there are more EndpointSlices than the limit; how many more, nobody counts.
	Slices bool
}

// Error implements error.
func (e TooLarge) Error() string {
	if e.Slices {
		return fmt.Sprintf("it has more than the %d EndpointSlices that one Service may have; put more endpoints into each, "+
			"the API server takes 1000; until it fits, it has no other addresses, ports and endpoints than before", e.Limit)
	}
	of := e.Of
	if of == "" {
		of = "elements of the kernel's sets"
	}
	if e.Together {
		return fmt.Sprintf("its ports, addresses, endpoints and source ranges need up to %d %s, and with those of its "+
			"namespace more than the %d that all Services of one namespace may have together; until there is room, it has no "+
			"other addresses, ports and endpoints than before", e.Elements, of, e.Limit)
	}
	return fmt.Sprintf("its ports, addresses, endpoints and source ranges need up to %d %s, "+
		"more than the %d that one Service may have; until it fits, it has no other addresses, ports and endpoints than "+
		"before", e.Elements, of, e.Limit)
}

// Beyond one of these a Service takes some 0.5 ms to plan, and up to 32 times that, so that others should not wait for
// several of them.
const (
	largeDeliveries = maxDeliveries / 32
	largeFrontends  = maxFrontends / 32
	largeSources    = maxSources / 4
	// largeSlots are of tables, which take the kernel's writer some milliseconds to fill and compare.
	largeSlots = MaxSlots / 16
)

// IsLarge reports whether a Service with these endpoints takes long to plan or to write. scheduler is that of Services
// that do not ask for one.
func IsLarge(svc lb.Service, endpoints []lb.Slice, scheduler Scheduler) bool {
	addresses := 2*len(svc.ClusterIPs) + len(svc.ExternalIPs) + len(svc.Ingress) // with node ports
	return deliveries(endpoints) > largeDeliveries || len(svc.Ports)*addresses > largeFrontends ||
		len(svc.SourceRanges) > largeSources ||
		slotsOf(svc, endpoints, schedulerFor(svc, Node{Scheduler: scheduler})) > largeSlots
}

// slotsOf returns about how many slots the tables of a Service may have once all its endpoints are ready.
func slotsOf(svc lb.Service, endpoints []lb.Slice, scheduler Scheduler) int {
	hasTables := scheduler.Hashes() || scheduler.Turns() || scheduler.Counts()
	if !hasTables && svc.AffinityTimeout == 0 { // whose clients' addresses choose if they cannot be remembered
		return 0
	}
	n, lists, weight, of := 0, 1, uint8(1), map[lb.Family]int{}
	for _, slice := range endpoints {
		of[slice.Family] += len(slice.Endpoints) // each family has tables of its own
		n, weight = max(n, of[slice.Family]), max(weight, slice.Weight)
		if !slices.Equal(slice.Ports, endpoints[0].Ports) {
			lists = len(svc.Ports)
		}
	}
	for _, w := range svc.Weights {
		weight = max(weight, w.Share)
	}
	if n < 2 {
		return 0
	}
	size := SlotSize(n)
	switch {
	case scheduler.Counts():
		size = CountedSize(n)
	case scheduler.Weighted():
		size = SlotSize(n * int(weight))
	}
	if svc.Forwarding != "" {
		size = 2 * max(size, SlotSizes[1])
	}
	return lists * int(size)
}

// IsLarge reports whether a plan has so many frontends that it takes long to replace it, or to take it back.
func (s Service) IsLarge() bool {
	n := 0
	for i := range s.Ports {
		if n += len(s.Ports[i].Frontends); n > largeFrontends {
			return true
		}
	}
	return false
}

// deliveries returns how many pairs of port and endpoint there are. An endpoint without a port counts as one, as it is
// looked at all the same.
func deliveries(endpoints []lb.Slice) int {
	n := 0
	for _, slice := range endpoints {
		n += max(len(slice.Ports), 1) * len(slice.Endpoints)
	}
	return n
}

// Crowded reports whether a Service with these endpoints is too large by their number alone, or by that of its slices.
// Nobody should go through them: there may be any number.
func Crowded(endpoints []lb.Slice) bool {
	return more(endpoints) || deliveries(endpoints) > maxDeliveries
}

// more reports whether a Service has more slices than it may.
func more(endpoints []lb.Slice) bool { return len(endpoints) > 0 && endpoints[len(endpoints)-1].More }

// bound leaves out of a Service what is beyond the bounds, in this order: source ranges, VIPs and
// external IPs, each those that are named last. It returns what it leaves out, or why the Service is
// not planned at all.
func bound(svc *lb.Service, endpoints []lb.Slice) (denied []Denied, excess *TooLarge) {
	leftOut := func(kind Kind, field string, n, of int) {
		denied = append(denied, Denied{Kind: kind, Refusal: *lb.Refuse(lb.ReasonTooLarge,
			"%s: the last %d of %d are left out; a Service has at most %d source ranges, %d VIPs, and %d ports times "+
				"addresses", field, n, of, maxSources, maxVIPs, maxFrontends)})
	}
	frontends := 2 * (len(svc.Ports) + svc.Unkept.Ports) * len(svc.ClusterIPs) // with node ports
	if more(endpoints) {
		return nil, &TooLarge{Limit: lb.MaxSlices, Slices: true}
	}
	if n := deliveries(endpoints); n > maxDeliveries {
		return nil, &TooLarge{Elements: n, Limit: maxDeliveries, Of: "pairs of port and endpoint"}
	}
	if frontends > maxFrontends {
		return nil, &TooLarge{Elements: frontends, Limit: maxFrontends, Of: "frontends"}
	}
	if n := len(svc.SourceRanges) + svc.Unkept.SourceRanges; n > maxSources {
		svc.SourceRanges = firstSources(svc.SourceRanges)
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
	if n, fit := len(svc.ExternalIPs)+svc.Unkept.ExternalIPs, fitting(maxFrontends); n > fit {
		svc.ExternalIPs = svc.ExternalIPs[:min(fit, len(svc.ExternalIPs))]
		leftOut(ExternalIP, "spec.externalIPs", n-fit, n)
	}
	return denied, nil
}

// firstSources returns the first source ranges. If none of a family is among them, it adds one that admits nobody:
// without any, everybody would be admitted.
func firstSources(all []netip.Prefix) []netip.Prefix {
	first := all[:min(maxSources, len(all)):min(maxSources, len(all))]
	for _, nobody := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		isOf := func(r netip.Prefix) bool { return r.Addr().Is4() == nobody.Is4() }
		if slices.ContainsFunc(all[len(first):], isOf) && !slices.ContainsFunc(first, isOf) {
			first = append(first, netip.PrefixFrom(nobody, nobody.BitLen()))
		}
	}
	return first
}

// Frozen returns the plan of svc, which is too large as now, cut down to what s has, the plan of when
// it was not: its ports, its frontends, as another Service may have got what it no longer asks for,
// and the addresses of its endpoints. Of these it follows all that svc and its slices say: source
// ranges, policies, and which endpoints are ready. Of an earlier Service with the same name nothing
// stays, and no backend if even the endpoints of before are too many by now.
func (s Service) Frozen(now Service, svc lb.Service, endpoints []lb.Slice, node Node) Service {
	if s.UID != now.UID {
		now.Ports = nil
		return now
	}
	had, families := s.had(), s.Families()
	svc.Unkept.Ports = 0
	svc.Ports = slices.DeleteFunc(slices.Clone(svc.Ports), func(p lb.ServicePort) bool {
		return !slices.ContainsFunc(families, func(f lb.Family) bool { return had.ports[portID{f, p.Name, p.Protocol}] })
	})
	svc.ClusterIPs = slices.DeleteFunc(slices.Clone(svc.ClusterIPs), func(ip netip.Addr) bool {
		return !slices.Contains(families, lb.FamilyOf(ip))
	})
	frozen := New(svc, s.Listed(endpoints), node)
	for i, p := range frozen.Ports {
		frozen.Ports[i].Frontends = slices.DeleteFunc(p.Frontends, func(f Frontend) bool {
			return !had.frontends[p.slot(f)]
		})
	}
	frozen.Ports = slices.DeleteFunc(frozen.Ports, func(p Port) bool { return len(p.Frontends) == 0 })
	frozen.VIPs, frozen.Excess, frozen.Places = now.VIPs, now.Excess, now.Places
	if frozen.HealthPort != s.HealthPort {
		frozen.HealthPort = 0
	}
	return frozen
}

// holdings are what a plan has.
type holdings struct {
	ports     map[portID]bool
	frontends map[frontendSlot]bool
	addresses map[netip.Addr]bool // of endpoints
}

type frontendSlot struct {
	Kind
	slot
}

func (p Port) slot(f Frontend) frontendSlot {
	return frontendSlot{f.Kind, slotOf(p.Protocol, f.Addr, f.Port)}
}

// Listed returns slices without endpoints at other addresses than those of the plan, and without those
// that have none left. It returns none if even those are too many.
func (s Service) Listed(endpoints []lb.Slice) []lb.Slice {
	had := s.Endpoints()
	if len(had) == 0 {
		return nil
	}
	var listed []lb.Slice
	n := 0
	for _, slice := range endpoints {
		var left []lb.Endpoint
		for _, ep := range slice.Endpoints {
			if had[ep.Addr] {
				left = append(left, ep)
			}
		}
		if slice.Endpoints = left; len(left) == 0 {
			continue
		}
		listed = append(listed, slice)
		if n += deliveries(listed[len(listed)-1:]); n > maxDeliveries {
			return nil
		}
	}
	return listed
}

func (s Service) had() holdings {
	h := holdings{map[portID]bool{}, map[frontendSlot]bool{}, s.Endpoints()}
	for _, p := range s.Ports {
		h.ports[p.id()] = true
		for _, f := range p.Frontends {
			h.frontends[p.slot(f)] = true
		}
	}
	return h
}

// Endpoints returns the addresses of all endpoints to which the plan delivers.
func (s Service) Endpoints() map[netip.Addr]bool {
	addresses := map[netip.Addr]bool{}
	var last [2][]lb.Backend // most ports share theirs
	for _, p := range s.Ports {
		for i, list := range [][]lb.Backend{p.Backends.Cluster, p.Backends.Local} {
			if sameList(list, last[i]) {
				continue
			}
			last[i] = list
			for _, b := range list {
				addresses[b.Addr.Addr()] = true
			}
		}
	}
	return addresses
}

// Equal reports whether two plans are the same.
func (s Service) Equal(other Service) bool {
	return s.Key == other.Key && s.Age == other.Age && s.Policy == other.Policy && s.HealthPort == other.HealthPort &&
		s.Affinity == other.Affinity && s.AffinityTimeout == other.AffinityTimeout && s.Places == other.Places &&
		s.Scheduler == other.Scheduler && s.Relay == other.Relay && s.ProxyProtocol == other.ProxyProtocol &&
		s.sameDirect(other) &&
		equal(s.VIPs, other.VIPs) && equal(s.Sole, other.Sole) &&
		equal(s.Denied, other.Denied) && samePorts(s.Ports, other.Ports) &&
		maps.Equal(s.Listing, other.Listing) &&
		(s.Excess == nil) == (other.Excess == nil) && (s.Excess == nil || *s.Excess == *other.Excess)
}

// sameList reports whether two lists are one, so that there is nothing to compare.
func sameList[T any](a, b []T) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// equal reports whether two lists are the same. One that is kept is not gone through.
func equal[T comparable](a, b []T) bool {
	if len(a) != len(b) {
		return false
	}
	if sameList(a, b) {
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
	var backends sameBackends
	for i, p := range a {
		if !p.same(b[i]) || p.External != b[i].External || p.Relay != b[i].Relay || !backends.of(p, b[i]) ||
			!equal(p.Serving, b[i].Serving) || !lists.frontends(p.Frontends, b[i].Frontends) {
			return false
		}
	}
	return true
}

// sameBackends compares the backends of ports. It remembers the last lists that it found equal, as ports
// share them.
type sameBackends struct{ a, b lb.Usable }

func (l *sameBackends) of(a, b Port) bool {
	x, y := a.Backends, b.Backends
	if a.Number != b.Number || len(x.Cluster) != len(y.Cluster) || len(x.Local) != len(y.Local) {
		return false
	}
	known := sameList(x.Cluster, l.a.Cluster) && sameList(y.Cluster, l.b.Cluster) &&
		sameList(x.Local, l.a.Local) && sameList(y.Local, l.b.Local)
	if !known && (!equal(x.Cluster, y.Cluster) || !equal(x.Local, y.Local)) {
		return false
	}
	l.a, l.b = x, y
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
