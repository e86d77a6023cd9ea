package plan

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// A tenant with a quota of one address creates and deletes Services, or has one Service ask for one address
// after the other. What is kept for it leaves the pool's other addresses to others.
func TestContract11QuarantineKeepsToTheQuota(t *testing.T) {
	for _, churn := range []struct {
		name  string
		quota int
		do    func(i int) []change
	}{
		{"Services come and go", 1, func(i int) []change {
			return []change{service(fmt.Sprint("s", i)), noService(fmt.Sprint("s", i-1))}
		}},
		{"a Service asks for one after the other", 2, func(i int) []change {
			return []change{service("a", asks(fmt.Sprint("10.0.0.", i%16)))}
		}},
	} {
		for _, quarantine := range []time.Duration{time.Minute, -1} {
			w := newWorld(Config{})
			newPool("p", "10.0.0.0/28")(w)
			edit("p", func(p *lb.Pool) { p.PerNamespace, p.Quarantine = churn.quota, quarantine })(w)
			for i := range 40 {
				for _, do := range churn.do(i) {
					do(w)
				}
				pass(time.Second)(w)
				if p := w.settle(t, false).Pools["p"].Families[lb.IPv4]; p.Busy > churn.quota+1 {
					t.Fatalf("%s, kept for %s: %d addresses are in use or kept after %d steps, with a quota of %d", churn.name,
						quarantine, p.Busy, i+1, churn.quota)
				}
			}
		}
	}
}

// A tenant without a quota has most of a pool in quarantine. Services of others get what it has beyond its share, what
// it freed first before the rest; a Service that returns gets its address back while others have enough.
func TestContract11QuarantineKeepsToItsShare(t *testing.T) {
	for _, quarantine := range []time.Duration{time.Minute, -1} {
		w := newWorld(Config{})
		newPool("p", "10.0.0.0/28")(w)
		edit("p", func(p *lb.Pool) { p.Quarantine = quarantine })(w)
		for i := range 16 {
			service(fmt.Sprint("s", i))(w)
			w.settle(t, false)
		}
		for i := range 16 {
			noService(fmt.Sprint("s", i))(w)
			pass(time.Second)(w)
			w.settle(t, false)
		}
		service("s3")(w)
		w.settle(t, false)
		if got := w.services[key("s3")].Ingress[0].Addr.String(); got != "10.0.0.3" {
			t.Errorf("kept for %s: who returns gets %s", quarantine, got)
		}
		service("s-new")(w)
		w.settle(t, false)
		if got := w.services[key("s-new")].Ingress; len(got) > 0 {
			t.Errorf("kept for %s: the namespace itself gets %v", quarantine, got)
		}
		var got []string
		for i := range 16 {
			name := fmt.Sprint("other", i)
			service(name)(w)
			s := w.services[key(name)]
			delete(w.services, s.Key)
			s.Key.Namespace = "other"
			w.services[s.Key] = s
			w.settle(t, false)
			for _, in := range w.services[s.Key].Ingress {
				got = append(got, in.Addr.String()[len("10.0.0."):])
			}
		}
		if want := "0 1 2 4 5 6 7 8 9 10 11 12 13"; strings.Join(got, " ") != want { // 14 and 15 are its share
			t.Errorf("kept for %s: others get %v, want %s", quarantine, got, want)
		}
	}
}

// Many Services that end, with the longest names that there are, leave a status that is small, with the newest of
// their addresses and how many there are.
func TestContract11QuarantineListsAFewOfMany(t *testing.T) {
	long := strings.Repeat("n", 63)
	all := keptAddresses{at: map[netip.Addr]lb.Released{}, of: map[lb.Key][]netip.Addr{}}
	pools := newPools(map[string]lb.Pool{"p": {Name: "p", Quarantine: -1,
		Ranges: []lb.Range{parsed("2001:db8:1111:2222:3333:4444:1111:0/112")}}}, never{})
	addr := netip.MustParseAddr("2001:db8:1111:2222:3333:4444:1111:1000")
	var last netip.Addr
	for i := range 5000 {
		all.add(lb.Released{Addr: addr, Service: lb.Key{Namespace: long, Name: long}, At: time.Unix(int64(i), 0).UTC()},
			pools)
		addr, last = addr.Next(), addr
	}
	list := all.list("p", pools)
	if list.counts[lb.IPv6] != 5000 {
		t.Errorf("counts %v", list.counts)
	}
	var shown []v1beta1.ReleasedAddress
	for _, r := range list.newest {
		shown = append(shown, v1beta1.ReleasedAddress{Address: r.Addr.String(), Namespace: r.Service.Namespace,
			Name: r.Service.Name, At: metav1.NewTime(r.At)})
	}
	written, err := json.Marshal(shown)
	if err != nil || len(written) > maxReleasedSize+2 || len(written) < maxReleasedSize*9/10 {
		t.Errorf("%d bytes with %d addresses, %v", len(written), len(shown), err)
	}
	if !slices.ContainsFunc(list.newest, func(r lb.Released) bool { return r.Addr == last }) {
		t.Errorf("the newest is not listed, %v", last)
	}
}

// While the write that refuses an address to who merely shows it is under way, the address is not known to be assigned
// to that one: its holder may go in just that moment.
func TestContract11WhatIsShownIsNotAssignedByAWrite(t *testing.T) {
	w := newWorld(Config{})
	for _, do := range []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) { p.Quarantine = time.Minute }),
		in("shop", "web"), service("guest", kind(lb.ClusterIP), asksPool("nope"))} {
		do(w)
	}
	w.settle(t, false)
	service("guest", kind(lb.LoadBalancer), holds("10.0.0.0"))(w)
	w.tellBook(nil)
	s := w.services[key("guest")]
	w.book.Set(s, Pending{UID: s.UID, Version: s.Version, Addresses: addresses(s)}, w.now)
	noWeb(w)
	d := w.tellBook(nil).Services[s.Key]
	if _, kept := w.book.kept.at[testAddr("10.0.0.0")]; !kept || len(lb.Confirmed(*d.Condition)) > 0 {
		t.Errorf("kept: %v, decides %v", kept, d.Condition)
	}
}

// A Service leaves an address to one that has found it and that the API server refuses, so that it was never given to
// that one. Clients know the address all the same, so it is kept for the one that was given it.
func TestContract11ASharedAddressIsKeptForTheLastThatWasGivenIt(t *testing.T) {
	for _, moves := range []bool{false, true} {
		w := newWorld(Config{})
		newPool("p", "10.0.0.1-10.0.0.1")(w)
		edit("p", func(p *lb.Pool) { p.Quarantine = time.Hour })(w)
		w.book.SetPools(w.pools, w.nodes)
		set := func(name string, tweaks ...func(*lb.Service)) lb.Service {
			service(name, tweaks...)(w)
			s := w.services[key(name)]
			w.book.Set(s, Pending{}, w.now)
			return s
		}
		get := func(name string) []netip.Addr { return w.book.Plan(w.now).Services[key(name)].Addresses }
		set("given", shares("k", 80), holds("10.0.0.1"))
		get("given")
		denied := set("denied", shares("k", 81))
		underWay := Pending{UID: denied.UID, Version: denied.Version, Addresses: get("denied")}
		if len(underWay.Addresses) != 1 {
			t.Fatalf("what shares the address gets %v", underWay.Addresses)
		}
		w.book.Set(denied, underWay, w.now)
		w.book.Delete(key("given"), w.now)
		if moves { // it goes on as the only one that has the address
			underWay.Possible = []netip.Addr{netip.MustParseAddr("10.0.0.9")}
			w.book.Set(denied, underWay, w.now)
		}
		w.book.Plan(w.now)
		w.book.Refuse(denied.Key, true, true)
		w.book.Set(denied, Pending{}, w.now)
		set("stranger")
		if got := get("stranger"); got != nil {
			t.Errorf("moves=%v: a stranger gets %v within the quarantine", moves, got)
		}
		set("given", shares("k", 80), holds())
		if got := get("given"); !slices.Equal(got, underWay.Addresses) {
			t.Errorf("moves=%v: who was given the address gets %v when it returns", moves, got)
		}
	}
}
