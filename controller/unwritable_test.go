package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/api/v1beta1"
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

// The only address of a pool goes to a Service that can be written, however old the one is that an admission webhook
// keeps from being written: it takes the address neither while it waits nor when it is tried again, and leaves it
// without quarantine. A reservation of the controller's own, of which it never heard that it was written, changes
// nothing about that.
func TestContract11AnUnwritableServiceTakesNoAddress(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before bool // whether the pool is there before the Service
		late   bool // whether the bystander comes after some tries
		lost   bool // whether the answer to the first reservation is lost
		shows  bool // whether the Service had an address before it became unwritable
	}{
		{name: "a new pool"}, {name: "a new Service", before: true},
		{name: "a new pool, and a bystander that comes later", late: true},
		{name: "a reservation whose answer was lost", before: true, lost: true},
		{name: "a Service that holds the address", before: true, shows: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster()
			c.webhook, c.invalid = true, map[lb.Key]bool{}
			addPool := func() {
				c.addPool("p", "10.0.0.1-10.0.0.1")
				pool := c.pools["p"]
				pool.Quarantine = time.Hour
				c.pools["p"] = pool
			}
			p := newProcess(c)
			p.takeOver(t)
			several := func(n int) {
				for range n {
					p.deliver()
					_, _ = p.step(t.Context())
				}
			}
			if tt.before {
				addPool()
			}
			if tt.lost { // of the first write since the controller leads
				several(2)
				p = newProcess(c)
				p.takeOver(t)
				c.fail(lost)
			}
			if tt.shows {
				c.put(service("denied"))
				several(4)
			}
			c.invalid[key("denied")] = true
			if !tt.shows {
				c.put(service("denied"))
			} else {
				s := c.services[key("denied")]
				s.Ports = []lb.ServicePort{{Protocol: lb.TCP, Port: 80}}
				s.Request.Pool = "none" // a condition that is refused
				c.put(s)
			}
			several(4)
			if !tt.before {
				addPool()
			}
			if tt.late {
				several(6)
			}
			c.put(service("bystander"))
			several(6)
			want := "10.0.0.1 Assigned"
			if tt.shows {
				want = "PoolExhausted"
			}
			if got := c.holds("bystander"); got != want {
				t.Errorf("the bystander holds %q, want %q", got, want)
			}
			c.invalid = nil
			c.touch("denied")
			several(4)
			if got := c.holds("denied"); strings.Contains(got, "10.0.0.1") != tt.shows {
				t.Errorf("what was denied holds %q", got)
			}
			c.check(t)
		})
	}
}

// Reservations of Services with many addresses and the longest names leave a pool's status small. All get their
// addresses, one lot after the other.
func TestContract11ReservationsAreOfABoundedSize(t *testing.T) {
	c, most, long := newCluster(), 0, strings.Repeat("n", 59)
	c.addPool("p", "2001:db8:1111:2222:3333:4444:1111:0/112")
	c.before = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		var claims []v1beta1.AddressClaim
		for _, r := range c.pools["p"].Status.Pending {
			claim := v1beta1.AddressClaim{Namespace: r.Service.Namespace, Name: r.Service.Name, UID: r.UID,
				ResourceVersion: r.Version}
			for _, addr := range r.Addresses {
				claim.Addresses = append(claim.Addresses, addr.String())
			}
			claims = append(claims, claim)
		}
		written, err := json.Marshal(claims)
		if err != nil {
			t.Error(err)
		}
		most = max(most, len(written))
	}
	for i := range 100 {
		s := service(fmt.Sprintf("%s%04d", long, i))
		s.Families, s.Request.PerFamily = []lb.Family{lb.IPv6}, "16"
		c.put(s)
	}
	p := newProcess(c)
	for range 8 {
		p.deliver()
		if _, err := p.step(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if most > maxReservationsSize*11/20 || most < maxReservationsSize*9/20 {
		t.Errorf("up to %d bytes of reservations", most)
	}
	for key, s := range c.services {
		if len(s.Ingress) != 16 {
			t.Errorf("%s has %d addresses", key, len(s.Ingress))
		}
	}
}
