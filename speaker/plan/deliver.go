package plan

import "github.com/landfall-lb/landfall/internal/lb"

// deliverable returns why this node cannot deliver the VIP, or nil when it can: every Service on it
// is programmed and deliverable here. A Service that no node can deliver does not count, unless
// there is no other.
func deliverable(gate lb.Reason, holders []Holder) *lb.Refusal {
	if gate != "" {
		return lb.Refuse(gate, "%s", Describe(gate))
	}
	var empty *lb.Refusal
	counted := 0
	for _, h := range holders {
		refusal := h.refuse()
		switch {
		case refusal == nil:
			counted++
		case refusal.Reason != lb.ReasonNoBackends:
			return refusal
		case empty == nil:
			empty = refusal
		}
	}
	if counted == 0 {
		return empty
	}
	return nil
}

// refuse returns why this node cannot deliver one Service, or nil when it can.
func (h Holder) refuse() *lb.Refusal {
	if h.Delivery == nil {
		return lb.Refuse(lb.ReasonNotProgrammed, "the proxy has not confirmed yet that this node's rules deliver %s",
			h.Service)
	}
	switch reason := h.Delivery.Deliverable(); reason {
	case "":
		return nil
	case lb.ReasonNotProgrammed:
		return lb.Refuse(reason, "%s: %s", h.Service, h.Delivery.Refusal.Message)
	case lb.ReasonNoLocalBackends:
		return lb.Refuse(reason, "%s has externalTrafficPolicy Local and no usable endpoint on this node", h.Service)
	default:
		return lb.Refuse(reason, "%s: %s", h.Service, Describe(reason))
	}
}

// forwards reports whether the kernel still delivers what arrives for the VIP, be it to endpoints
// that are terminating.
func forwards(holders []Holder) bool {
	counted := 0
	for _, h := range holders {
		d := h.Delivery
		switch {
		case d == nil || d.Refusal != nil:
			return false
		case d.Ready+d.Serving == 0:
			continue // refused here as everywhere
		case d.Policy == lb.Local && d.LocalReady+d.LocalServing == 0:
			return false
		}
		counted++
	}
	return counted > 0
}
