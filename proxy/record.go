package main

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// allFamilies are the places of the address families in arrays.
var allFamilies = [2]lb.Family{lb.IPv4, lb.IPv6}

// record is what the proxy knows of one Service.
type record struct {
	live    plan.Service // what the API server asks for
	planned plan.Service // with what lingers
	applied plan.Service
	// families are those of live, and delivers has the endpoints to which applied delivers; nil until a readiness
	// gate asks.
	families []lb.Family
	delivers map[netip.Addr]bool
	// whole is live with what routes and probes leave out, and with a relay that is refused; nil if that
	// is nothing.
	whole *plan.Service
	// fit is the plan of when the Service was not too large; nil unless it is. tooLarge is set while the
	// kernel's writer has refused live for its size, and nothing else was planned yet.
	fit      *plan.Service
	tooLarge *plan.TooLarge
	failure  error
	alone    []lb.Family // where the failure is this Service's own
	// untried is set for what there was at the start and the kernel's writer has not tried yet.
	untried bool
	// since is when the oldest change came that the kernel has not confirmed, by family; zero when
	// there is none.
	since [2]time.Time
	// writes are those that the kernel confirmed of it in each family since it last held the newest plan.
	writes [2]writes
	// triggered is the newest change of the endpoints, as those who made it say; programming is the
	// oldest one that the kernel has not confirmed, zero when there is none.
	triggered, programming time.Time
	// warned is the last failure that was reported.
	warned  string
	counted counted
	// targets are the endpoints of which the way has to be known, toldTargets those that the path's actor was told. lost
	// says why the kernel does not reach some of them; nil if it reaches all.
	targets, toldTargets []plan.Target
	lost                 map[netip.Addr]*lb.Refusal
	// advice says what of the Service's wishes is not followed.
	advice []lb.Refusal
	// relayRefused says why its endpoints are not relayed to; "" if they are, or need not be.
	relayRefused string
	// relayNeeds is how much the relay would be told of it, or was when it last had an endpoint.
	relayNeeds int
	// directRefused says which connections are masqueraded although the Service asks for direct forwarding.
	directRefused string
	probes        probes
	// deliveries are what was last told of the VIPs.
	deliveries []lb.Delivery
}

// writes are when the proxy heard of the last write of a Service, and of the one before.
type writes struct{ last, before time.Time }

// heard takes note of a write that is not of the newest plan, as the Service has changed meanwhile. It returns since
// when the oldest change may be that the write does not have, of those since a time. The kernel's writer takes the
// newest plan when it begins to write. It told of the last write by then, and so the proxy had heard of the one
// before it.
func (w *writes) heard(now, since time.Time) time.Time {
	if w.before.After(since) {
		since = w.before
	}
	w.last, w.before = now, w.last
	return since
}

func (r *record) pending() bool { return !r.since[0].IsZero() || !r.since[1].IsZero() }

// starting reports whether the kernel's writer has not said anything of the Service yet, or that it writes
// the first rules in parts.
func (r *record) starting() bool {
	return r.pending() && r.failure == nil && len(r.applied.Ports) == 0 && r.planned.Excess == nil
}

// unknown returns what is told of VIPs as long as it is not known what the kernel has of them. A VIP that
// would not be delivered with the rules either, such as one without a local endpoint, is known well enough:
// planned says so.
func unknown(deliveries, planned []lb.Delivery) []lb.Delivery {
	for i, d := range deliveries {
		switch {
		case d.Refusal == nil || d.Refusal.Reason != lb.ReasonNotProgrammed:
		case planned[i].Deliverable() != "":
			deliveries[i] = planned[i]
		default:
			deliveries[i].Unknown = true
		}
	}
	return deliveries
}

// state reports whether the newest rules are in the kernel.
func (r *record) state() string {
	switch {
	case r.failure != nil || r.planned.Excess != nil:
		return stateFailed
	case r.pending():
		return statePending
	}
	return stateApplied
}

// forget drops those of the named Services that are gone from everywhere.
func forget[V any](p *proxy, keys map[lb.Key]V) {
	for key := range keys {
		r := p.records[key]
		if r == nil {
			continue
		}
		if _, exists := p.from.services.Get(key); exists || r.pending() || r.failure != nil {
			continue
		}
		if len(r.planned.Ports)+len(r.applied.Ports)+len(p.lingers.of(key)) == 0 && !p.lingers.policy(key) {
			p.counts.add(r, -1)
			delete(p.records, key)
		}
	}
}

// counts are kept along, so that metrics need no look at all Services.
type counts struct {
	states  map[string]int
	vips    map[lb.Reason]int // Deliverable for those that this node can deliver
	noLocal map[string]int    // Services that drop by policy, as only other nodes have endpoints, by internal and external
	advised map[bool]int      // whether something that a Service asks for is not followed
	// unreached are the endpoints that the kernel does not reach.
	unreached map[lb.Reason]int
}

const deliverable lb.Reason = "Deliverable"

// The policies that noLocal tells apart.
const (
	policyInternal = "internal"
	policyExternal = "external"
)

func newCounts() counts {
	return counts{states: map[string]int{}, vips: map[lb.Reason]int{}, noLocal: map[string]int{}, advised: map[bool]int{},
		unreached: map[lb.Reason]int{}}
}

// counted is what a record has added to the counts.
type counted struct {
	state   string
	vips    []lb.Reason
	noLocal map[string]bool
	advised bool
}

// add counts a record as it is, or with n = -1 no more as what it was counted.
func (c counts) add(r *record, n int) {
	if n > 0 {
		r.counted = r.count()
	}
	c.states[r.counted.state] += n
	c.advised[r.counted.advised] += n
	for policy := range r.counted.noLocal {
		c.noLocal[policy] += n
	}
	for _, reason := range r.counted.vips {
		if c.vips[reason] += n; c.vips[reason] == 0 {
			delete(c.vips, reason)
		}
	}
}

func (r *record) count() counted {
	now := counted{state: r.state(), advised: len(r.advice) > 0}
	for _, d := range r.deliveries {
		now.vips = append(now.vips, cmp.Or(d.Deliverable(), deliverable))
	}
	for _, port := range r.planned.Ports {
		for _, f := range port.Frontends {
			if f.Action != plan.Drop {
				continue
			}
			if now.noLocal == nil {
				now.noLocal = map[string]bool{}
			}
			policy := policyExternal
			if f.Kind == plan.ClusterIP {
				policy = policyInternal
			}
			now.noLocal[policy] = true
		}
	}
	return now
}

// trigger notes changes of the endpoints. Those from before the proxy began to look are not its own
// to answer for.
func (r *record) trigger(endpoints []lb.Slice, began time.Time) {
	for _, slice := range endpoints {
		if !slice.Triggered.After(r.triggered) {
			continue
		}
		r.triggered = slice.Triggered
		if r.programming.IsZero() && slice.Triggered.After(began) {
			r.programming = slice.Triggered
		}
	}
}
