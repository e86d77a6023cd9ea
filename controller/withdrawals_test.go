package main

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

func (c *cluster) exists(name string) bool { _, ok := c.services[key(name)]; return ok }

// TestContract3DeletedServicesWaitForTheSpeakers keeps a deleted Service, and with it the rules of
// the proxies and the address, until nobody announces it, or the speakers have had their time.
func TestContract3DeletedServicesWaitForTheSpeakers(t *testing.T) {
	for name, test := range map[string]struct {
		end     func(c *cluster) // the Service's end as one that is ours
		speaker bool             // one is left to report
	}{
		"deleted":                            {func(c *cluster) { c.del("a") }, true},
		"deleted, all speakers dead":         {func(c *cluster) { c.del("a") }, false},
		"no load balancer any more":          {toClusterIP, true},
		"no load balancer, speakers dead":    {toClusterIP, false},
		"no load balancer any more, deleted": {func(c *cluster) { toClusterIP(c); c.del("a") }, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			c.addPool("p", "10.0.0.0/31")
			c.put(service("a"))
			p.settle(t)
			c.announce("a", true)
			p.settle(t)
			p.ticks = time.Millisecond
			if !c.services[key("a")].Finalizer {
				t.Fatal("the finalizer is not set with the address")
			}
			test.end(c)
			p.deliver()
			again, err := p.step(t.Context())
			if err != nil || !c.services[key("a")].Finalizer {
				t.Fatalf("the finalizer goes before the announcements: %v", err)
			}
			if again <= 0 || again > withdrawWithin {
				t.Fatalf("it is looked at again after %v", again)
			}
			if test.speaker {
				c.announce("a", false)
			} else {
				p.clock = p.clock.Add(again)
			}
			p.ticks = time.Second
			p.settle(t)
			if s, ok := c.services[key("a")]; ok && (s.Deleting || s.Finalizer || len(s.Conditions) > 0) {
				t.Errorf("left: %+v", s)
			}
		})
	}
}

func toClusterIP(c *cluster) {
	s := c.services[key("a")]
	s.Type, s.Ingress = lb.ClusterIP, nil // as an API server does
	c.put(s)
}

// TestContract8DeletedServicesHoldTheirAddress has nobody get the address before the Service is
// gone and its time of quarantine over.
func TestContract8DeletedServicesHoldTheirAddress(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/32")
	c.put(service("a"))
	p.settle(t)
	c.announce("a", true)
	c.put(service("b"))
	c.del("a")
	p.deliver()
	step(t, p)
	// A new leader knows as much.
	p = newProcess(c)
	p.takeOver(t)
	p.ticks = time.Millisecond
	step(t, p)
	if got := c.holds("b"); got != "PoolExhausted" {
		t.Errorf("b holds %q while a is being deleted", got)
	}
	c.announce("a", false)
	p.ticks = time.Second
	p.settle(t)
	if got := c.holds("b"); c.exists("a") || got != "10.0.0.0 Assigned" {
		t.Errorf("a is there: %v, b holds %q", c.exists("a"), got)
	}
}

// TestContract3EachEndHasAWaitOfItsOwn has a Service end, come back and end again, also as another
// one of its name, while no speaker reports.
func TestContract3EachEndHasAWaitOfItsOwn(t *testing.T) {
	for name, again := range map[string]func(c *cluster, p *process){
		"is a load balancer again": func(c *cluster, _ *process) {
			s := c.services[key("a")]
			s.Type = lb.LoadBalancer
			c.put(s)
		},
		"is created anew": func(c *cluster, _ *process) {
			c.remove("a")
			c.put(service("a"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			c.addPool("p", "10.0.0.0/31")
			c.put(service("a"))
			for range 2 {
				p.ticks = time.Second
				p.settle(t)
				c.announce("a", true)
				p.settle(t)
				p.ticks = time.Millisecond
				toClusterIP(c)
				p.deliver()
				step(t, p)
				if !c.services[key("a")].Finalizer {
					t.Fatal("the finalizer goes before the announcements")
				}
				p.clock = p.clock.Add(withdrawWithin)
				p.settle(t)
				if c.services[key("a")].Finalizer {
					t.Fatal("the finalizer stays although the time is over")
				}
				again(c, p)
			}
		})
	}
}

// TestContract3AnAnnouncedAddressIsNotFree has a Service become no load balancer, which empties its
// status at once, and another one wait for the address.
func TestContract3AnAnnouncedAddressIsNotFree(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/32")
	c.put(service("a"))
	p.settle(t)
	c.announce("a", true)
	p.settle(t)
	p.ticks = time.Millisecond
	toClusterIP(c)
	c.put(service("b"))
	p.deliver()
	step(t, p)
	// A new leader knows as much.
	p = newProcess(c)
	p.takeOver(t)
	p.ticks = time.Millisecond
	step(t, p)
	if got := c.holds("b"); got != "PoolExhausted" {
		t.Fatalf("b holds %q while the nodes announce the address for a", got)
	}
	c.announce("a", false)
	p.ticks = time.Second
	p.settle(t)
	if got := c.holds("b"); got != "10.0.0.0 Assigned" || c.services[key("a")].Finalizer {
		t.Errorf("b holds %q", got)
	}
}

// TestContract3ADeletedServiceGoesAlthoughTheClassIsAnother has the controller serve another class
// than when it assigned the address.
func TestContract3ADeletedServiceGoesAlthoughTheClassIsAnother(t *testing.T) {
	for name, test := range map[string]struct {
		tweak func(s *lb.Service)
		stays bool
	}{
		"as it was assigned":              {func(*lb.Service) {}, false},
		"another program's address":       {func(s *lb.Service) { s.Ingress[0].Addr = s.Ingress[0].Addr.Next() }, true},
		"the status was emptied":          {func(s *lb.Service) { s.Ingress = nil }, false},
		"the condition confirms it never": {func(s *lb.Service) { s.Conditions = nil }, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			c.addPool("p", "10.0.0.0/31")
			c.put(service("a"))
			p.settle(t)
			c.announce("a", true)
			s := c.services[key("a")]
			test.tweak(&s)
			delete(c.history, key("a"))
			c.put(s)
			p = newProcess(c)
			p.config.Class = "other"
			p.begin()
			p.takeOver(t)
			c.del("a")
			p.ticks = time.Millisecond
			p.deliver()
			step(t, p)
			if name == "as it was assigned" && !c.exists("a") {
				t.Fatal("it goes before the announcements")
			}
			p.clock = p.clock.Add(withdrawWithin)
			p.settle(t)
			if c.exists("a") != test.stays {
				t.Errorf("exists: %v", c.exists("a"))
			}
		})
	}
}

// TestContract3AServiceOfAnotherClass has a Service come back with another class, which empties its
// status, and perhaps get an address from that class's controller.
func TestContract3AServiceOfAnotherClass(t *testing.T) {
	for name, test := range map[string]struct {
		tweak func(s *lb.Service)
		want  string // what it holds and shows
		stays bool   // the finalizer does
	}{
		"nobody serves it": {func(s *lb.Service) { s.Ingress = nil }, "", false},
		"a cloud serves it": {func(s *lb.Service) {
			s.Ingress = []lb.Ingress{{Addr: s.Ingress[0].Addr.Next().Next().Next()}}
		}, "10.0.0.3", true},
		"another Landfall goes on with it": {func(*lb.Service) {}, "10.0.0.0 Assigned", true},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			c.addPool("p", "10.0.0.0/31")
			c.put(service("a"))
			p.settle(t)
			s := c.services[key("a")]
			s.Class = "theirs"
			s.Ingress = slices.Clone(s.Ingress)
			test.tweak(&s)
			delete(c.history, key("a"))
			c.put(s)
			p.settle(t)
			if got := c.holds("a"); got != test.want || c.services[key("a")].Finalizer != test.stays {
				t.Errorf("%q, finalizer %v; want %q, %v", got, c.services[key("a")].Finalizer, test.want, test.stays)
			}
		})
	}
}

// TestOthersFinalizersStay leaves alone what another load balancer's controller set.
func TestOthersFinalizersStay(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	waits, theirs, internal := service("waits"), service("theirs"), service("internal")
	theirs.Class, internal.Type = "cloud", lb.ClusterIP
	for _, s := range []lb.Service{waits, theirs, internal} {
		s.Finalizer = true
		c.put(s)
	}
	p.settle(t)
	c.del("waits")
	c.del("theirs")
	p.settle(t)
	for _, name := range []string{"waits", "theirs", "internal"} {
		if !c.services[key(name)].Finalizer {
			t.Errorf("%s lost its finalizer", name)
		}
	}
}

// TestContract3ADeletedServiceWithoutAnAddressGoes has Services with the finalizer that never got an address, as they
// came back from a backup. Of a class of its own the controller is the only one who may have set it.
func TestContract3ADeletedServiceWithoutAnAddressGoes(t *testing.T) {
	for name, test := range map[string]struct {
		class string // the controller's
		tweak func(s *lb.Service)
		stays bool
	}{
		"of our class":     {"landfall", func(s *lb.Service) { s.Class = "landfall" }, false},
		"of another":       {"landfall", func(s *lb.Service) { s.Class = "theirs" }, true},
		"without a class":  {"landfall", func(*lb.Service) {}, true},
		"no load balancer": {"landfall", func(s *lb.Service) { s.Type = lb.ClusterIP }, true},
		"no class at all":  {"", func(*lb.Service) {}, true},
		"somebody's address": {"landfall", func(s *lb.Service) {
			s.Class, s.Ingress = "landfall", []lb.Ingress{{Addr: netip.MustParseAddr("203.0.113.1")}}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			p.config.Class = test.class
			p.begin()
			s := service("a")
			s.Finalizer = true
			test.tweak(&s)
			c.put(s)
			if len(s.Ingress) == 0 { // else the controller would write the status anew
				p.settle(t)
			}
			c.del("a")
			p.settle(t)
			if c.exists("a") != test.stays {
				t.Errorf("exists: %v", c.exists("a"))
			}
		})
	}
}

// TestHeadlessServicesAreLeftAlone has the label take a Service down, which keeps its address.
func TestHeadlessServicesAreLeftAlone(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/31")
	c.put(service("a"))
	p.settle(t)
	for _, name := range []string{"a", "never"} {
		s := service(name)
		if c.exists(name) {
			s = c.services[key(name)]
		}
		s.Headless = true
		c.put(s)
	}
	c.put(service("b"))
	c.put(service("c"))
	delete(c.pools, "p")
	c.addPool("q", "10.0.0.0/31")
	p.settle(t)
	if got := c.holds("a") + ", " + c.holds("never") + ", " + c.holds("b") + ", " +
		c.holds("c"); got != "10.0.0.0 Assigned, , 10.0.0.1 Assigned, PoolExhausted" {
		t.Errorf("held: %s", got)
	}
	s := c.services[key("never")]
	s.Headless = false
	c.put(s)
	c.remove("b")
	p.settle(t)
	if got := c.holds("never"); got != "10.0.0.1 Assigned" {
		t.Errorf("without the label: %q", got)
	}
}

// TestAllocatedFromIsWrittenAlong has the pool be written with the address, not for itself.
func TestAllocatedFromIsWrittenAlong(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	p.allocatedFrom = true
	c.addPool("p", "10.0.0.0/31")
	c.put(service("a"))
	p.deliver()
	step(t, p)
	p.deliver()
	step(t, p)
	writes := 0
	for _, written := range c.written() {
		if written == "service a" {
			writes++
		}
	}
	if got := c.services[key("a")].AllocatedFrom[lb.AnnotationAllocatedFrom]; got != "p" || writes != 1 {
		t.Errorf("%q after %d writes", got, writes)
	}
	s := c.services[key("a")]
	s.AllocatedFrom = nil
	c.put(s)
	p.settle(t)
	if len(c.services[key("a")].AllocatedFrom) > 0 {
		t.Error("written for itself")
	}
}
