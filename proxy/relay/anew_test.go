package relay

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// frontends of the Service of timed, in each family: those of two ports with the same backends, at other port numbers.
var timedFrontends = map[lb.Family][2]netip.AddrPort{
	lb.IPv4: {netip.MustParseAddrPort("198.51.100.1:80"), netip.MustParseAddrPort("198.51.100.1:443")},
	lb.IPv6: {netip.MustParseAddrPort("[2001:db8::1]:80"), netip.MustParseAddrPort("[2001:db8::1]:443")},
}

var visitors = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.77:4000"),
	netip.MustParseAddrPort("[2001:db8:7::7]:4000")}

// timed is a table with a Service that has session affinity for an hour.
type timed struct {
	*table
	now    time.Time
	random *rand.Rand
}

func newTimed(fresh bool, backends int) *timed {
	c := &timed{now: time.Unix(100_000, 0), random: rand.New(rand.NewPCG(1, 2))}
	c.table = newTable(func() time.Time { return c.now })
	r := &plan.Relayed{Affinity: time.Hour, Scheduler: plan.SourceHash, Fresh: fresh}
	for family, prefix := range map[lb.Family]string{lb.IPv4: "10.0.0.", lb.IPv6: "fd00::"} {
		for i, at := range timedFrontends[family] {
			port := plan.RelayedPort{Name: fmt.Sprint(i), Protocol: lb.TCP, Frontends: []plan.RelayedFrontend{{Addr: at}}}
			for j := range backends {
				addr := netip.MustParseAddr(fmt.Sprint(prefix, 1+j))
				port.Cluster = append(port.Cluster, plan.RelayedBackend{Addr: netip.AddrPortFrom(addr, uint16(8080+i))})
			}
			r.Ports = append(r.Ports, port)
		}
	}
	c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: r}}})
	return c
}

// offer returns the backend that a client gets at one of the ports.
func (c *timed) offer(t *testing.T, client netip.AddrPort, port int) (w way, backend netip.AddrPort) {
	t.Helper()
	to := timedFrontends[lb.FamilyOf(client.Addr())][port]
	w, _, _ = c.find(target{lb.TCP, to})
	backend, ok := w.service.choose(c.chooser(w, client, to, c.random.Uint64), nil)
	if !ok {
		t.Fatal("there is no backend")
	}
	return w, backend
}

// visit has a client connect at the first port, and returns the backend that it gets.
func (c *timed) visit(t *testing.T, client netip.AddrPort) netip.AddrPort {
	t.Helper()
	w, backend := c.offer(t, client, 0)
	c.remember(w, client.Addr(), backend)
	return backend
}

// Once its time is over, a client of a Service without a scheduler gets each backend as often as another, and keeps
// that until its time is over again. At first it gets that of its address, as by the rules.
func TestAffinityBeginsAnew(t *testing.T) {
	for _, client := range visitors {
		c := newTimed(true, 4)
		first := c.visit(t, client)
		got := map[netip.AddrPort]int{}
		const visits = 400
		for i := range visits {
			if i%2 == 0 {
				c.now = c.now.Add(time.Hour)
			} else {
				c.now = c.now.Add(returnsWithin + time.Hour - time.Second)
			}
			b := c.visit(t, client)
			got[b]++
			c.now = c.now.Add(time.Hour - time.Second)
			if again := c.visit(t, client); again != b {
				t.Fatalf("%s had %s, and within its time %s", client, b, again)
			}
		}
		for b, n := range got {
			if n < visits/8 || n > visits/2 {
				t.Errorf("%s got %s %d times of %d", client, b, n, visits)
			}
		}
		if len(got) != 4 || got[first] == 0 {
			t.Errorf("%s got %v, and %s at first", client, got, first)
		}
		c.now = c.now.Add(returnsWithin + time.Hour)
		if c.sweep(); c.remembered.all != 0 {
			t.Errorf("%d clients are left long after their time", c.remembered.all)
		}
		if b := c.visit(t, client); b != first {
			t.Errorf("%s is unknown, and gets %s, not that of its address, %s", client, b, first)
		}
	}
}

// What a client whose time is over begins at one moment gets one backend.
func TestAffinityBeginsAnewWithOneBackend(t *testing.T) {
	for _, client := range visitors {
		c := newTimed(true, 50)
		c.visit(t, client)
		c.now = c.now.Add(2 * time.Hour)
		got := map[netip.Addr]bool{}
		for i := range 20 {
			_, b := c.offer(t, client, i%2)
			got[b.Addr()] = true
		}
		if len(got) != 1 {
			t.Errorf("%s begins 20 connections at once, to %d backends", client, len(got))
		}
	}
}

// A client has one backend at all ports that have the same ones, at whichever of them it came last.
func TestAffinityIsOfAllPorts(t *testing.T) {
	for _, client := range visitors {
		c := newTimed(true, 50)
		for range 5 {
			first := c.visit(t, client)
			if _, b := c.offer(t, client, 1); b.Addr() != first.Addr() || b.Port() == first.Port() {
				t.Errorf("%s got %s at one port, and %s at another", client, first, b)
			}
			c.now = c.now.Add(time.Hour)
		}
	}
}

// A predecessor of an earlier release remembers clients of each port by themselves.
func TestAffinityOfAnEarlierRelease(t *testing.T) {
	for _, client := range visitors {
		c := newTimed(true, 50)
		w, b := c.offer(t, client, 1)
		other := w.backends[7].Addr
		if other == b {
			t.Fatalf("%s has %s by its address", client, b)
		}
		c.rememberHanded([]handedClient{{Service: web, Protocol: lb.TCP, Choices: w.name, Client: client.Addr(),
			Backend: other, Last: c.now}})
		if got := c.visit(t, client); got.Addr() != other.Addr() {
			t.Errorf("%s had %s, and got %s", client, other, got)
		}
	}
}

// A client of a Service that asks for a scheduler gets what that says, once its time is over; and so does one for which
// there was no room.
func TestAffinityBeginsAnewByTheScheduler(t *testing.T) {
	for _, client := range visitors {
		c := newTimed(false, 20)
		first := c.visit(t, client)
		c.now = c.now.Add(2 * time.Hour)
		if b := c.visit(t, client); b != first {
			t.Errorf("by source-hash %s got %s, and then %s", client, first, b)
		}
		c = newTimed(true, 20)
		c.remembered.all = maxRememberedTogether // of others
		for range 10 {
			if b := c.visit(t, client); b != first {
				t.Errorf("without room %s got %s, and not that of its address, %s", client, b, first)
			}
			c.now = c.now.Add(2 * time.Hour)
		}
	}
}

// A client whose time is over is known to the relay's successor, too, and makes room for those whose time is not.
func TestContract11ClientsWhoseTimeIsOverMakeRoom(t *testing.T) {
	now := time.Unix(100_000, 0)
	clock := func() time.Time { return now }
	first, next := newTable(clock), newTable(clock)
	services := []lb.Key{{Namespace: "shop", Name: "web"}}
	m := withAffinity(services)
	first.take(m)
	next.take(m)
	comeTo(first, services)
	now = now.Add(time.Hour + time.Minute)
	if first.sweep(); first.remembered.all != maxRemembered {
		t.Fatalf("%d clients are known", first.remembered.all)
	}
	next.rememberHanded(first.services[id{services[0], lb.UDP}].rememberedSince(time.Time{}))
	if next.remembered.all != maxRemembered {
		t.Errorf("the successor knows %d clients", next.remembered.all)
	}
	s := next.services[id{services[0], lb.UDP}]
	client := netip.MustParseAddr("192.0.2.1")
	next.remember(way{service: s, affinity: s.Affinity}, client, frontend)
	if _, ok := s.remembered[remembering{client: client}]; !ok || next.remembered.all != 1 {
		t.Errorf("a new client is remembered: %v, of %d", ok, next.remembered.all)
	}
}

// The endpoints of the node may be all that there are. When others come, a client from outside keeps its backend with
// policy Local.
func TestAffinityIsOfAPolicy(t *testing.T) {
	c := newTimed(true, 1)
	outside := netip.MustParseAddrPort("192.0.2.9:80")
	all := []plan.RelayedBackend{{Addr: backendAt(0)}, {Addr: backendAt(1)}, {Addr: backendAt(2)}}
	tell := func(local int) way {
		c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: &plan.Relayed{Affinity: time.Hour,
			Ports: []plan.RelayedPort{{Name: "http", Protocol: lb.TCP, Cluster: all, Local: all[:local],
				Frontends: []plan.RelayedFrontend{{Addr: frontend}, {Addr: outside, Local: true}}}}}}}})
		w, _, _ := c.find(target{lb.TCP, outside})
		return w
	}
	w := tell(len(all))
	c.remember(w, visitors[0].Addr(), backendAt(1))
	w = tell(2)
	for range 10 {
		if b, _ := w.service.choose(c.chooser(w, visitors[0], outside, c.random.Uint64), nil); b != backendAt(1) {
			t.Errorf("a client with %s got %s when there were endpoints elsewhere", backendAt(1), b)
		}
	}
}
