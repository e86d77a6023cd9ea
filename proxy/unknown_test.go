package main

import (
	"fmt"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Small changes that do not end, while a large Service is written, do not keep the feed from beginning.
func TestContract6ChurnDoesNotKeepTheFeedWaiting(t *testing.T) {
	b := newBench(t)
	b.put("large", "192.0.2.1", "10.200.1.1")
	b.put("web", "192.0.2.2", "10.200.2.1")
	b.synced()
	b.run()
	for i := range 10 { // each round confirms what was wanted before it, and one more change has come
		confirmed := b.rules.wanted[key("web")]
		b.put("web", "192.0.2.2", fmt.Sprintf("10.200.2.%d", 2+i%2))
		b.rules.outcomes[key("large")] = plan.Outcome{Applied: plan.Service{Key: key("large")}, Alone: []lb.Family{lb.IPv4}}
		b.rules.outcomes[key("web")] = plan.Outcome{Applied: confirmed}
		b.run()
	}
	if !b.feed.complete {
		t.Error("the feed has not begun after ten rounds")
	}
}

// A VIP of which the kernel may have rules, and that has no backend any more, is not told to be unknown: the
// speaker would go on with what it heard before.
func TestContract1UnknownIsNothingThatCannotBeDelivered(t *testing.T) {
	b := newBench(t)
	b.put("large", "192.0.2.1", "10.200.1.1")
	b.put("web", "192.0.2.2", "10.200.2.1")
	b.synced()
	b.run()
	parts := plan.Outcome{Applied: plan.Service{Key: key("large")}, Alone: []lb.Family{lb.IPv4}}
	b.rules.outcomes[key("large")] = parts
	b.rules.outcomes[key("web")] = plan.Outcome{Applied: b.rules.wanted[key("web")]}
	b.run()
	if d := b.records[key("large")].deliveries; len(d) != 1 || !d[0].Unknown {
		t.Fatalf("while it is written in parts: %+v", d)
	}
	b.put("large", "192.0.2.1")
	b.rules.outcomes[key("large")] = parts
	b.run()
	if d := b.records[key("large")].deliveries; len(d) != 1 || d[0].Unknown || d[0].Deliverable() != lb.ReasonNoBackends {
		t.Errorf("without backends: %+v", d)
	}
}
