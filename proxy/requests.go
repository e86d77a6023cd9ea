package main

import (
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// requests are what of the condition AsRequested of Services this node has to write.
type requests struct {
	writes map[lb.Key]plan.ConditionWrite
	// concerned are the Services that have the condition, or of whose requests this node refuses some.
	concerned map[lb.Key]bool
	changed   bool // since the actor was told
}

func newRequests() requests {
	return requests{writes: map[lb.Key]plan.ConditionWrite{}, concerned: map[lb.Key]bool{}}
}

// request decides whether this node has to write that a Service is not served as requested, or no more. It is zero
// for one that is gone.
func (p *proxy) request(key lb.Key, svc lb.Service, refused []lb.Refusal) {
	if p.to.requests == nil {
		return
	}
	exists := func(node string) bool {
		_, ok := p.from.nodes.Get(node)
		return ok
	}
	write, ok := plan.AsRequested(p.self, svc, refused, exists, p.clusterNodes.Count())
	if ok {
		p.requests.changed = p.requests.changed || p.requests.writes[key] != write
		p.requests.writes[key] = write
	} else if _, had := p.requests.writes[key]; had {
		p.requests.changed = true
		delete(p.requests.writes, key)
	}
	if ok || write.Shown.Type != "" || write.Want.Type != "" {
		p.requests.concerned[key] = true
	} else {
		delete(p.requests.concerned, key)
	}
}

// rerequest decides that anew, as Nodes have come or gone.
func (p *proxy) rerequest() {
	for _, key := range slices.Collect(maps.Keys(p.requests.concerned)) {
		svc, _ := p.from.services.Get(key)
		var refused []lb.Refusal
		if r := p.records[key]; r != nil {
			refused = r.advice
		}
		p.request(key, svc, refused)
	}
}

// tellRequests tells the actor what has changed.
func (p *proxy) tellRequests() {
	if p.requests.changed {
		p.requests.changed = false
		p.to.requests.Set(maps.Clone(p.requests.writes))
	}
}
