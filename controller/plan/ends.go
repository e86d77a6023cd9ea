package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// left reports whether s is not ours any more, if it was: it is no load balancer, or one of another
// class whose status shows nothing of what Landfall assigned. An API server lets a class change only
// by way of another type, which empties the status. A Service of another class whose status is as
// its condition says is left alone: another controller like this one may serve that class.
func left(s *lb.Service, class string) bool {
	if s.Type != lb.LoadBalancer || s.Class == class {
		return s.Type != lb.LoadBalancer
	}
	shown := shownAddresses(s)
	return len(shown) > 0 && !slices.ContainsFunc(s.Ingress, func(in lb.Ingress) bool {
		return slices.Contains(shown, in.Addr)
	})
}

// asAssigned reports whether the status of s shows only addresses that Landfall assigned: nobody
// serves the Service since, or another controller like this one does. The class of the controller may
// have changed.
func asAssigned(s *lb.Service) bool {
	shown := shownAddresses(s)
	return s.Hostnames == 0 && !slices.ContainsFunc(s.Ingress, func(in lb.Ingress) bool {
		return !slices.Contains(shown, in.Addr)
	})
}

// shownAddresses returns all addresses that the condition Assigned says the Service holds, by right
// or by mistake.
func shownAddresses(s *lb.Service) []netip.Addr {
	var shown []netip.Addr
	for _, c := range s.Conditions {
		if c.Type == lb.ConditionAssigned {
			shown = append(shown, conditionAddresses(c)...)
		}
	}
	return shown
}

func conditionAddresses(c lb.Condition) []netip.Addr {
	return append(lb.Confirmed(c), lb.Duplicated(c)...)
}

// Protected reports whether the Service carries the finalizer and its condition says that Landfall
// assigned it an address: another load balancer's controller may have set the same finalizer.
func Protected(s *lb.Service) bool {
	return s.Finalizer && slices.ContainsFunc(s.Conditions, func(c lb.Condition) bool {
		return c.Type == lb.ConditionAssigned &&
			(c.Status || c.Reason == lb.ReasonDuplicate || len(lb.Confirmed(c)) > 0)
	})
}

// Orphaned reports whether a Service of the class carries the finalizer although its status shows no address: it came
// back from a backup, say. The controller of a cloud sets the same finalizer before it writes an address, but only on
// Services without a class.
func Orphaned(s *lb.Service, class string) bool {
	return s.Finalizer && class != "" && Ours(s, class) && len(s.Ingress) == 0
}

// Written reports whether Landfall has written to a Service, or may have, that a controller for
// class serves or served: a Service that is no load balancer any more has no class.
func Written(s *lb.Service, class string) bool {
	return (s.Type != lb.LoadBalancer || s.Class == class) && (len(s.Conditions) > 0 || s.Announcements != "")
}

// protects says whether a deleted e must stay until nobody announces it.
func (b *Book) protects(e *entry) (protect, release bool) {
	protect = slices.ContainsFunc(e.held, func(addr netip.Addr) bool { return b.assigned(e, addr) })
	return protect, !protect && Protected(&e.Service)
}

// farewell is the decision for a Service that is being deleted: it changes nothing but the
// finalizer.
func (e *entry) farewell() Decision {
	d := Decision{Release: true}
	for _, in := range e.Ingress {
		d.Addresses = append(d.Addresses, in.Addr)
	}
	for _, c := range e.Conditions {
		if c.Type == lb.ConditionAssigned {
			d.Condition = &c
		}
	}
	return d
}

// end is the decision for a Service that is not ours any more: it loses all that is ours. One of
// another class keeps what its status shows, and then the finalizer too: who wrote the status may
// need it.
func (e *entry) end() Decision {
	var d Decision
	theirs := e.Type == lb.LoadBalancer && len(e.Ingress)+e.Hostnames > 0
	if theirs {
		for _, in := range e.Ingress {
			d.Addresses = append(d.Addresses, in.Addr)
		}
	}
	d.Release = Protected(&e.Service) && !theirs
	return d
}
