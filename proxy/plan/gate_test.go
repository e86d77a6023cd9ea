package plan

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestAdmit(t *testing.T) {
	at := lb.Place{Node: "here", Zone: "a"}
	waits, plain, far, ending := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"),
		netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("10.0.0.4")
	all := []lb.Slice{
		{Family: lb.IPv4, Endpoints: []lb.Endpoint{
			{Addr: waits, Node: "here", Pod: "waits"}, {Addr: plain, Node: "here", Pod: "plain"},
			{Addr: far, Node: "there", Pod: "far"}, {Addr: ending, Node: "here", Serving: true, Terminating: true},
			{Addr: netip.MustParseAddr("10.0.0.5"), Node: "here", Ready: true, Serving: true, ForZones: []string{"a"}},
		}},
		{Family: lb.IPv4, Endpoints: []lb.Endpoint{{Addr: waits, Node: "here", Pod: "waits"},
			{Addr: netip.MustParseAddr("10.0.0.6"), Node: "here"}}},
	}
	var unready []netip.Addr
	for _, ep := range Unready(all, "here") {
		unready = append(unready, ep.Addr)
	}
	if want := []netip.Addr{waits, plain, waits}; !slices.Equal(unready, want) {
		t.Errorf("not ready: %v, want %v", unready, want)
	}
	before := all[0].Endpoints[0]
	got := Admit(all, at, func(ep lb.Endpoint) bool {
		return ep.Addr == waits || ep.Addr == far || ep.Addr == ending
	})
	for i, want := range []bool{true, false, false, false, true} {
		if got[0].Endpoints[i].Ready != want {
			t.Errorf("endpoint %d: ready %v, want %v", i, !want, want)
		}
	}
	if !got[1].Endpoints[0].Ready {
		t.Error("the second slice was left alone")
	}
	if diff := cmp.Diff(before, all[0].Endpoints[0], cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("it changed what others share:\n%s", diff)
	}
	// Hints of the others stay valid, and none keeps it from its node.
	others := []lb.Slice{{Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 80}}, Endpoints: []lb.Endpoint{
		{Addr: waits, Node: "here"},
		{Addr: far, Node: "there", Ready: true, Serving: true, ForZones: []string{"b"}},
	}}}
	usable := lb.Choose(Admit(others, at, func(ep lb.Endpoint) bool { return ep.Addr == waits }), "", lb.TCP, lb.IPv4, at)
	if len(usable.Cluster) != 1 || usable.Cluster[0].Addr.Addr() != waits {
		t.Errorf("with hints, this node uses %v", usable.Cluster)
	}
	// Without any of theirs it gets none: they would tell nodes apart that are to choose alike.
	alone := []lb.Slice{{Family: lb.IPv4, Ports: others[0].Ports, Endpoints: others[0].Endpoints[:1]}}
	if hinted(Admit(alone, at, func(ep lb.Endpoint) bool { return ep.Addr == waits })) {
		t.Error("an endpoint that waits alone has hints, and is not forwarded directly")
	}
}

func TestGateOpens(t *testing.T) {
	since := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	a, b := lb.Key{Namespace: "shop", Name: "a"}, lb.Key{Namespace: "shop", Name: "b"}
	vip := netip.MustParseAddr("192.0.2.1")
	done, not := Standing{Programmed: true}, Standing{}
	awaits := Standing{true, vip, lb.ReasonNotEstablished}
	for _, tt := range []struct {
		name     string
		services map[lb.Key]Standing
		after    time.Duration
		want     lb.Reason
		message  string
		again    time.Duration
	}{
		{"no Service yet", nil, time.Second, "", "", time.Second},
		{"no Service", nil, GateSettle, lb.ReasonNoService, "no Service names the pod as an endpoint", 0},
		{"all", map[lb.Key]Standing{a: done, b: done}, 0, lb.ReasonProgrammed, "the rules of n deliver to the pod", 0},
		{"one of two", map[lb.Key]Standing{a: done, b: not}, 10 * time.Second, "", "", 20 * time.Second},
		{"one of two is announced", map[lb.Key]Standing{a: done, b: awaits}, 10 * time.Second, "", "", 20 * time.Second},
		{"in vain", map[lb.Key]Standing{a: not, b: not}, 30 * time.Second, lb.ReasonTimedOut,
			"the rules of n did not deliver to the pod for shop/a, shop/b within 30s", 0},
		{"announced in vain", map[lb.Key]Standing{a: done, b: awaits}, 30 * time.Second, lb.ReasonTimedOut,
			"n did not announce 192.0.2.1 for shop/b (NotEstablished) within 30s", 0},
		{"both in vain", map[lb.Key]Standing{a: not, b: awaits}, 30 * time.Second, lb.ReasonTimedOut, "the rules of n did " +
			"not deliver to the pod for shop/a, and n did not announce 192.0.2.1 for shop/b (NotEstablished) within 30s", 0},
		{"late", map[lb.Key]Standing{a: done}, time.Hour, lb.ReasonProgrammed, "the rules of n deliver to the pod", 0},
	} {
		opening, again := Gate{since, tt.services}.Open("n", since.Add(tt.after), 30*time.Second)
		var got Opening
		if opening != nil {
			got = *opening
		}
		if got != (Opening{tt.want, tt.message}) || again != tt.again {
			t.Errorf("%s: %+v, again %s; want %s %q, %s", tt.name, got, again, tt.want, tt.message, tt.again)
		}
	}
}

// TestContract1WhichAddressesAPodWaitsFor: with policy Local those that its node is to announce, with policy Cluster
// those that no node announces.
func TestContract1WhichAddressesAPodWaitsFor(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	here := lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Elsewhere: true}
	nowhere := lb.Unannounced{Reason: lb.ReasonProbing}
	web, other := lb.Key{Namespace: "default", Name: "web"}, lb.Key{Namespace: "other", Name: "first"}
	about := func(service lb.Key, elsewhere bool) map[netip.Addr]lb.Unannounced {
		return map[netip.Addr]lb.Unannounced{v4: {Reason: lb.ReasonNoLocalBackends, Service: service.Sum(), Elsewhere: elsewhere}}
	}
	both := func(lb.Family) bool { return true }
	only := func(family lb.Family) func(lb.Family) bool { return func(f lb.Family) bool { return f == family } }
	for _, c := range []struct {
		name        string
		policy      lb.TrafficPolicy
		unannounced map[netip.Addr]lb.Unannounced
		concerned   func(lb.Family) bool
		vip         netip.Addr
		why         lb.Reason
	}{
		{"announced, Local", lb.Local, nil, both, netip.Addr{}, ""},
		{"announced, Cluster", lb.Cluster, nil, both, netip.Addr{}, ""},
		{"by another node, Local", lb.Local, map[netip.Addr]lb.Unannounced{v4: here}, both, v4, lb.ReasonNoLocalBackends},
		{"by another node, Cluster", lb.Cluster, map[netip.Addr]lb.Unannounced{v4: here}, both, netip.Addr{}, ""},
		{"by no node, Local", lb.Local, map[netip.Addr]lb.Unannounced{v4: nowhere}, both, v4, lb.ReasonProbing},
		{"by no node, Cluster", lb.Cluster, map[netip.Addr]lb.Unannounced{v4: nowhere}, both, v4, lb.ReasonProbing},
		{"the second address", lb.Local, map[netip.Addr]lb.Unannounced{v6: here}, both, v6, lb.ReasonNoLocalBackends},
		{"a pod of the other family", lb.Local, map[netip.Addr]lb.Unannounced{v6: here}, only(lb.IPv4), netip.Addr{}, ""},
		{"a pod of its family", lb.Local, map[netip.Addr]lb.Unannounced{v6: here}, only(lb.IPv6), v6,
			lb.ReasonNoLocalBackends},
		{"for this Service, which shares the address, Local", lb.Local, about(web, true), both, v4, lb.ReasonNoLocalBackends},
		{"for the Service that it joined, Local", lb.Local, about(other, true), both, netip.Addr{}, ""},
		{"for the Service that it joined, Local, by no node", lb.Local, about(other, false), both, netip.Addr{}, ""},
		{"for the Service that it joined, Cluster", lb.Cluster, about(other, true), both, netip.Addr{}, ""},
		{"for the Service that it joined, Cluster, by no node", lb.Cluster, about(other, false), both, v4,
			lb.ReasonNoLocalBackends},
		{"of another Service", lb.Local, map[netip.Addr]lb.Unannounced{netip.MustParseAddr("192.0.2.2"): here}, both,
			netip.Addr{}, ""},
	} {
		vip, why := Awaited(Service{Key: web, Policy: c.policy, VIPs: []netip.Addr{v4, v6}},
			func(vip netip.Addr) lb.Unannounced { return c.unannounced[vip] }, c.concerned)
		if vip != c.vip || why != c.why {
			t.Errorf("%s: waits for %s (%s), want %s (%s)", c.name, vip, why, c.vip, c.why)
		}
	}
}
