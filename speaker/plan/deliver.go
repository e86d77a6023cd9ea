package plan

import (
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A Service that joined an address of another one never decides where that is announced: it could
// take the first holder off the air, or off all nodes but its own. So those who held the VIP first
// decide, and those who joined only where no node can deliver the first ones.

// first returns the holders that did not join another one, and the others.
func first(holders []Holder) (first, joined []Holder) {
	for _, h := range holders {
		if h.Joined {
			joined = append(joined, h)
		} else {
			first = append(first, h)
		}
	}
	return first, joined
}

// tenants returns the holders whose labels and annotations count: those that did not join another
// one, and those of their namespaces.
func tenants(holders []Holder) []Holder {
	of, _ := first(holders)
	if len(of) == 0 || len(of) == len(holders) {
		return holders
	}
	return slices.DeleteFunc(slices.Clone(holders), func(h Holder) bool {
		return !slices.ContainsFunc(of, func(f Holder) bool { return f.Service.Namespace == h.Service.Namespace })
	})
}

// deliverable returns why this node cannot deliver the VIP, or nil when it can.
func deliverable(gate lb.Reason, holders []Holder) *lb.Refusal {
	refusal, _ := undeliverable(gate, holders)
	return refusal
}

// undeliverable is deliverable, and returns the Service that it is about; none for the gate.
func undeliverable(gate lb.Reason, holders []Holder) (refusal *lb.Refusal, about lb.Key) {
	if gate != "" {
		return lb.Refuse(gate, "%s", Describe(gate)), lb.Key{}
	}
	of, joined := first(holders)
	refusal, about = allDeliverable(of)
	nowhere := refusal != nil && (refusal.Reason == lb.ReasonNoBackends || refusal.Reason == lb.ReasonFrontendInUse)
	if len(joined) > 0 && (len(of) == 0 || nowhere) {
		return allDeliverable(joined)
	}
	return refusal, about
}

// undelivered returns why this node cannot deliver the Services that joined the VIP of others.
func undelivered(holders []Holder) map[lb.Key]*lb.Refusal {
	var found map[lb.Key]*lb.Refusal
	for _, h := range holders {
		if !h.Joined {
			continue
		}
		if refusal := h.refuse(); refusal != nil {
			if found == nil {
				found = map[lb.Key]*lb.Refusal{}
			}
			found[h.Service] = refusal
		}
	}
	return found
}

// allDeliverable returns why this node cannot deliver one of the Services, and which, or nil when it can. A
// Service that no node can deliver, or whose frontends another Service has, does not count, unless
// there is no other; nor does one of which the proxy has not heard, such as a Service that is new or
// gone, or whose status somebody else wrote: what is delivered already stays announced.
func allDeliverable(holders []Holder) (refusal *lb.Refusal, about lb.Key) {
	var empty *lb.Refusal
	counted := 0
	for _, h := range holders {
		refusal := h.refuse()
		switch {
		case refusal == nil:
			counted++
		case h.Delivery != nil && refusal.Reason != lb.ReasonNoBackends && refusal.Reason != lb.ReasonFrontendInUse:
			return refusal, h.Service
		case empty == nil:
			empty, about = refusal, h.Service
		}
	}
	if counted == 0 {
		return empty, about
	}
	return nil, lb.Key{}
}

// refuse returns why this node cannot deliver one Service, or nil when it can.
func (h Holder) refuse() *lb.Refusal {
	if h.Delivery == nil {
		return lb.Refuse(lb.ReasonNotProgrammed, "the proxy has not confirmed yet that this node's rules deliver %s",
			h.Service)
	}
	switch reason := h.Delivery.Deliverable(); {
	case reason == "":
		return nil
	case h.Delivery.Refusal != nil:
		return lb.Refuse(reason, "%s: %s", h.Service, h.Delivery.Refusal.Message)
	case reason == lb.ReasonNoLocalBackends:
		return lb.Refuse(reason, "%s has externalTrafficPolicy Local and no usable endpoint on this node", h.Service)
	default:
		return lb.Refuse(reason, "%s: %s", h.Service, Describe(reason))
	}
}

// onNode reports whether all that this node delivers of the VIP goes to the node itself, for which its kernel need not
// forward anything. Those who joined count only where it delivers nothing of the others.
func onNode(holders []Holder) bool {
	of, joined := first(holders)
	counted, all := countOnNode(of)
	if all && counted == 0 {
		counted, all = countOnNode(joined)
	}
	return all && counted > 0
}

// countOnNode counts the Services that the node delivers to itself, be it to endpoints that are terminating; all is
// false if there is one that it delivers elsewhere.
func countOnNode(holders []Holder) (counted int, all bool) {
	for _, h := range holders {
		d := h.Delivery
		switch {
		case d == nil, d.Refusal != nil, d.Ready+d.Serving == 0,
			d.Policy == lb.Local && d.LocalReady+d.LocalServing == 0:
			continue // it delivers nothing
		case !d.OnNode:
			return counted, false
		}
		counted++
	}
	return counted, true
}

// forwards reports whether the kernel still delivers what arrives for the VIP, be it to endpoints
// that are terminating.
func forwards(holders []Holder) bool {
	of, joined := first(holders)
	counted, all := countForwarding(of)
	if all && counted == 0 {
		counted, all = countForwarding(joined)
	}
	return all && counted > 0
}

// countForwarding counts the Services that the kernel still delivers; all is false if there is one
// that it does not although another node may.
func countForwarding(holders []Holder) (counted int, all bool) {
	for _, h := range holders {
		d := h.Delivery
		switch {
		case d == nil, d.Deliverable() == lb.ReasonFrontendInUse:
			continue // unheard of, or another Service's
		case d.Refusal != nil:
			return counted, false
		case d.Ready+d.Serving == 0:
			continue // refused here as everywhere
		case d.Policy == lb.Local && d.LocalReady+d.LocalServing == 0:
			return counted, false
		}
		counted++
	}
	return counted, true
}
