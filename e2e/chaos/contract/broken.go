package contract

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// The clauses about storms whose only fault is one of a single node. What several faults do together is judged once all
// has healed.

// takeover is how long after the beginning of a fault that takes a node away others must serve what the node served.
// They need half a second on a quiet machine.
const takeover = 10 * time.Second

// broken returns the fault of one node in a storm without another fault.
func broken(e Evidence) (fault Span, ok bool) {
	event, alone := e.Round.Alone()
	i := slices.IndexFunc(e.Spans, func(s Span) bool { return s.ID == event.ID })
	if !alone || event.Node == "" || i < 0 || !e.Spans[i].Known {
		return Span{}, false
	}
	return e.Spans[i], true
}

// mayPass reports whether requests to an address of a Service may pass the node of a fault: that node announced the
// address, or has a pod that the announcing node may choose.
func (s Service) mayPass(a netip.Addr, fault Span) bool {
	switch {
	case s.BGP && s.Local:
		return s.Ready[fault.Node] > 0
	case s.BGP:
		return true
	case s.Local:
		return slices.Contains(fault.OwnedBefore, a)
	}
	return slices.Contains(fault.OwnedBefore, a) || s.Ready[fault.Node] > 0
}

// lostBeside returns the requests without an answer that matter, of Services that are there in the end.
func lostBeside(e Evidence, fault Span, matters func(Service, Sample) bool) (bad []Violation) {
	for _, s := range e.Samples {
		i := slices.IndexFunc(e.Settled.Services, func(svc Service) bool { return svc.Name == s.Service })
		if s.Err == "" || i < 0 || !matters(e.Settled.Services[i], s) {
			continue
		}
		after := s.Began.Sub(fault.Began).Round(time.Millisecond)
		bad = append(bad, Violation{At: s.Began, Text: fmt.Sprintf(
			"a request over %s to %s of %s, begun at %s, %v after %s: %s", s.Network, s.Target, s.Service,
			clock(s.Began), after, fault.Event, s.Err)})
	}
	return bad
}

// onlyItsOwnIsLost: requests that do not pass the broken node are answered, while it is away and when it is back.
func onlyItsOwnIsLost(e Evidence) []Violation {
	fault, ok := broken(e)
	if !ok {
		return nil
	}
	return lostBeside(e, fault, func(svc Service, s Sample) bool { return !svc.mayPass(s.Target.Addr(), fault) })
}

// othersTakeOver: on the LAN, requests that would pass the broken node are answered from [takeover] on, as long as that
// node is away and another one has a ready pod. A router without BFD goes on sending to a silent node for its hold
// time.
func othersTakeOver(e Evidence) []Violation {
	fault, ok := broken(e)
	if !ok || !fault.Kind.TakesNode() || fault.From.IsZero() {
		return nil
	}
	others := func(svc Service) bool {
		return slices.ContainsFunc(svc.nodes(), func(node string) bool { return node != fault.Node })
	}
	return lostBeside(e, fault, func(svc Service, s Sample) bool {
		return !svc.BGP && others(svc) && svc.mayPass(s.Target.Addr(), fault) &&
			s.Began.After(fault.From.Add(takeover)) && s.Began.Before(fault.Until)
	})
}
