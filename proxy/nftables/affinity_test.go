package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// TestContract11AFloodOfClientsKeepsToItsShare checks that the clients of one Service, however many
// finish a handshake, take no more of the memory for session affinity than the Service's share, and
// no other's place.
func TestContract11AFloodOfClientsKeepsToItsShare(t *testing.T) {
	t.Parallel()
	const flood = 1000
	w := cases.WorldOf(lb.IPv6)
	shop, config := three(w, plan.Random, time.Hour, "remote")
	other, _ := three(w, plan.Random, time.Hour, "local", "local2")
	other = other.Only(w.Family)
	other.Key = lb.Key{Namespace: "other", Name: "web"}
	other.Ports = slices.Clone(other.Ports)
	to := netip.MustParseAddr("2001:db8:7::7")
	for i := range other.Ports {
		other.Ports[i].Frontends = []plan.Frontend{{Kind: plan.LoadBalancer, Addr: to, Port: cases.ServicePort,
			Action: plan.ToCluster}}
	}
	r := newRenderer(w.Family, config)
	walk := newWalker(t, newRuleset(w.Family, config, []uint32{3600}), nil,
		r.service(shop.Key, shop.Only(w.Family)), r.service(other.Key, other))
	c := cases.Case{From: "outside", To: "vip"}
	at := func(service netip.Addr, client netip.Addr) packet {
		p := packetOf(w, c)
		p.src, p.dst = netip.AddrPortFrom(client, 40000), netip.AddrPortFrom(service, p.dst.Port())
		return p
	}
	end := func(s plan.Service) netip.AddrPort { return s.Ports[0].Backends.Cluster[0].Addr }
	client := netip.MustParseAddr("2001:db8:8::1")
	if shares, _ := walk.fate(at(to, client)); len(shares) != 2 {
		t.Fatalf("a new client ends at %v, want one of two", shares)
	}
	walk.establish(at(to, client), end(other))
	if got := len(walk.sets[stickyMap]); got != 1 {
		t.Fatalf("%d clients are remembered, want one", got)
	}
	attacker := netip.MustParseAddr("2001:db8:9::")
	for range flood {
		attacker = attacker.Next()
		walk.establish(at(w.VIP, attacker), end(shop.Only(w.Family)))
	}
	if got := len(walk.sets[stickyMap]); got < flood*9/10 {
		t.Errorf("%d of %d clients are remembered", got, flood)
	}
	for key := range walk.sets[stickyMap] { // a group has no more places than there are such numbers
		if len(key) != 8 || binary.NativeEndian.Uint32([]byte(key[4:])) >= stickyShare {
			t.Fatalf("a client has the place %x, want a number below %d", key, stickyShare)
		}
	}
	if shares, _ := walk.fate(at(to, client)); shares[end(other).String()] != 1 {
		t.Errorf("a client of another Service ends at %v, want %s", shares, end(other))
	}
	if stickyLimit < 32*stickyShare {
		t.Errorf("the map has room for %d Services", stickyLimit/stickyShare)
	}
}

// TestSchedulerIgnored checks that a Service whose scheduler's tables would be too large is told.
func TestSchedulerIgnored(t *testing.T) {
	service := func(scheduler plan.Scheduler, lists int) plan.Service {
		s := plan.Service{Key: lb.Key{Namespace: "shop", Name: "web"}, Scheduler: scheduler}
		first := netip.MustParseAddr("10.1.0.1")
		for i := range lists {
			second := first.Next()
			s.Ports = append(s.Ports, plan.Port{Family: lb.IPv4, Name: fmt.Sprint("p", i), Protocol: lb.TCP,
				Backends: lb.Usable{Cluster: []lb.Backend{
					{Addr: netip.AddrPortFrom(first, 80)}, {Addr: netip.AddrPortFrom(second, 80)}}},
				Frontends: []plan.Frontend{{Kind: plan.LoadBalancer, Addr: netip.MustParseAddr("192.0.2.1"), Port: uint16(i + 1)}}})
			first = second
		}
		return s
	}
	const most = maxSlots / 127
	for _, c := range []struct {
		scheduler plan.Scheduler
		lists     int
		want      bool
	}{
		{plan.Maglev, 1, false}, {plan.Maglev, most, false}, {plan.Maglev, most + 1, true}, {plan.SourceHash, most + 1, true},
		{plan.RoundRobin, most + 1, true}, {plan.Random, most + 1, false},
	} {
		if got := SchedulerIgnored(service(c.scheduler, c.lists)); (got != "") != c.want {
			t.Errorf("%s with %d lists: %q", c.scheduler, c.lists, got)
		}
	}
}
