package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Path is what is known of the way behind the rules of a Service. What is not in it is reached, or unknown.
type Path struct {
	// Off says why the kernel delivers nothing at all; nil if it does.
	Off *lb.Refusal
	// Lost says for the Service's endpoints why the kernel does not reach them.
	Lost map[netip.Addr]*lb.Refusal
	// Own are the node's addresses.
	Own []netip.Addr
}

// Lost says why the kernel does not reach targets.
type Lost map[Target]*lb.Refusal

// Take takes in changes, nil for targets that are reached again, and keeps the number of targets for each reason.
func (l Lost) Take(changes Lost, count map[lb.Reason]int) {
	for t, why := range changes {
		if before := l[t]; before != nil {
			delete(l, t)
			if count[before.Reason]--; count[before.Reason] == 0 {
				delete(count, before.Reason)
			}
		}
		if why != nil {
			l[t] = why
			count[why.Reason]++
		}
	}
}

// Of returns which of the targets of one Service are lost, by their addresses.
func (l Lost) Of(targets []Target) map[netip.Addr]*lb.Refusal {
	if len(l) == 0 {
		return nil
	}
	var lost map[netip.Addr]*lb.Refusal
	for _, t := range targets {
		if why := l[t]; why != nil {
			if lost == nil {
				lost = map[netip.Addr]*lb.Refusal{}
			}
			lost[t.Addr] = why
		}
	}
	return lost
}

// refuse returns why none of the counted endpoints is reached; nil if one is, or if there are none.
func (p Path) refuse(counted counter) *lb.Refusal {
	n := len(counted.ready) + len(counted.serving)
	if n == 0 {
		return nil
	}
	if p.Off != nil {
		return p.Off
	}
	if len(p.Lost) == 0 {
		return nil
	}
	var first netip.Addr
	for _, addrs := range []map[netip.Addr]bool{counted.ready, counted.serving} {
		for addr := range addrs {
			if p.Lost[addr] == nil {
				return nil
			}
			if !first.IsValid() || addr.Less(first) {
				first = addr
			}
		}
	}
	return p.Lost[first]
}

// onNode reports whether all of the counted endpoints have an address of the node; false if there are none.
func (p Path) onNode(counted counter) bool {
	for _, addrs := range []map[netip.Addr]bool{counted.ready, counted.serving} {
		for addr := range addrs {
			if !slices.Contains(p.Own, addr) {
				return false
			}
		}
	}
	return len(counted.ready)+len(counted.serving) > 0
}

// Reaching returns the plan without the endpoints that the kernel does not reach. A set of which it
// reaches none stays whole: what is sent there is refused by the kernel or the network, and Report
// says that the node does not deliver.
func (s Service) Reaching(lost map[netip.Addr]*lb.Refusal) Service {
	if len(lost) == 0 {
		return s
	}
	away := func(b lb.Backend) bool { return lost[b.Addr.Addr()] != nil }
	return s.thinned(func(list []lb.Backend, _ lb.TrafficPolicy) []lb.Backend { return reached(list, away) })
}

// thinned returns the plan with what keep leaves of the backends for each policy. Most ports share their
// lists, of which keep is asked once.
func (s Service) thinned(keep func(list []lb.Backend, policy lb.TrafficPolicy) []lb.Backend) Service {
	cloned := false
	var of, kept [2][]lb.Backend // the last lists, and what is left of them
	for i, p := range s.Ports {
		for j, list := range [][]lb.Backend{p.Backends.Cluster, p.Backends.Local} {
			if !sameList(list, of[j]) {
				of[j], kept[j] = list, keep(list, []lb.TrafficPolicy{lb.Cluster, lb.Local}[j])
			}
		}
		cluster, local := kept[0], kept[1]
		if len(cluster) == len(p.Backends.Cluster) && len(local) == len(p.Backends.Local) {
			continue
		}
		if !cloned {
			s.Ports, cloned = slices.Clone(s.Ports), true
		}
		s.Ports[i].Backends = lb.Usable{Cluster: cluster, Local: local}
	}
	return s
}

// reached returns the backends that are not away; all of them if none is left.
func reached(all []lb.Backend, away func(lb.Backend) bool) []lb.Backend {
	if !slices.ContainsFunc(all, away) {
		return all
	}
	left := slices.DeleteFunc(slices.Clone(all), away)
	if len(left) == 0 {
		return all
	}
	return left
}

// Target is an endpoint to whose address the kernel needs a way.
type Target struct {
	Addr netip.Addr
	// Pod is set for a pod with an address of its own, to which a default route is no way: routers
	// outside of the cluster know nodes and foreign addresses, and not pods.
	Pod bool
}

// Targets returns up to a number of endpoints of a Service's slices, those on the node called self
// before others, each address once.
func (n *Nodes) Targets(endpoints []lb.Slice, self string, most int) []Target {
	var targets []Target
	seen := map[netip.Addr]bool{}
	for _, local := range []bool{true, false} {
		for _, slice := range endpoints {
			for _, ep := range slice.Endpoints {
				if len(targets) == most {
					return targets
				}
				if (ep.Node == self) != local || seen[ep.Addr] {
					continue
				}
				seen[ep.Addr] = true
				_, host := n.addresses[ep.Addr]
				targets = append(targets, Target{Addr: ep.Addr, Pod: ep.Node != "" && !host})
			}
		}
	}
	return targets
}

// Way is the route that the kernel takes to a Target, and what becomes of packets on it.
type Way struct {
	Kind lb.RouteKind
	// Local is set for the node's own addresses, for which it forwards nothing.
	Local bool
	// Interface is the one that packets leave by, and answers come in at; "" if unknown.
	Interface string
	// Down is set if no interface of the route has a carrier, Unforwarded if the kernel does not forward
	// what comes in there, or at an interface with an address of the Node.
	Down, Unforwarded bool
}

// Refuse returns why a Way does not lead to a Target on a node; nil if it does, or may. With
// defaultRoute set, the network between the nodes knows where pods are.
func (w Way) Refuse(t Target, node string, defaultRoute bool) *lb.Refusal {
	by := w.Interface
	if by != "" {
		by = " by " + by
	}
	switch {
	case w.Local:
		return nil
	case w.Kind == lb.RouteNone:
		return lb.Refuse(lb.ReasonPodRouteMissing, "the kernel of %s has no route to the endpoint %s", node, t.Addr)
	case w.Kind == lb.RouteDefault && t.Pod && !defaultRoute:
		return lb.Refuse(lb.ReasonPodRouteMissing,
			"the kernel of %s has no route to the pod %s but the default route%s; if the network outside knows the pods, "+
				"set --path-check=default-route", node, t.Addr, by)
	case w.Down:
		return lb.Refuse(lb.ReasonNoCarrier, "the route of %s to the endpoint %s leads out%s, which has no carrier", node,
			t.Addr, by)
	case w.Unforwarded:
		return lb.Refuse(lb.ReasonForwardingOff,
			"the kernel of %s forwards no %s packets between clients and the endpoint %s", node, lb.FamilyOf(t.Addr), t.Addr)
	}
	return nil
}
