package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contract clauses 6 and 11: the speaker hears of everybody as soon as their rules are in the kernel. Of a
// Service that the writer has not finished it hears that what it knows stays valid, until the writer has
// finished it or waits no longer.
func TestContract11AStartWaitsForNoUnfinishedService(t *testing.T) {
	for _, finishes := range []bool{true, false} {
		t.Run(fmt.Sprint("finishes ", finishes), func(t *testing.T) {
			b := newBench(t)
			b.put("large", "192.0.2.1", "10.200.1.1")
			b.put("web", "192.0.2.2", "10.200.2.1")
			b.put("poison", "192.0.2.3", "10.200.3.1")
			b.synced()
			b.run()
			alone := []lb.Family{lb.IPv4}
			b.rules.outcomes[key("large")] = plan.Outcome{Applied: plan.Service{Key: key("large")}, Alone: alone}
			b.run()
			if b.feed.complete {
				t.Error("the feed begins before the others are tried")
			}
			b.rules.outcomes[key("poison")] = plan.Outcome{Applied: plan.Service{Key: key("poison")}, Alone: alone,
				Err: fmt.Errorf("exit status 4")}
			b.rules.outcomes[key("web")] = plan.Outcome{Applied: b.rules.wanted[key("web")]}
			b.run()
			if !b.feed.complete || b.ready() != nil {
				t.Errorf("the feed has begun: %v; ready: %v", b.feed.complete, b.ready())
			}
			told := func(name string) (unknown, refused bool) {
				r := b.records[key(name)].deliveries[0]
				if d := b.feed.all[r.Key()]; !d.Equal(r) {
					t.Errorf("%s: told %+v, known is %+v", name, d, r)
				}
				return r.Unknown, r.Refusal != nil
			}
			for name, want := range map[string]bool{"web": false, "poison": false, "large": true} {
				if unknown, refused := told(name); unknown != want || refused != (name != "web") {
					t.Errorf("%s: unknown %v, refused %v", name, unknown, refused)
				}
			}
			select {
			case <-b.settled:
				t.Error("what a predecessor left goes before all is written")
			default:
			}
			if finishes {
				b.rules.outcomes[key("large")] = plan.Outcome{Applied: b.rules.wanted[key("large")]}
			}
			b.rules.tried = true
			b.run()
			<-b.settled
			if unknown, refused := told("large"); unknown || refused == finishes {
				t.Errorf("in the end: unknown %v, refused %v", unknown, refused)
			}
		})
	}
}

// Contract clauses 10 and 11: at a start beside Services that are beyond the planner's bounds all others are
// written and told of as without them. Each of them says why it is not served.
func TestContract11AStartBesideTooLargeServices(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.1")
	b.put("many-ports", "192.0.2.2", "10.200.2.1")
	b.put("many-endpoints", "192.0.2.3", "10.200.3.1")
	svc, _ := b.services.Get(key("many-ports"))
	for i := range 9000 {
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.UDP, Port: uint16(i + 1)})
	}
	b.services.Set(key("many-ports"), svc)
	all, _ := b.slices.Get(key("many-endpoints"))
	all[0].Endpoints = slices.Repeat(all[0].Endpoints, 1<<17+1)
	b.slices.Set(key("many-endpoints"), all)
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	<-b.settled
	b.expectDelivery("web", "192.0.2.1", "1")
	for name, vip := range map[string]string{"many-ports": "192.0.2.2", "many-endpoints": "192.0.2.3"} {
		r := b.records[key(name)]
		if len(r.applied.Ports) > 0 || r.state() != stateFailed || len(r.advice) != 1 ||
			r.advice[0].Reason != lb.ReasonTooLarge {
			t.Errorf("%s: %d ports, state %s, advice %+v", name, len(r.applied.Ports), r.state(), r.advice)
		}
		b.expectDelivery(name, vip, "refused")
		if d := r.deliveries[0]; d.Unknown || !strings.HasPrefix(d.Refusal.Message, "the Service is too large: ") {
			t.Errorf("%s: %+v", name, d)
		}
		if !slices.ContainsFunc(b.warnings, func(w string) bool { return strings.HasPrefix(w, name+" TooLarge here: ") }) {
			t.Errorf("no Event for %s: %.300q", name, b.warnings)
		}
	}
}
