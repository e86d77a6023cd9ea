package main

import (
	"errors"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// apply hands new plans to the kernel's writer; at first those of all Services.
func (p *proxy) apply(keys map[lb.Key]bool) {
	changes := make(map[lb.Key]plan.Service, len(keys))
	for key := range keys {
		changes[key] = p.records[key].planned
	}
	switch {
	case !p.begun:
		p.begun = true
		for key := range keys {
			p.records[key].untried = true
		}
		p.to.rules.Begin(changes)
	case len(changes) > 0:
		p.to.rules.Update(changes)
	}
}

// collect takes over what the kernel's writer has found out, and returns the Services concerned;
// all reports whether the writer has tried all of them.
func (p *proxy) collect(now time.Time) (keys map[lb.Key]bool, all bool) {
	keys = map[lb.Key]bool{}
	flows := map[lb.Key]plan.Service{}
	outcomes, all := p.to.rules.Outcomes()
	for key, o := range outcomes {
		r := p.records[key]
		if r == nil {
			continue // forgotten
		}
		keys[key] = true
		p.counts.add(r, -1)
		before := r.applied
		r.applied, r.failure, r.alone, r.delivers = o.Applied, o.Err, o.Alone, nil
		r.untried = false
		flows[key] = o.Applied
		p.direct.confirmed(o.Applied)
		for i, family := range allFamilies {
			switch {
			case r.since[i].IsZero():
			case plan.SameRules(r.planned, r.applied, family):
				p.to.latency(now.Sub(r.since[i]))
				r.since[i], r.writes[i] = time.Time{}, writes{}
			case !plan.SameRules(before, r.applied, family):
				r.since[i] = r.writes[i].heard(now, r.since[i])
			}
		}
		if !r.pending() {
			delete(p.unconfirmed, key)
			if !r.programming.IsZero() {
				p.to.programmed(now.Sub(r.programming))
				r.programming = time.Time{}
			}
		}
		p.counts.add(r, 1)
		if !p.sized(r) {
			p.warn(r)
		}
	}
	if len(p.unconfirmed) == 0 {
		p.unconfirmed = map[lb.Key]bool{} // a map that was large once is slow to go through for ever
	}
	if len(flows) > 0 {
		p.to.flows.Update(flows)
		if p.to.counters != nil {
			p.to.counters.Update(flows)
		}
		if p.to.loads != nil {
			p.to.loads.Update(flows)
		}
	}
	return keys, all
}

// warn reports a failure once.
func (p *proxy) warn(r *record) {
	said := ""
	if r.failure != nil {
		said = r.failure.Error()
	}
	if said != "" && said != r.warned {
		if svc, ok := p.from.services.Get(r.planned.Key); ok {
			about := "the kernel refused the rules: "
			if errors.As(r.failure, new(plan.TooLarge)) {
				about = "the Service is too large: "
			}
			p.to.warn(svc, lb.ReasonNotProgrammed, p.self+": "+about+said)
		}
	}
	r.warned = said
}

// unapplied returns, for each family of the node, when the oldest change came that is not in the
// kernel; zero if there is none. A Service that fails by itself in a family does not count there,
// as it would turn away the traffic of all others.
func (p *proxy) unapplied() map[lb.Family]time.Time {
	oldest := map[lb.Family]time.Time{}
	for i, family := range allFamilies {
		if !slices.Contains(p.families, family) {
			continue
		}
		var at time.Time
		for key := range p.unconfirmed {
			r := p.records[key]
			if since := r.since[i]; !since.IsZero() && !slices.Contains(r.alone, family) && (at.IsZero() || since.Before(at)) {
				at = since
			}
		}
		oldest[family] = at
	}
	return oldest
}
