package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

var external = netip.MustParseAddr("198.51.100.7")

// lists returns a Service of type ClusterIP with external IPs.
func lists(name string, ips ...netip.Addr) lb.Service {
	return lb.Service{Key: key(name), Type: lb.ClusterIP, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		ExternalIPs: ips, Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80}}}
}

// since returns since when a Service lists the external IP, as its status says; 0 if it does not.
func (c *cluster) since(name string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.services[key(name)].Listed.Since(external, lb.TCP, 80)
}

// change changes the Service as it is stored.
func (c *cluster) change(name string, change func(*lb.Service)) {
	s := c.services[key(name)]
	change(&s)
	c.put(s)
}

// inOrder fails unless the Services list the external IP in this order.
func (c *cluster) inOrder(t *testing.T, names ...string) {
	t.Helper()
	before := int64(0)
	for _, name := range names {
		if since := c.since(name); since <= before {
			t.Errorf("%s lists it since %d, the one before since %d", name, since, before)
		} else {
			before = since
		}
	}
}

// Who lists an external IP first is its holder, for all of Landfall's programs: over writes that fail, watches
// that lag, controllers that follow one another with clocks that differ, and leaders that start anew.
func TestContract11WhoListedAnExternalIPFirst(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.put(lists("oldest"))
	c.put(lists("older", external))
	c.put(lists("holder", external))
	c.put(service("web"))
	p.settle(t)
	c.inOrder(t, "older", "holder") // by age, as long as nobody has seen who listed it first
	if c.since("oldest") != 0 {
		t.Error("listed although it lists nothing")
	}
	c.change("older", func(s *lb.Service) { s.ExternalIPs = nil })
	p.settle(t)
	if got := c.services[key("older")]; got.Listed != nil {
		t.Errorf("it lists no external IP any more, and shows %v", got.Listed)
	}
	behind := newProcess(c)
	behind.clock = time.Unix(1000, 0) // its clock is far behind
	behind.settle(t)
	c.change("oldest", func(s *lb.Service) { s.ExternalIPs = []netip.Addr{external} })
	behind.settle(t)
	c.inOrder(t, "holder", "oldest")

	before := c.since("oldest")
	c.fail(forbidden)
	c.change("older", func(s *lb.Service) { s.ExternalIPs = []netip.Addr{external} })
	c.put(lists("younger", external))
	behind.deliver()
	behind.list(t)
	if len(behind.lister.failing) != 1 {
		t.Error("no write has failed")
	}
	if got := c.since("younger"); got != 0 {
		t.Errorf("the younger one was written before the older one, whose write failed: %d", got)
	}
	behind.settle(t)
	c.inOrder(t, "holder", "oldest", "older", "younger")

	// A watch that shows the Service as it was before our write brings no other time.
	written := c.since("younger")
	behind.services.Replace(map[lb.Key]lb.Service{key("younger"): lists("younger", external)})
	s, _ := behind.services.Get(key("younger"))
	s.UID = c.services[key("younger")].UID
	behind.services.Set(key("younger"), s)
	behind.lister.serviceChanged(key("younger"))
	behind.list(t)
	if c.since("younger") != written || c.since("oldest") != before {
		t.Error("the times have changed")
	}

	// The same name, created anew, which the controller hears of after a write to the one before.
	c.change("holder", func(s *lb.Service) { s.ExternalIPs = nil })
	p.deliver()
	c.remove("holder")
	c.put(lists("holder", external))
	p.list(t)
	if slices.Contains(p.events, "Warning holder StatusRefused") {
		t.Errorf("Events %q", p.events)
	}
	p.settle(t)
	c.inOrder(t, "oldest", "older", "younger", "holder")
	c.written()
	again := newProcess(c)
	again.settle(t)
	if got := c.written(); len(got) > 0 {
		t.Errorf("a restart writes %v", got)
	}
}

// A Service that the API server refuses keeps nobody else's listing from being written. It is tried again when it
// has changed, and ever less often; once it can be written it comes after those that were listed meanwhile.
func TestContract11UnwritableListingsHinderNobody(t *testing.T) {
	for _, webhook := range []bool{false, true} {
		t.Run(fmt.Sprint("webhook=", webhook), func(t *testing.T) { unwritableListingsHinderNobody(t, webhook) })
	}
}

func unwritableListingsHinderNobody(t *testing.T, webhook bool) {
	c := newCluster()
	c.webhook = webhook
	p := newProcess(c)
	p.ticks = time.Millisecond
	c.put(lists("full"))
	step := func() {
		t.Helper()
		p.deliver()
		p.list(t)
	}
	step()
	c.invalid = map[lb.Key]bool{key("full"): true}
	c.change("full", func(s *lb.Service) { s.ExternalIPs = []netip.Addr{external} })
	c.put(lists("web", external))
	step()
	if c.since("web") == 0 || c.refused != 1 {
		t.Errorf("the other one is listed since %d, after %d refusals", c.since("web"), c.refused)
	}
	for range 100 {
		p.lister.serviceChanged(key("full"))
		step()
	}
	if c.refused != 1 || !slices.Equal(p.events, []string{"Warning full StatusRefused"}) {
		t.Errorf("%d refusals of one version, Events %q", c.refused, p.events)
	}
	p.clock = p.clock.Add(time.Minute)
	for range 100 {
		step()
	}
	if c.refused != 2 {
		t.Errorf("%d refusals after a minute", c.refused)
	}
	c.invalid = nil
	p.clock = p.clock.Add(time.Minute)
	step()
	step()
	c.inOrder(t, "web", "full")
}

// Who is heard of first is listed first, also before an older Service that comes in the same step, and after a write
// that failed.
func TestContract11ListingsInTheOrderOfChanges(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	names := []string{"oldest", "older", "younger"}
	for _, name := range names {
		c.put(lists(name))
	}
	p.settle(t)
	lists := func(name string) {
		c.change(name, func(s *lb.Service) { s.ExternalIPs = []netip.Addr{external} })
	}
	c.fail(forbidden)
	lists("younger")
	p.deliver()
	p.list(t)
	if len(p.lister.failing) != 1 {
		t.Error("no write has failed")
	}
	lists("older")
	lists("oldest")
	p.deliver()
	p.list(t)
	if got := c.written(); !slices.Equal(got, []string{"listing younger", "listing older", "listing oldest"}) {
		t.Errorf("writes %q", got)
	}
	c.inOrder(t, "younger", "older", "oldest")
}

// A listing that cannot be written, and need not be any more, is not taken for one that fails still: all are well again.
func TestListingsThatFailUntilTheyAreDropped(t *testing.T) {
	for _, listed := range []bool{false, true} {
		c := newCluster()
		p := newProcess(c)
		s := lists("web")
		if listed {
			s.ExternalIPs = []netip.Addr{external}
		}
		c.put(s)
		p.settle(t)
		c.fail(forbidden)
		c.change("web", func(s *lb.Service) { s.ExternalIPs = append(s.ExternalIPs, netip.MustParseAddr("198.51.100.8")) })
		p.deliver()
		p.list(t)
		if len(p.lister.failing) != 1 {
			t.Errorf("listed before: %v: no write has failed", listed)
		}
		c.change("web", func(s *lb.Service) { s.ExternalIPs = s.ExternalIPs[:len(s.ExternalIPs)-1] })
		p.deliver()
		p.list(t)
		if len(p.lister.failing) != 0 {
			t.Errorf("listed before: %v: it fails still", listed)
		}
	}
}

// A Service that never rests is written ever less often. What it lists again meanwhile it lists since it is written,
// after another one that was there before.
func TestContract11ListingsThatNeverRest(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	p.ticks = 100 * time.Microsecond
	c.put(lists("restless", external))
	step := func() {
		t.Helper()
		p.deliver()
		p.list(t)
	}
	turn := func(ips ...netip.Addr) {
		t.Helper()
		c.change("restless", func(s *lb.Service) { s.ExternalIPs = ips })
		step()
	}
	step()
	if c.since("restless") == 0 {
		t.Error("the first time it waits")
	}
	turn()
	c.put(lists("web", external))
	step()
	c.written()
	turn(external)
	for range 100 {
		turn()
		turn(external)
	}
	if got := c.written(); len(got) > 0 {
		t.Errorf("%d writes at once", len(got))
	}
	p.clock = p.clock.Add(maxReplace)
	step()
	step()
	step()
	c.inOrder(t, "web", "restless")
}

// A write that hangs holds up only those that list the same external IP, which are written after it.
func TestContract11ListingsThatHangHoldUpNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.listing = func(ctx context.Context, k lb.Key) error {
			if k == key("hangs") {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		p := newProcess(c)
		p.ticks = time.Millisecond
		p.lister.lanes = loop.NewLanes(4, 2)
		other := netip.MustParseAddr("198.51.100.8")
		step := func() {
			t.Helper()
			p.deliver()
			if _, err := p.lister.step(t.Context()); err != nil {
				t.Error(err)
			}
			synctest.Wait()
		}
		c.put(lists("hangs", external))
		step()
		c.put(lists("joins", external))
		c.put(lists("web", other))
		for i := range 9 {
			s := lists("web", other, netip.AddrFrom4([4]byte{198, 51, 100, byte(100 + i)}))
			s.Key.Namespace = fmt.Sprint("n", i)
			c.put(s)
		}
		for range 20 {
			step()
		}
		if got := c.written(); len(got) != 10 || c.since("joins") != 0 {
			t.Errorf("written: %q", got)
		}
		c.listing = nil // it is well again
		time.Sleep(writeTimeout)
		for range 100 {
			step()
			p.clockMu.Lock()
			p.clock = p.clock.Add(minRelist)
			p.clockMu.Unlock()
		}
		c.inOrder(t, "hangs", "joins")
	})
}

// A Service that changes while its listing is written, or that is created anew, is written as it is then.
func TestListingsThatChangeWhileTheyAreWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, pass := newCluster(), make(chan struct{})
		c.listing = func(context.Context, lb.Key) error { <-pass; return nil }
		p := newProcess(c)
		p.lister.lanes = loop.NewLanes(4, 2)
		step := func() {
			t.Helper()
			p.deliver()
			if _, err := p.lister.step(t.Context()); err != nil {
				t.Error(err)
			}
			synctest.Wait()
		}
		for _, name := range []string{"drops", "anew"} {
			c.put(lists(name))
			step()
			c.change(name, func(s *lb.Service) { s.ExternalIPs = []netip.Addr{external} })
			step()
			if name == "drops" {
				c.change(name, func(s *lb.Service) { s.ExternalIPs = nil })
			} else {
				c.remove(name)
				c.put(lists(name, external))
			}
			step()
			close(pass)
			synctest.Wait()
			p.settle(t)
			pass = make(chan struct{})
		}
		close(pass)
		if c.since("drops") != 0 || c.since("anew") == 0 {
			t.Errorf("listed since %d and %d", c.since("drops"), c.since("anew"))
		}
	})
}

// A cleanup takes back the listing of a Service, and of one that Landfall has written nothing else to nothing else.
func TestCleanupTakesListingsBack(t *testing.T) {
	c := newCluster()
	foreign := service("foreign")
	foreign.Class, foreign.Ingress = "cloud", []lb.Ingress{{Addr: external}}
	foreign.Listed = lb.Listing{external.String(): 1}
	c.put(foreign)
	s := lists("web", external)
	s.Listed = lb.Listing{external.String(): 1}
	c.put(s)
	cleaner := cleaner{services: c, installation: &install{}, addresses: true}
	written, err := cleaner.pass(t.Context())
	if written != 2 || err != nil {
		t.Errorf("%d writes, %v", written, err)
	}
	for _, name := range []string{"foreign", "web"} {
		if got := c.services[key(name)]; got.Listed != nil || !slices.Equal(got.Ingress, map[string][]lb.Ingress{
			"foreign": foreign.Ingress}[name]) {
			t.Errorf("%s shows %v and %v", name, got.Listed, got.Ingress)
		}
	}
	if written, err := cleaner.pass(t.Context()); written != 0 || err != nil {
		t.Errorf("again: %d writes, %v", written, err)
	}
	c.put(s)
	cleaner.services = readBefore{c}
	if _, err := cleaner.pass(t.Context()); err != nil {
		t.Errorf("of one that is gone, and one that was created anew: %v", err)
	}
}

// readBefore is a cluster in which, after its Services are read, one goes and all are created anew.
type readBefore struct{ *cluster }

func (c readBefore) EachService(ctx context.Context, yield func(lb.Service)) error {
	yield(lb.Service{Key: key("gone"), UID: "before", Listed: lb.Listing{external.String(): 1}})
	return c.cluster.EachService(ctx, func(s lb.Service) {
		s.UID = "before"
		yield(s)
	})
}
