package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// advise says once what of a Service's wishes this proxy does not follow.
func (p *proxy) advise(r *record, planned plan.Service) {
	var advice []lb.Refusal
	svc, exists := p.from.services.Get(r.live.Key)
	if exists {
		endpoints, _ := p.from.slices.Get(r.live.Key)
		said := plan.SchedulerIgnored(svc, endpoints, planned, p.mode == modeIptables)
		if said == "" && p.mode != modeIptables {
			said = cmp.Or(nftables.SchedulerIgnored(planned, p.facts.config), plan.AffinityRefused(planned))
		}
		if said != "" {
			advice = append(advice, lb.Refusal{Reason: lb.ReasonSchedulerIgnored, Message: said})
		}
		if said := cmp.Or(plan.RelayIgnored(svc, p.settings.relay), r.relayRefused); said != "" {
			advice = append(advice, lb.Refusal{Reason: lb.ReasonRelayRefused, Message: said})
		}
		if said := plan.RelayLeavesUDP(svc, planned, !p.settings.relayUDP, p.mode == modeIptables); said != "" {
			advice = append(advice, lb.Refusal{Reason: lb.ReasonRelayRefused, Message: said})
		}
		if said := plan.RelayLeavesVRFs(planned, p.facts.node); said != "" {
			advice = append(advice, lb.Refusal{Reason: lb.ReasonRelayRefused, Message: said})
		}
		if said := plan.DirectDraws(svc, planned); said != "" {
			advice = append(advice, lb.Refusal{Reason: lb.ReasonSchedulerIgnored, Message: said})
		}
		if r.directRefused != "" {
			advice = append(advice, lb.Refusal{Reason: lb.ReasonDirectRefused, Message: r.directRefused})
		}
		if f := svc.Failover; f != "" && f != lb.FailoverPassthrough {
			advice = append(advice, *lb.Refuse(lb.ReasonRequestInvalid, "annotation %s: %.80q is not %s, and does nothing",
				lb.AnnotationFailover, f, lb.FailoverPassthrough))
		}
		if why := r.probes.refused; why != nil {
			advice = append(advice, *why)
		}
		if planned.Excess != nil {
			advice = append(advice, *lb.Refuse(lb.ReasonTooLarge, "%v", *planned.Excess))
		}
		if svc.InvalidRange != "" {
			advice = append(advice, *lb.Refuse(lb.ReasonSourceRangeInvalid,
				"spec.loadBalancerSourceRanges: %s is no network of IPv4 or IPv6, and admits nobody", svc.InvalidRange))
		}
		advice = append(advice, summarize(planned.Denied)...)
	}
	p.request(r.live.Key, svc, advice)
	if slices.Equal(advice, r.advice) {
		return
	}
	said := r.advice
	p.counts.add(r, -1)
	r.advice = advice
	p.counts.add(r, 1)
	for _, one := range advice {
		if slices.Contains(said, one) {
			continue
		}
		p.log.Warn("this proxy does not follow a setting of a Service", "service", svc.Key, "reason", one.Reason,
			"message", one.Message)
		p.to.warn(svc, one.Reason, p.self+": "+one.Message)
	}
}

// summarize folds what a Service does not get into one sentence for each reason, so that a Service
// with many ports and addresses makes few Events.
func summarize(denied []plan.Denied) []lb.Refusal {
	var all []lb.Refusal
	for _, reason := range []lb.Reason{lb.ReasonTooLarge, lb.ReasonFrontendInUse, lb.ReasonExternalIPRefused} {
		var sentences []string
		more := 0
		for _, d := range denied {
			if d.Reason != reason {
				continue
			}
			more += d.More
			if len(sentences) == maxSentences {
				more++
			} else {
				sentences = append(sentences, d.Message)
			}
		}
		if more > 0 {
			sentences = append(sentences, fmt.Sprintf("and %d more", more))
		}
		if len(sentences) > 0 {
			all = append(all, lb.Refusal{Reason: reason, Message: strings.Join(sentences, "; ")})
		}
	}
	return all
}

// maxSentences is how many frontends one Event names: an Event has at most 1,024 characters.
const maxSentences = plan.MaxDenied

// adviceText is what the status page shows.
func adviceText(advice []lb.Refusal) string {
	var sentences []string
	for _, one := range advice {
		sentences = append(sentences, one.Message)
	}
	return strings.Join(sentences, "; ")
}
