package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestContract8ForeignStatus has another load balancer write its own address into the status
// whenever Landfall has replaced it, or a hostname, or nothing at all: each time is an Event, and they are ever further
// apart.
func TestContract8ForeignStatus(t *testing.T) {
	for name, foreign := range map[string]lb.Service{
		"an address": {Ingress: []lb.Ingress{{Addr: netip.MustParseAddr("172.18.0.3")}}},
		"a hostname": {Hostnames: 1},
		"nothing":    {},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			p.ticks = time.Millisecond
			c.addPool("p", "10.0.0.0/24")
			writes, times := 0, []time.Duration(nil)
			spoil := func(s lb.Service) {
				s.Ingress, s.Hostnames = foreign.Ingress, foreign.Hostnames
				c.put(s)
			}
			spoil(service("a"))
			p.takeOver(t)
			if name == "nothing" { // nobody has taken an address away yet
				p.settle(t)
				spoil(c.services[key("a")])
			}
			begun := p.clock
			for p.clock.Sub(begun) < time.Hour {
				p.deliver()
				again, err := p.step(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				switch {
				case strings.HasPrefix(c.holds("a"), "10."):
					writes++
					times = append(times, p.clock.Sub(begun).Round(time.Second))
					if got := c.holds("a"); got != "10.0.0.0 Assigned" || writes > 100 {
						t.Fatalf("replaced by %q, at %v", got, times)
					}
					spoil(c.services[key("a")])
				case again == 0:
					t.Fatal("it stays for ever")
				default:
					p.clock = p.clock.Add(again)
				}
			}
			if writes < 5 || writes > 30 {
				t.Errorf("replaced %d times in an hour, at %v", writes, times)
			}
			told := 0
			for _, e := range p.events {
				if e == "Warning a ForeignAddress" {
					told++
				}
			}
			if told != writes {
				t.Errorf("%d Events for %d replacements", told, writes)
			}
		})
	}
}

// run steps for so long.
func (p *process) run(t *testing.T, d time.Duration) {
	t.Helper()
	for end := p.clock.Add(d); p.clock.Before(end); p.clock = p.clock.Add(50 * time.Millisecond) {
		p.deliver()
		if _, err := p.step(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A tenant keeps Landfall from writing to its Service, by emptying its status until Landfall pauses for minutes or
// because the API server refuses the writes, and empties the status once more. Its condition goes on to confirm the
// address. When the tenant writes that into the status again, long after the quarantine, nobody else has it.
func TestContract8AnEmptiedStatusKeepsItsAddress(t *testing.T) {
	for _, refuses := range []bool{false, true} {
		t.Run(fmt.Sprint("the API server refuses=", refuses), func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			p.ticks = time.Millisecond
			c.addPool("p", "10.0.0.0/24")
			pool := c.pools["p"]
			pool.Quarantine = time.Minute
			c.pools["p"] = pool
			put := func(asks string, shown ...lb.Ingress) {
				s := c.services[key("tenant")]
				s.Ingress, s.Request.Addresses = shown, []string{asks}
				c.put(s)
			}
			s := service("tenant")
			s.Request.Addresses = []string{"10.0.0.5"}
			c.put(s)
			p.takeOver(t)
			p.run(t, time.Second)
			c.invalid = map[lb.Key]bool{s.Key: refuses}
			for range 8 {
				put("10.0.0.5")
				for !refuses && len(c.services[s.Key].Ingress) == 0 {
					p.run(t, time.Second)
				}
			}
			put("10.0.0.6")
			p.run(t, 62*time.Second)
			if got := c.holds("tenant"); got != "Assigned" {
				t.Fatalf("Landfall has written %q", got)
			}
			web := service("web")
			web.Key.Namespace, web.Request.Addresses = "shop", []string{"10.0.0.5"}
			c.put(web)
			p.run(t, 2*time.Second)
			put("10.0.0.5", lb.Ingress{Addr: netip.MustParseAddr("10.0.0.5"), Mode: lb.IPModeVIP})
			p.run(t, 2*time.Second)
			if web = c.services[web.Key]; len(web.Ingress) > 0 || web.Conditions[0].Reason != lb.ReasonAddressTaken {
				t.Errorf("the other holds %v: %v", web.Ingress, web.Conditions)
			}
		})
	}
}

// A status is emptied once, and its Service changes whenever Landfall writes to it. Nothing has been replaced, so no
// pause grows.
func TestContract8ConflictsMakeNoPauseLonger(t *testing.T) {
	const conflicts = 5
	c := newCluster()
	p := newProcess(c)
	p.ticks = time.Millisecond
	c.addPool("p", "10.0.0.0/24")
	c.put(service("a"))
	p.takeOver(t)
	p.run(t, time.Second)
	s := c.services[key("a")]
	s.Ingress = nil
	c.put(s)
	n := 0
	c.holding = func(context.Context, lb.Key) error {
		if n < conflicts {
			c.touch("a")
			n++
		}
		return nil
	}
	begun := p.clock
	for n == 0 || len(c.services[key("a")].Ingress) == 0 {
		p.run(t, 50*time.Millisecond)
		if took := p.clock.Sub(begun); took > 2*conflicts*minReplace {
			t.Fatalf("not written after %s and %d conflicts", took, n)
		}
	}
	if n != conflicts {
		t.Errorf("%d conflicts", n)
	}
}

// Somebody empties the statuses of many Services, once. They wait for room in the pool's status, and not for what was
// not written.
func TestContract8ManyEmptiedStatuses(t *testing.T) {
	const services = 600
	c := newCluster()
	p := newProcess(c)
	p.ticks = time.Millisecond
	c.addPool("p", "10.0.0.0/16")
	for i := range services {
		c.put(service(fmt.Sprint("s", i)))
	}
	p.takeOver(t)
	p.settle(t)
	for i := range services {
		s := c.services[key(fmt.Sprint("s", i))]
		s.Ingress = nil
		c.put(s)
	}
	p.ticks = time.Microsecond
	begun := p.clock
	for {
		p.deliver()
		again, err := p.step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		left := 0
		for i := range services {
			if !strings.HasPrefix(c.holds(fmt.Sprint("s", i)), "10.") {
				left++
			}
		}
		took := p.clock.Sub(begun)
		if left == 0 && again == 0 {
			break
		} else if took >= time.Second {
			t.Fatalf("%d of %d wait after %s", left, services, took)
		}
		p.clock = p.clock.Add(again)
	}
}

// TestContract8PoolsUnknown restarts a controller whose pools have not been read yet, or cannot all
// be read.
func TestContract8PoolsUnknown(t *testing.T) {
	c := newCluster()
	c.addPool("p", "10.0.0.0/24")
	s := service("a")
	s.Ingress = []lb.Ingress{{Addr: netip.MustParseAddr("10.0.0.9")}}
	c.put(s)
	p := newProcess(c)
	p.deliverServices(1)
	step(t, p)
	if got := c.written(); len(got) > 0 {
		t.Errorf("written before the pools are known: %v", got)
	}
	p.settle(t)
	if got := c.holds("a"); got != "10.0.0.9 Assigned" {
		t.Errorf("holds %q", got)
	}
	if slices.Contains(p.events, "Warning a ForeignAddress") {
		t.Error("what a pool contains was replaced")
	}
	// The pool goes while no controller runs, and another one comes.
	delete(c.pools, "p")
	c.addPool("q", "192.0.2.0/24")
	p = newProcess(c)
	p.settle(t)
	if got := c.holds("a"); got != "10.0.0.9 HeldOutside" {
		t.Errorf("after the pool went: holds %q", got)
	}
}

func TestReplacedMessageNamesTheProgram(t *testing.T) {
	addrs := []netip.Addr{netip.MustParseAddr("10.0.0.9")}
	for _, test := range []struct {
		service  lb.Service
		replaced []netip.Addr
		want     string
	}{
		{lb.Service{}, addrs, "removed [10.0.0.9] from the status: Landfall did not assign it; " +
			"check whether another load balancer serves this Service"},
		{lb.Service{Hostnames: 1, StatusWriter: "k3s"}, nil, "removed a hostname from the status: Landfall did not assign " +
			`it; check whether "k3s", the program that wrote it, serves this Service`},
		{lb.Service{}, nil, "the status lacked addresses that Landfall assigned: added them; " +
			"check whether another load balancer serves this Service"},
	} {
		if got := replacedMessage(test.service, test.replaced); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}

// TestContract11AStatusOfManyAddresses has somebody write more addresses than count into a status.
func TestContract11AStatusOfManyAddresses(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/24")
	c.put(service("a"))
	p.settle(t)
	s := c.services[key("a")]
	s.Unread = 1000
	c.put(s)
	p.settle(t)
	if s = c.services[key("a")]; s.Unread != 0 || c.holds("a") != "10.0.0.0 Assigned" {
		t.Errorf("unread %d, holds %q", s.Unread, c.holds("a"))
	}
	if !slices.Contains(p.events, "Warning a TooManyAddresses") {
		t.Errorf("Events: %q", p.events)
	}
}
