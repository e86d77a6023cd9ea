package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
)

// lostTo returns a path that lacks a way to some endpoints, by the last number of their addresses.
func lostTo(ends ...string) Path {
	p := Path{Lost: map[netip.Addr]*lb.Refusal{}}
	for _, end := range ends {
		p.Lost[addr("192.168.0."+end)] = lb.Refuse(lb.ReasonPodRouteMissing, "no route to %s", end)
	}
	return p
}

// Contract clause 1: a node delivers a VIP only if its kernel has a way to a usable endpoint.
func TestContract1ThePathCounts(t *testing.T) {
	off := Path{Off: lb.Refuse(lb.ReasonConntrackFull, "full")}
	for _, tt := range []struct {
		name      string
		endpoints string
		change    []func(*lb.Service)
		path      Path
		want      lb.Reason
		rules     string // the endpoints that rules deliver to
		health    int
	}{
		{"Cluster, all lost", "1 here, 2 there", nil, lostTo("1", "2"), lb.ReasonPodRouteMissing, "1 2", 0},
		{"Cluster, one lost", "1 here, 2 there", nil, lostTo("1"), "", "2", 0},
		{"Cluster, another's lost", "1 here, 2 there", nil, lostTo("7"), "", "1 2", 0},
		{"Local, own lost", "1 here, 2 there", []func(*lb.Service){local}, lostTo("1"), lb.ReasonPodRouteMissing, "1", 0},
		{"Local, one of two own lost", "1 here, 3 here", []func(*lb.Service){local}, lostTo("1"), "", "3", 1},
		{"Local, those of others lost", "1 here, 2 there", []func(*lb.Service){local}, lostTo("2"), "", "1", 1},
		{"Local, only terminating ones elsewhere reached", "1 here, 2 there terminating", []func(*lb.Service){local},
			lostTo("1"), lb.ReasonPodRouteMissing, "1", 0},
		{"Local, none here, the others lost", "2 there", []func(*lb.Service){local}, lostTo("2"), lb.ReasonNoLocalBackends,
			"", 0},
		{"no endpoints", "", nil, lostTo("1"), lb.ReasonNoBackends, "", 0},
		{"nothing is delivered", "1 here", []func(*lb.Service){local}, off, lb.ReasonConntrackFull, "1", 0},
		{"no endpoints and nothing is delivered", "", nil, off, lb.ReasonNoBackends, "", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(service(tt.change...), slice(tt.endpoints), here).Reaching(tt.path.Lost)
			d := Report(s, s, nil, tt.path)[0]
			if got := d.Deliverable(); got != tt.want {
				t.Errorf("deliverable: %q, want %q", got, tt.want)
			}
			var rules []string
			for _, b := range s.Ports[0].Backends.For(s.Policy) {
				rules = append(rules, strings.TrimPrefix(b.Addr.Addr().String(), "192.168.0."))
			}
			if got := strings.Join(rules, " "); got != tt.rules {
				t.Errorf("the rules deliver to %q, want %q", got, tt.rules)
			}
			if h := Health(s, s, tt.path)[lb.IPv4]; s.HealthPort != 0 && h != tt.health {
				t.Errorf("the health port counts %d, want %d", h, tt.health)
			}
		})
	}
}

// What is delivered to the node's own addresses alone is not forwarded.
func TestReportSaysWhatIsNotForwarded(t *testing.T) {
	own := Path{Own: []netip.Addr{addr("192.168.0.1"), addr("192.168.0.4")}}
	for _, tt := range []struct {
		name      string
		endpoints string
		change    []func(*lb.Service)
		want      bool
	}{
		{"Cluster, the node alone", "1 here", nil, true},
		{"Cluster, two addresses of the node", "1 here, 4 here terminating", nil, true},
		{"Cluster, and a pod", "1 here, 3 here", nil, false},
		{"Cluster, and another node", "1 here, 2 there", nil, false},
		{"Local, the node alone", "1 here, 2 there", []func(*lb.Service){local}, true},
		{"Local, and a pod", "1 here, 3 here", []func(*lb.Service){local}, false},
		{"Local, and a pod that terminates and gets nothing", "1 here, 3 here terminating", []func(*lb.Service){local}, true},
		{"Local, a pod", "3 here, 1 there", []func(*lb.Service){local}, false},
		{"Local, none here", "2 there", []func(*lb.Service){local}, false},
		{"no endpoints", "", nil, false},
	} {
		s := New(service(tt.change...), slice(tt.endpoints), here)
		if d := Report(s, s, nil, own)[0]; d.OnNode != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, d.OnNode, tt.want)
		}
		if d := Report(s, s, nil, Path{})[0]; d.OnNode {
			t.Errorf("%s, the node has no address: it is so", tt.name)
		}
	}
}

// What is left out of a plan stays in the plan that it was made from, which others hold.
func TestReachingCopies(t *testing.T) {
	whole := New(service(dual), slice("1 here, 2 there"), here)
	again := New(service(dual), slice("1 here, 2 there"), here)
	if s := whole.Reaching(lostTo("1").Lost); len(s.Ports[0].Backends.Cluster) != 1 {
		t.Errorf("backends: %v", s.Ports[0].Backends.Cluster)
	}
	if d := cmp.Diff(again, whole, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); d != "" {
		t.Errorf("the plan has changed:\n%s", d)
	}
	why := lb.Refuse(lb.ReasonPodRouteMissing, "no route")
	one, two := Target{Addr: addr("192.168.0.1"), Pod: true}, Target{Addr: addr("192.168.0.2")}
	// What is lost as a pod is not lost as something else.
	if lost := (Lost{one: why, two: why}).Of([]Target{{Addr: one.Addr}, two}); len(lost) != 1 || lost[two.Addr] != why {
		t.Errorf("lost are %v", lost)
	}
}

func TestLostIsCounted(t *testing.T) {
	route, carrier := lb.Refuse(lb.ReasonPodRouteMissing, "no route"), lb.Refuse(lb.ReasonNoCarrier, "no carrier")
	at := func(a string) Target { return Target{Addr: addr(a)} }
	one, two, three := at("192.168.0.1"), at("192.168.0.2"), at("192.168.0.3")
	lost, count := Lost{}, map[lb.Reason]int{}
	for _, step := range []struct {
		changes Lost
		want    map[lb.Reason]int
	}{
		{Lost{one: route, two: route}, map[lb.Reason]int{lb.ReasonPodRouteMissing: 2}},
		{Lost{one: carrier, two: route, three: nil}, map[lb.Reason]int{lb.ReasonPodRouteMissing: 1, lb.ReasonNoCarrier: 1}},
		{nil, map[lb.Reason]int{lb.ReasonPodRouteMissing: 1, lb.ReasonNoCarrier: 1}},
		{Lost{two: nil}, map[lb.Reason]int{lb.ReasonNoCarrier: 1}},
		{Lost{one: nil}, map[lb.Reason]int{}},
	} {
		lost.Take(step.changes, count)
		sum := 0
		for _, n := range step.want {
			sum += n
		}
		if d := cmp.Diff(step.want, count); d != "" || len(lost) != sum {
			t.Errorf("after %v: %v, counts (-want +got):\n%s", step.changes, lost, d)
		}
	}
}

func TestWay(t *testing.T) {
	pod, other := Target{Addr: addr("10.1.0.2"), Pod: true}, Target{Addr: addr("198.51.100.1")}
	for _, tt := range []struct {
		name         string
		way          Way
		to           Target
		defaultRoute bool
		want         lb.Reason
	}{
		{"a route of its own", Way{Kind: lb.RouteOwn}, pod, false, ""},
		{"unknown", Way{}, pod, false, ""},
		{"none", Way{Kind: lb.RouteNone}, pod, true, lb.ReasonPodRouteMissing},
		{"none to what is no pod", Way{Kind: lb.RouteNone}, other, false, lb.ReasonPodRouteMissing},
		{"the default route to a pod", Way{Kind: lb.RouteDefault}, pod, false, lb.ReasonPodRouteMissing},
		{"the default route in a network that knows pods", Way{Kind: lb.RouteDefault}, pod, true, ""},
		{"the default route to what is no pod", Way{Kind: lb.RouteDefault}, other, false, ""},
		{"no carrier", Way{Kind: lb.RouteOwn, Down: true}, pod, false, lb.ReasonNoCarrier},
		{"no forwarding", Way{Kind: lb.RouteOwn, Unforwarded: true}, pod, false, lb.ReasonForwardingOff},
		{"the node itself", Way{Kind: lb.RouteOwn, Local: true, Unforwarded: true, Down: true}, other, false, ""},
	} {
		var got lb.Reason
		if refusal := tt.way.Refuse(tt.to, "here", tt.defaultRoute); refusal != nil {
			got = refusal.Reason
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestTargets(t *testing.T) {
	nodes := NewNodes(map[string]lb.Node{"there": {Name: "there", Addresses: []netip.Addr{addr("192.0.2.9")}}})
	all := slice("1 there, 2 here, 3 there")[:1]
	all[0].Endpoints = append(all[0].Endpoints, lb.Endpoint{Addr: addr("192.0.2.9"), Node: "there"},
		lb.Endpoint{Addr: addr("198.51.100.1")}, lb.Endpoint{Addr: addr("192.168.0.2"), Node: "here"})
	want := []Target{{addr("192.168.0.2"), true}, {addr("192.168.0.1"), true}, {addr("192.168.0.3"), true},
		{addr("192.0.2.9"), false}, {addr("198.51.100.1"), false}}
	equal := cmpopts.EquateComparable(netip.Addr{})
	if d := cmp.Diff(want, nodes.Targets(all, "here", 10), equal); d != "" {
		t.Errorf("targets (-want +got):\n%s", d)
	}
	if d := cmp.Diff(want[:2], nodes.Targets(all, "here", 2), equal); d != "" {
		t.Errorf("the first two (-want +got):\n%s", d)
	}
}
