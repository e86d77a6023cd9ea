package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// What probes find of a Service is told a while after it has changed, as one endpoint follows the other,
// and not too often.
const (
	probeSettle = time.Second
	probeQuiet  = 10 * time.Second
)

// probes is what is known of the probes of one Service.
type probes struct {
	wanted  bool         // the Service asks for a probe
	probing plan.Probing // what is asked
	refused *lb.Refusal  // why it is not what the Service asks for
	// sent is what the prober was told last.
	sent plan.Probing
	left plan.LeftOut
	// ignored are the policies for which endpoints are used that do not answer, as too many do not.
	ignored []lb.TrafficPolicy
	// told is the message of the last Event, at its time; since is when it began to be out of date.
	told      string
	at, since time.Time
}

// heed takes in which endpoints do not answer, and marks their Services as dirty.
func (p *proxy) heed(now time.Time) {
	if p.from.probes == nil {
		return
	}
	news := p.from.probes()
	for key, left := range news {
		if p.leftOut[key] = left; len(left) == 0 {
			delete(p.leftOut, key)
		}
	}
	p.markThose(slices.Collect(maps.Keys(news)), now)
}

// rescope takes in which addresses may be asked and relayed to, and marks the Services that ask for a probe
// or the relay as dirty if that has changed.
func (p *proxy) rescope(now time.Time) {
	scope := plan.ProbeScope{Own: p.facts.own, Others: p.facts.external}
	nodes := len(p.from.nodes.Keys())
	if scope.Equal(p.scope) && nodes == p.askers {
		return
	}
	p.scope, p.askers = scope, nodes
	p.markThose(slices.Collect(maps.Keys(p.probed)), now)
	for key, r := range p.records {
		if r.live.Relay || r.relayRefused != "" {
			p.markThose([]lb.Key{key}, now)
		}
	}
}

// answering plans the probes of a Service, and returns its plan without the endpoints that do not answer.
func (p *proxy) answering(r *record, svc lb.Service, endpoints []lb.Slice, live plan.Service) plan.Service {
	key, before := live.Key, r.probes
	r.probes = probes{wanted: svc.Probe != lb.Probe{} || svc.InvalidProbe != "", sent: before.sent, told: before.told,
		at: before.at, since: before.since}
	if r.probes.wanted {
		r.probes.probing, r.probes.refused = plan.NewProbing(svc, endpoints, p.scope, p.askers)
	}
	n := len(r.probes.probing.Targets)
	why := ""
	switch {
	case n > 0 && p.to.probes == nil:
		why = "this node's proxy has probes switched off (--probe-interval=0)"
	case n+len(before.probing.Targets) > 0 || before.refused != nil:
		if !p.budget.Ask(key, n) {
			why = fmt.Sprintf("this node probes %d endpoints already, of other Services", plan.MaxProbedOfNode)
		}
	}
	if why != "" {
		r.probes.probing = plan.Probing{}
		r.probes.refused = lb.Refuse(lb.ReasonProbeRefused, "annotation %s: %.80q: %s; it does not probe the %d endpoints "+
			"of this one", lb.AnnotationProbe, svc.Probe.String(), why, n)
	}
	if len(r.probes.probing.Targets) > 0 {
		r.probes.left = p.leftOut[key]
		live, r.probes.ignored = live.Answering(r.probes.left)
	}
	if p.probed[key] = true; !r.probes.wanted {
		delete(p.probed, key)
	}
	if len(r.probes.left) > 0 || r.probes.told != "" {
		p.telling[key] = true
	}
	return live
}

// probe tells the prober what to ask of the named Services.
func (p *proxy) probe(keys map[lb.Key]time.Time, now time.Time) {
	if again := p.budget.Changed(); len(again) > 0 {
		p.markThose(again, now)
		p.runner.Poke()
	}
	if p.to.probes == nil {
		return
	}
	changes := map[lb.Key]plan.Probing{}
	for key := range keys {
		if r := p.records[key]; r != nil && !r.probes.probing.Equal(r.probes.sent) {
			r.probes.sent = r.probes.probing
			changes[key] = r.probes.probing
		}
	}
	switch {
	case !p.begun:
		p.to.probes.Begin(changes)
	case len(changes) > 0:
		p.to.probes.Update(changes)
	}
}

// tellProbes sends an Event for each Service of whose probes there is something new. It returns after how
// long there is more to tell; 0 for nothing.
func (p *proxy) tellProbes(now time.Time) (again time.Duration) {
	for key := range p.telling {
		r := p.records[key]
		svc, exists := p.from.services.Get(key)
		if r == nil || !exists {
			delete(p.telling, key)
			continue
		}
		reason, message := r.probeNews()
		if message == r.probes.told {
			r.probes.since = time.Time{}
			delete(p.telling, key)
			continue
		}
		if r.probes.since.IsZero() {
			r.probes.since = now
		}
		due := r.probes.since.Add(probeSettle)
		if quiet := r.probes.at.Add(probeQuiet); quiet.After(due) {
			due = quiet
		}
		if wait := due.Sub(now); wait > 0 {
			if again == 0 || wait < again {
				again = wait
			}
			continue
		}
		r.probes.told, r.probes.at, r.probes.since = message, now, time.Time{}
		if message == "" {
			message = "the endpoints answer again, or are not probed any more"
		}
		p.log.Info("probes of a Service", "service", key, "reason", reason, "message", message)
		p.to.probed(svc, reason, p.self+": "+message)
	}
	return again
}

// probeNews says what probes have found of a Service; no message if all endpoints answer.
func (r *record) probeNews() (lb.Reason, string) {
	if len(r.probes.left) == 0 {
		return lb.ReasonProbePassed, ""
	}
	var sentences []string
	for _, f := range r.failing() {
		if len(sentences) == maxSentences {
			sentences = append(sentences, fmt.Sprintf("and %d more", len(r.probes.left)-maxSentences))
			break
		}
		sentences = append(sentences, fmt.Sprintf("%s: %s", f.Address, f.Error))
	}
	why := strings.Join(sentences, "; ")
	if len(r.probes.ignored) > 0 {
		return lb.ReasonProbeIgnored, fmt.Sprintf("%d of %d endpoints do not answer the probe %.80q (%s): with fewer than "+
			"half left for policy %s, all are used", len(r.probes.left), len(r.probes.probing.Targets),
			r.probes.probing.Probe.String(), why, joinPolicies(r.probes.ignored))
	}
	return lb.ReasonProbeFailed, fmt.Sprintf("sends no new connections to %d of %d endpoints, which do not answer the "+
		"probe %.80q: %s", len(r.probes.left), len(r.probes.probing.Targets), r.probes.probing.Probe.String(), why)
}

func joinPolicies(all []lb.TrafficPolicy) string {
	words := make([]string, len(all))
	for i, policy := range all {
		words[i] = string(policy)
	}
	return strings.Join(words, " and ")
}

// probeStatus is what the status shows of the probes of a Service.
type probeStatus struct {
	Probe string `json:"probe"`
	// Asked is how many endpoints this node asks, Failing are those of them that do not answer.
	Asked   int             `json:"asked"`
	Failing []failingStatus `json:"failing,omitempty"`
	// Ignored are the policies for which failing endpoints are used all the same, as fewer than half would
	// be left.
	Ignored []lb.TrafficPolicy `json:"ignored,omitempty"`
}

type failingStatus struct {
	Address netip.AddrPort `json:"address"`
	Error   string         `json:"error"`
	// Used is set if new connections go there all the same.
	Used bool `json:"used,omitempty"`
}

func (r *record) probeStatus() *probeStatus {
	if len(r.probes.probing.Targets) == 0 {
		return nil
	}
	return &probeStatus{Probe: r.probes.probing.Probe.String(), Asked: len(r.probes.probing.Targets),
		Failing: r.failing(), Ignored: r.probes.ignored}
}

// failing returns the endpoints that do not answer, in their order.
func (r *record) failing() (failing []failingStatus) {
	for _, to := range r.probes.probing.Targets {
		if why, is := r.probes.left[to.Addr()]; is {
			failing = append(failing, failingStatus{to, why, r.live.Uses(to.Addr())})
		}
	}
	return failing
}

// countProbes returns how many endpoints are left out, and of how many Services endpoints are used that do
// not answer.
func (p *proxy) countProbes() (left, ignored int) {
	for key := range p.leftOut {
		r := p.records[key]
		if r == nil {
			continue
		}
		for _, f := range r.failing() {
			if !f.Used {
				left++
			}
		}
		if len(r.probes.ignored) > 0 {
			ignored++
		}
	}
	return left, ignored
}
