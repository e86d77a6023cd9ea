package main

import (
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// advise says once what of a Service's wishes this proxy does not follow.
func (p *proxy) advise(r *record, svc lb.Service) {
	advice := plan.SchedulerIgnored(svc.Scheduler, p.mode == modeIptables)
	if advice == r.advice {
		return
	}
	p.counts.add(r, -1)
	r.advice = advice
	p.counts.add(r, 1)
	if advice == "" {
		return
	}
	p.log.Warn("this proxy does not follow a setting of a Service", "service", svc.Key, "reason",
		lb.ReasonSchedulerIgnored,
		"message", advice)
	p.to.warn(svc, lb.ReasonSchedulerIgnored, p.self+": "+advice)
}
