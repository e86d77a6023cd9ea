package neighbors

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

func TestChoose(t *testing.T) {
	on := func(link int, addr string) links.Unresolved {
		return links.Unresolved{Addr: netip.MustParseAddr(addr), Link: link}
	}
	failed := func(u links.Unresolved) links.Unresolved { u.Failed = true; return u }
	hop := func(u links.Unresolved) links.Gateway { return links.Gateway{Addr: u.Addr, Interface: u.Link} }
	const lan, away, tunnel, lo = 2, 3, 4, 1
	live, live6, dead := on(lan, "10.0.0.2"), on(lan, "2001:db8::2"), on(lan, "10.0.0.3")
	router, router6 := on(lan, "10.0.0.254"), on(lan, "fe80::1")
	d := Desired{
		Interfaces: []lb.Interface{{Index: lan, Up: true}, {Index: away}, {Index: tunnel, Up: true, NoARP: true},
			{Index: lo, Up: true, Loopback: true}},
		Nodes: map[netip.Addr]bool{live.Addr: true, live6.Addr: true, dead.Addr: false},
	}
	for name, c := range map[string]struct {
		unresolved []links.Unresolved
		nextHops   []links.Gateway
		want       []question
		silent     map[key]bool
	}{
		"nothing is missing": {nil, []links.Gateway{hop(router)}, nil, nil},
		"live Nodes, of both families": {[]links.Unresolved{live6, live}, nil,
			[]question{{live, true}, {live6, true}}, nil},
		"a dead Node is asked for and not awaited": {[]links.Unresolved{dead, live}, nil,
			[]question{{live, true}, {dead, false}}, nil},
		"a dead Node that is a next hop": {[]links.Unresolved{dead}, []links.Gateway{hop(dead)},
			[]question{{dead, false}}, nil},
		"next hops": {[]links.Unresolved{router6, router}, []links.Gateway{hop(router), hop(router6)},
			[]question{{router, true}, {router6, true}}, nil},
		"a neighbor that no route needs":  {[]links.Unresolved{router}, nil, nil, nil},
		"a next hop of another link":      {[]links.Unresolved{on(away, "fe80::1")}, []links.Gateway{hop(router6)}, nil, nil},
		"a link without a carrier":        {[]links.Unresolved{on(away, "10.0.0.2")}, nil, nil, nil},
		"a tunnel, which asks for nobody": {[]links.Unresolved{on(tunnel, "10.0.0.2")}, nil, nil, nil},
		"the loopback interface":          {[]links.Unresolved{on(lo, "10.0.0.2")}, nil, nil, nil},
		"an interface that is not known":  {[]links.Unresolved{on(9, "10.0.0.2")}, nil, nil, nil},
		"given up, which no packet waits for": {[]links.Unresolved{failed(live), router}, []links.Gateway{hop(router)},
			[]question{{router, true}, {failed(live), true}}, nil},
		"a next hop that is silent": {[]links.Unresolved{router}, []links.Gateway{hop(router)},
			[]question{{router, false}}, map[key]bool{{router.Addr, lan}: true}},
		"a Node is awaited all the same": {[]links.Unresolved{live}, []links.Gateway{hop(live)},
			[]question{{live, true}}, map[key]bool{{live.Addr, lan}: true}},
	} {
		if got := choose(d, c.nextHops, c.unresolved, c.silent); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// TestChooseHasABound: questions are broadcasts. Those that are awaited go first.
func TestChooseHasABound(t *testing.T) {
	d := Desired{Interfaces: []lb.Interface{{Index: 2, Up: true}}, Nodes: map[netip.Addr]bool{}}
	var unresolved []links.Unresolved
	for i := range 1000 {
		addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		d.Nodes[addr] = i >= 990
		unresolved = append(unresolved, links.Unresolved{Addr: addr, Link: 2, Failed: i%2 == 0})
	}
	got := choose(d, nil, unresolved, nil)
	if len(got) != askMost {
		t.Fatalf("%d questions, want %d", len(got), askMost)
	}
	for i, q := range got {
		if q.awaited != (i < 10) || q.Failed != (i >= 5 && i < 10) {
			t.Errorf("question %d: %+v", i, q)
		}
	}
}

func TestReturned(t *testing.T) {
	addr := []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}
	up, down := lb.Interface{Index: 2, Up: true, Addresses: addr}, lb.Interface{Index: 2, Addresses: addr}
	pod := lb.Interface{Index: 3, Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("fe80::3/64")}}
	tunnel := lb.Interface{Index: 4, Up: true, NoARP: true, Addresses: addr}
	for _, c := range []struct {
		before, now []lb.Interface
		want        bool
	}{
		{[]lb.Interface{down}, []lb.Interface{up}, true},
		{nil, []lb.Interface{up}, true},
		{[]lb.Interface{up}, []lb.Interface{up, pod, tunnel}, false},
		{[]lb.Interface{up}, []lb.Interface{down}, false},
		{[]lb.Interface{{Index: 7, Up: true, Addresses: addr}}, []lb.Interface{up}, true},
	} {
		if got := returned(c.before, c.now); got != c.want {
			t.Errorf("from %v to %v: %v, want %v", fmt.Sprint(c.before), fmt.Sprint(c.now), got, c.want)
		}
	}
}
