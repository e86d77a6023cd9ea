package main

import (
	"fmt"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// An API server refuses every write to a Service whose annotations leave no room for another one, and a tenant
// may make many of those. They keep no reservation, as their writes do not take place, and they are not tried
// again with every change of others. The reservations that an earlier controller has left for them, which may
// yet write, take nobody's place.
func TestContract11UnwritableServicesHinderNobody(t *testing.T) {
	for _, webhook := range []bool{false, true} {
		t.Run(fmt.Sprint("webhook=", webhook), func(t *testing.T) { unwritableServicesHinderNobody(t, webhook) })
	}
}

func unwritableServicesHinderNobody(t *testing.T, webhook bool) {
	c := newCluster()
	c.webhook = webhook
	c.invalid = map[lb.Key]bool{}
	c.addPool("p", "10.0.0.0/16")
	unwritable := func(s lb.Service) {
		c.invalid[s.Key] = true
		c.put(s)
	}
	for i := range maxReservations + 1 {
		unwritable(service(fmt.Sprint("full-", i)))
	}
	waits := service("waits")
	waits.Request.Pool = "none"
	unwritable(waits)
	c.put(service("bystander"))

	earlier := newProcess(c)
	earlier.takeOver(t)
	var crash func()
	c.before = func() {
		if crash == nil && len(c.pools["p"].Status.Pending) > 0 {
			crash = c.snapshot()
		}
	}
	_, _ = earlier.step(t.Context())
	crash()
	p := newProcess(c)
	p.takeOver(t)
	several := func() {
		for range 4 {
			p.deliver()
			_, _ = p.step(t.Context())
		}
	}
	several()
	if got := c.holds("bystander"); got == "" {
		t.Fatalf("the bystander got no address; %d writes were refused", c.refused)
	}
	c.touch("full-0") // what an earlier controller decided on the older version can take place no more
	several()
	for _, reservation := range c.pools["p"].Status.Pending {
		if reservation.Service == key("full-0") || reservation.Service == key(fmt.Sprint("full-", maxReservations)) {
			t.Errorf("a reservation is left: %v", reservation)
		}
	}
	if !slices.Contains(p.events, "Warning full-7 StatusRefused") {
		t.Errorf("nobody is told: %d Events", len(p.events))
	}

	p.ticks = 0
	p.clock = p.clock.Add(maxUnwritable)
	several()
	refused := c.refused
	c.remove("bystander")
	c.put(service("another"))
	several()
	if got := c.holds("another"); got == "" || c.refused > refused {
		t.Errorf("another holds %q, and %d Services were tried again", got, c.refused-refused)
	}
	c.invalid = nil
	c.touch("full-7") // its owner has made room
	several()
	if a, b := c.holds("full-7"), c.holds("full-8"); a == "" || b != "" {
		t.Errorf("%q and %q are held", a, b)
	}
	p.clock = p.clock.Add(maxUnwritable) // and for others there is room of which nobody has told
	several()
	if got := c.holds("full-8"); got == "" {
		t.Error("what was refused was not tried again")
	}
	c.check(t)
}
