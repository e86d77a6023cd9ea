package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
)

// confirms has the condition confirm an address that the status need not show.
func confirms(addr string) func(*lb.Service) {
	return func(s *lb.Service) {
		shown := s.Ingress
		restored(addr)(s)
		s.Ingress = shown
	}
}

// emptiedStories have programs that take addresses out of statuses, or write others in their place.
var emptiedStories = []story{
	{name: "a status is emptied once, without a quarantine", steps: []step{
		{name: "an older one waits", do: []change{newPool("p", "10.0.0.0/32"), service("old", kind(lb.ClusterIP)),
			service("a")}, want: map[string]string{"a": "10.0.0.0 Assigned", "old": "-"}},
		{name: "and goes on waiting", do: []change{service("old", kind(lb.LoadBalancer))},
			want: map[string]string{"old": "- PoolExhausted"}},
		{name: "the status is emptied", do: []change{service("a", holds())}},
		{name: "others show the address", do: []change{service("a", holds()), service("old", holds("10.0.0.0"))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
	}},
	{name: "another address is written over the one that was assigned", steps: []step{
		{name: "of the pool", do: []change{newPool("p", "10.0.0.0/29"), service("a"), service("a", holds("10.0.0.5"))},
			want: map[string]string{"a": "10.0.0.5 Assigned"}},
		{name: "and another", do: []change{service("a", holds("10.0.0.6"))}, moves: []string{"a"}},
		{name: "of no pool", do: []change{service("a", holds("172.18.0.3"))}, moves: []string{"a"}},
	}},
	{name: "a status is emptied while the address is in no pool", steps: []step{
		{name: "left its pool", do: []change{newPool("p", "10.0.0.0/29"), service("a"), service("b")},
			want: map[string]string{"a": "10.0.0.0 Assigned", "b": "10.0.0.1 Assigned"}},
		{name: "there is no other", do: []change{newPool("p", "10.1.0.0/32"), service("a", asksPool("nope")),
			service("b", holds())}, moves: []string{"b"},
			want: map[string]string{"a": "10.0.0.0 PoolNotFound", "b": "10.1.0.0 Assigned"}},
		{name: "is emptied", do: []change{service("a", holds(), asksPool(""))}, moves: []string{"a"},
			want: map[string]string{"a": "- PoolExhausted"}},
		{name: "it is in a pool again", do: []change{newPool("p", "10.0.0.0/29", "10.1.0.0/32"), service("a", holds())},
			want: map[string]string{"a": "10.0.0.0 Assigned"}},
	}},
	{name: "another load balancer serves Services, and Landfall has no pool of theirs", steps: []step{
		{name: "it gives addresses", do: []change{service("a", marked, holds("172.18.0.1")),
			service("b", marked, holds("172.18.0.9"))},
			want: map[string]string{"a": "172.18.0.1 HeldOutside", "b": "172.18.0.9 HeldOutside"}},
		{name: "another one", do: []change{service("a", holds("172.18.0.2"))}, moves: []string{"a"},
			want: map[string]string{"a": "172.18.0.2 NoPool"}},
		{name: "the former one to another Service", do: []change{service("b", holds("172.18.0.1"))},
			moves: []string{"b"}, want: map[string]string{"b": "172.18.0.1 NoPool"}},
		{name: "none", do: []change{service("a", holds())}, moves: []string{"a"},
			want: map[string]string{"a": "- NoPool"}},
	}},
	{name: "a condition confirms what others hold", steps: []step{
		{name: "hold", do: []change{newPool("p", "10.0.0.0/29"), service("old", kind(lb.ClusterIP)), in("shop", "web")},
			want: map[string]string{"old": "-", "web": "10.0.0.0 Assigned"}},
		{name: "an older one comes back without its address",
			do:   []change{service("old", kind(lb.LoadBalancer), confirms("10.0.0.0"))},
			want: map[string]string{"old": "10.0.0.1 Assigned"}},
		{name: "and asks for it", do: []change{service("old", holds(), confirms("10.0.0.0"), asks("10.0.0.0"))},
			moves: []string{"old"}, want: map[string]string{"old": "- AddressTaken"}},
	}},
}

func TestContract8EmptiedStories(t *testing.T) {
	for _, s := range bothFamilies(emptiedStories) {
		for _, lagging := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/lagging=%v", s.name, lagging), func(t *testing.T) { tell(t, s, false, lagging) })
		}
	}
}

// A tenant has Landfall write to its Service late or never, takes the confirmed address out of the status, asks for
// another one, and writes the address into the status again once another Service has asked for it. The condition says
// all the time that the tenant's, which is older, has the address.
func TestContract8WhatAConditionConfirmsNobodyElseGets(t *testing.T) {
	tenant, web := key("tenant"), lb.Key{Namespace: "shop", Name: "web"}
	for name, test := range map[string]struct {
		leaves  change
		pending bool // a write that shows another address is on its way, and the API server refuses it
	}{
		"no write goes out":                   {leaves: service("tenant", holds(), asks("10.0.0.6"))},
		"a write is refused":                  {leaves: service("tenant", holds(), asks("10.0.0.6")), pending: true},
		"another address is written":          {leaves: service("tenant", holds("10.0.0.6"))},
		"it is of another type, unprotected":  {leaves: service("tenant", holds(), kind(lb.ClusterIP))},
		"it is taken down":                    {leaves: service("tenant", holds(), headless(true))},
		"it has another class meanwhile":      {leaves: service("tenant", holds(), class("x"))},
		"it has another class and an address": {leaves: service("tenant", holds("172.18.0.3"), class("x"))},
		"it is deleted, and something keeps it": {leaves: service("tenant", holds(), func(s *lb.Service) {
			s.Deleting = true
		})},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(Config{})
			newPool("p", "10.0.0.0/28")(w)
			service("tenant", asks("10.0.0.5"))(w)
			w.settle(t, false)
			pass := func(pending Pending) {
				for range 3 {
					w.book.Set(w.services[tenant], pending, w.now) // as when it is to be written again
					p := w.tellBook(nil)
					if pending.UID == "" {
						w.compare(t, p)
					}
					if d, ok := p.Services[web]; ok {
						w.apply(web, d)
					}
				}
			}
			test.leaves(w)
			pass(Pending{})
			pending := Pending{}
			if s := w.services[tenant]; test.pending {
				pending = Pending{UID: s.UID, Version: s.Version, Addresses: []netip.Addr{testAddr("10.0.0.6")}}
			}
			w.now = w.now.Add(time.Hour)
			in("shop", "web", asks("10.0.0.5"))(w)
			pass(pending)
			service("tenant", holds("10.0.0.5"), asks(), kind(lb.LoadBalancer), headless(false), class(""))(w)
			pass(Pending{})
			if s := w.services[web]; len(s.Ingress) > 0 || s.Conditions[0].Reason != lb.ReasonAddressTaken {
				t.Errorf("web holds %v: %v", addresses(s), s.Conditions)
			}
		})
	}
}

// Tenants of two namespaces write into the statuses of their Services and empty them, while Landfall writes some late.
// No address is confirmed for two of them, and none is taken from who asks for no other.
func TestContract8RandomStatuses(t *testing.T) {
	// In it a Service gets an address while nodes may still announce it for another one of the namespace, which is no
	// load balancer any more.
	found := []uint64{459324592}
	seeds.Run(t, seeds.Of(100, 1000), found, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(Config{MoveDuplicates: r.IntN(2) == 0})
		newPool("p", "10.0.0.0-10.0.0.6")(w)
		edit("p", func(p *lb.Pool) {
			p.ShareAcross, p.Quarantine = r.IntN(2) == 0, time.Duration(r.IntN(2))*time.Minute
		})(w)
		for range 60 {
			before := maps.Clone(w.services)
			randomStatus(r)(w)
			for range 2 {
				late := map[lb.Key]bool{}
				for _, k := range slices.SortedFunc(maps.Keys(w.services), lb.Key.Compare) {
					if late[k] = r.IntN(3) == 0; late[k] {
						w.book.Set(w.services[k], Pending{}, w.now) // as when it is to be written again
					}
				}
				for k, d := range w.tellBook(nil).Services {
					if !late[k] && !w.shows(k, d) {
						w.apply(k, d)
					}
				}
			}
			confirmedOnce(t, w, before)
			if t.Failed() {
				t.FailNow()
			}
		}
	})
}

func randomStatus(r *rand.Rand) change {
	namespace := []string{"default", "shop"}[r.IntN(2)]
	name := fmt.Sprintf("%s%d", namespace, r.IntN(5))
	one, two := fmt.Sprintf("10.0.0.%d", r.IntN(8)), fmt.Sprintf("10.0.0.%d", r.IntN(8))
	var tweak func(*lb.Service)
	switch r.IntN(13) {
	case 0, 1, 2:
		tweak = kind(lb.LoadBalancer)
	case 3, 4, 5:
		tweak = holds()
	case 6:
		tweak = holds(one)
	case 7:
		tweak = holds(one, two)
	case 8:
		tweak = asks(one)
	case 9:
		tweak = request(func(r *lb.Request) { r.Addresses, r.Pool = nil, "" })
	case 10:
		tweak = asksPool("nope")
	case 11:
		tweak = func(s *lb.Service) { s.Type, s.Ingress, s.Finalizer = lb.ClusterIP, nil, one < two }
	default:
		return pass(time.Duration(r.IntN(90)) * time.Second)
	}
	return in(namespace, name, tweak)
}

// confirmedOnce fails if conditions confirm an address for two Services, or no more for one that asks for no other.
func confirmedOnce(t *testing.T, w *world, before map[lb.Key]lb.Service) {
	t.Helper()
	of := map[netip.Addr]lb.Key{}
	for k, s := range w.services {
		var confirmed []netip.Addr
		for _, c := range s.Conditions {
			confirmed = lb.Confirmed(c)
		}
		for _, addr := range confirmed {
			if other, twice := of[addr]; twice && other != k {
				t.Errorf("%s is confirmed for both %s and %s", addr, k, other)
			}
			of[addr] = k
		}
		was := before[k]
		if s.Type != lb.LoadBalancer || len(s.Request.Addresses) > 0 || s.Request.Pool != "" || len(was.Conditions) == 0 {
			continue
		}
		for _, addr := range lb.Confirmed(was.Conditions[0]) {
			if !slices.Contains(confirmed, addr) {
				t.Errorf("%s was taken from %s: %v", addr, k, s.Conditions)
			}
		}
	}
}

// Of a status that is full of what somebody wrote, what the condition confirms counts first.
func TestContract11ConfirmedAddressesCountBesideAFullStatus(t *testing.T) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/29", "fd00::/120")(w)
	service("a", preferDual, confirms("10.0.0.1"))(w)
	full := w.services[key("a")]
	for i := range lb.MaxAddresses {
		full.Ingress = append(full.Ingress, lb.Ingress{Addr: netip.MustParseAddr(fmt.Sprintf("fd00::%x", i))})
	}
	w.services[full.Key] = full
	d := w.tellBook(nil).Services[full.Key]
	if len(d.Addresses) > lb.MaxAddresses || !slices.Contains(d.Addresses, testAddr("10.0.0.1")) {
		t.Errorf("%d addresses: %v", len(d.Addresses), d.Addresses)
	}
}
