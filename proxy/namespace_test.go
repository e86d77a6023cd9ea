package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// room lets the Services of a namespace have so many endpoints together.
func room(limit int) func(*settings) {
	return func(s *settings) {
		s.limit, s.unit = limit, "endpoints"
		s.needs = func(s plan.Service) (n int) {
			for _, p := range s.Ports {
				n += len(p.Backends.Cluster)
			}
			return n
		}
	}
}

// confirmed makes steps until all that was planned is in the kernel.
func (b *bench) confirmed() {
	b.t.Helper()
	for range 4 { // who gets room by another's change is planned one step later
		b.run()
		b.rules.confirm()
	}
	b.run()
}

// Contract clauses 10 and 11: what the Services of a namespace need together has a bound. Who has a place stays
// served and announced with what it has; who comes or grows beyond the bound is told. Another namespace notices
// nothing, and who waits gets the room that others leave.
func TestContract11ANamespaceHasABound(t *testing.T) {
	b := newBench(t, room(4))
	b.synced()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.put("b", "198.51.100.2", "10.200.1.3", "10.200.1.4")
	b.confirmed()
	elsewhere := lb.Key{Namespace: "elsewhere", Name: "x"}
	b.put("x", "198.51.100.9", "10.200.1.9", "10.200.1.10", "10.200.1.11")
	svc, _ := b.services.Get(key("x"))
	svc.Key, svc.HealthCheckNodePort = elsewhere, 0
	endpoints, _ := b.slices.Get(key("x"))
	endpoints[0].Service = elsewhere
	b.services.Delete(key("x"))
	b.slices.Delete(key("x"))
	b.services.Set(elsewhere, svc)
	b.slices.Set(elsewhere, endpoints)
	b.mark(elsewhere)
	b.put("c", "198.51.100.3", "10.200.1.5")
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2", "10.200.1.6")
	b.confirmed()
	check := func(what, x, a, second, c string) {
		t.Helper()
		got := []string{"", b.delivery("a", "198.51.100.1"), b.delivery("b", "198.51.100.2"), b.delivery("c", "198.51.100.3")}
		if d := b.records[elsewhere].deliveries[0]; d.Refusal == nil {
			got[0] = "served"
		}
		if want := []string{x, a, second, c}; !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	check("the namespace is full", "served", "2", "2", "refused")
	for name, of := range map[string]string{"a": "3 endpoints", "c": "1 endpoints"} {
		said := func(w string) bool {
			return strings.HasPrefix(w, name+" TooLarge here: ") && strings.Contains(w, of) &&
				strings.Contains(w, "the 4 that all Services")
		}
		if !slices.ContainsFunc(b.warnings, said) {
			t.Errorf("no Event for %s: %q", name, b.warnings)
		}
	}
	if d := b.records[key("c")].deliveries[0]; !strings.HasPrefix(d.Refusal.Message, "the Service is too large: ") ||
		d.Refusal.Reason != lb.ReasonNotProgrammed {
		t.Errorf("delivery %+v", d)
	}
	b.delete("b")
	b.confirmed()
	check("one has gone", "served", "3", "", "1")
	for _, name := range []string{"a", "c"} {
		if r := b.records[key(name)]; r.planned.Excess != nil || len(r.advice) > 0 || r.state() != stateApplied {
			t.Errorf("%s: excess %v, advice %v, state %s", name, r.planned.Excess, r.advice, r.state())
		}
	}
}

// A rolling update in a full namespace goes on: the new endpoints come when the old ones have gone.
func TestAFullNamespaceRollsItsEndpoints(t *testing.T) {
	b := newBench(t, room(2))
	b.synced()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.confirmed()
	for _, step := range []struct {
		endpoints []string
		want      string
	}{
		{[]string{"10.200.1.1", "10.200.1.2", "10.200.1.3"}, "2"},
		{[]string{"10.200.1.2", "10.200.1.3"}, "2"},
		{[]string{"10.200.1.3", "10.200.1.4"}, "2"},
	} {
		b.put("a", "198.51.100.1", step.endpoints...)
		b.confirmed()
		b.expectDelivery("a", "198.51.100.1", step.want)
	}
}

// A rolling update in a full namespace that is quicker than the kernel's rules keeps its endpoints.
func TestAFullNamespaceRollsItsEndpointsQuickly(t *testing.T) {
	b := newBench(t, room(2))
	b.synced()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.confirmed()
	for _, endpoints := range [][]string{{"10.200.1.1", "10.200.1.2", "10.200.1.3"}, {"10.200.1.3", "10.200.1.4"},
		{"10.200.1.3", "10.200.1.4", "10.200.1.5"}} {
		b.put("a", "198.51.100.1", endpoints...)
		b.run()
	}
	var got []string
	for _, backend := range b.rules.wanted[key("a")].Ports[0].Backends.Cluster {
		got = append(got, backend.Addr.Addr().String())
	}
	if want := []string{"10.200.1.3", "10.200.1.4"}; !slices.Equal(got, want) {
		t.Errorf("endpoints %v, want %v", got, want)
	}
}

// A Service that has become too large for itself is told so, no longer waits for room in its namespace, and needs there
// what it still has.
func TestContract11WhoIsTooLargeTakesNoRoom(t *testing.T) {
	b := newBench(t, room(4))
	b.synced()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.put("b", "198.51.100.2", "10.200.1.3", "10.200.1.4")
	b.confirmed()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2", "10.200.1.5") // waits
	b.put("c", "198.51.100.3", "10.200.1.6")                             // waits, too
	b.confirmed()
	svc, _ := b.services.Get(key("a"))
	few := svc.Ports
	for i := range 1 << 14 { // more frontends than one Service may have
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.TCP, Port: uint16(1000 + i)})
	}
	b.services.Set(key("a"), svc)
	b.mark(key("a"))
	b.run()
	b.expectDelivery("a", "198.51.100.1", "refused")
	b.confirmed()
	b.delete("b")
	b.confirmed()
	b.expectDelivery("a", "198.51.100.1", "refused")
	b.expectDelivery("c", "198.51.100.3", "1")
	if r := b.records[key("a")]; r.planned.Excess == nil || r.planned.Excess.Together {
		t.Errorf("excess %v", r.planned.Excess)
	}
	b.put("d", "198.51.100.4", "10.200.1.7")
	b.confirmed()
	b.expectDelivery("d", "198.51.100.4", "1")
	svc.Ports = few
	b.services.Set(key("a"), svc)
	b.mark(key("a"))
	b.confirmed()
	if r := b.records[key("a")]; r.planned.Excess == nil || !r.planned.Excess.Together {
		t.Errorf("excess %v, although it waits for room", r.planned.Excess)
	}
}

// What the kernel's writer refuses takes no room either.
func TestContract11WhatTheWriterRefusesTakesNoRoom(t *testing.T) {
	b := newBench(t, room(4))
	b.synced()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.confirmed()
	b.put("a", "198.51.100.1", "10.200.1.1", "10.200.1.2", "10.200.1.3", "10.200.1.4")
	b.put("c", "198.51.100.3", "10.200.1.5", "10.200.1.6")
	b.run()
	b.rules.confirm()
	b.rules.outcomes[key("a")] = plan.Outcome{Applied: b.records[key("a")].applied, Alone: []lb.Family{lb.IPv4},
		Err: plan.TooLarge{Elements: 200_000, Limit: 131_072}}
	b.confirmed()
	b.expectDelivery("a", "198.51.100.1", "refused")
	b.expectDelivery("c", "198.51.100.3", "2")
	if of := b.rules.wanted[key("a")].Ports[0].Backends.Cluster; len(of) != 2 {
		t.Errorf("the kernel has %v", of)
	}
}

// At a start the oldest Services of a namespace get the room, whatever they are called, and what a restart of the
// proxy finds is what there was.
func TestContract6TheOldestGetRoomAtAStart(t *testing.T) {
	for _, oldest := range []string{"a", "z"} {
		b := newBench(t, room(2))
		for i, name := range []string{"a", "z"} {
			b.put(name, []string{"198.51.100.1", "198.51.100.2"}[i], "10.200.1.1", "10.200.1.2")
			svc, _ := b.services.Get(key(name))
			if svc.Created = time.Unix(2000, 0); name == oldest {
				svc.Created = time.Unix(1000, 0)
			}
			b.services.Set(key(name), svc)
		}
		b.synced()
		b.confirmed()
		want := map[string]string{"a": "refused", "z": "refused"}
		want[oldest] = "2"
		b.expectDelivery("a", "198.51.100.1", want["a"])
		b.expectDelivery("z", "198.51.100.2", want["z"])
	}
}

// Contract clauses 10 and 11: the Services of a namespace remember clients in as much of the kernel's memory as they may
// together. One beyond that is served all the same, is told, and gets the places that another one leaves; another
// namespace notices nothing.
func TestContract11AffinityOfANamespaceHasABound(t *testing.T) {
	b := newBench(t)
	b.mode = modeNftables
	b.affinity = plan.NewAffinityShares(1, 1)
	b.synced()
	affine := func(name string, timeout time.Duration) {
		svc, _ := b.services.Get(key(name))
		svc.AffinityTimeout = timeout
		b.services.Set(key(name), svc)
		b.mark(key(name))
	}
	for i, name := range []string{"a", "b", "c", "plain"} {
		b.put(name, fmt.Sprintf("198.51.100.%d", 1+i), "10.200.1.1", "10.200.1.2")
		if name != "plain" {
			affine(name, time.Hour)
		}
	}
	b.confirmed()
	elsewhere := lb.Key{Namespace: "elsewhere", Name: "a"}
	b.putLike(key("a"), elsewhere, "10.96.7.7")
	b.confirmed()
	check := func(what string, a, second, c plan.Places) {
		t.Helper()
		for k, want := range map[lb.Key]plan.Places{key("a"): a, key("b"): second, key("c"): c,
			key("plain"): plan.ManyPlaces, elsewhere: plan.ManyPlaces} {
			if got := b.rules.wanted[k]; got.Places != want || len(got.Ports) == 0 {
				t.Errorf("%s: %s has %d, want %d; %d ports", what, k, got.Places, want, len(got.Ports))
			}
		}
		for _, name := range []string{"a", "b", "c"} {
			r := b.records[key(name)]
			if told := len(r.advice) > 0; told != (r.planned.Places == plan.NoPlaces) || r.state() != stateApplied {
				t.Errorf("%s: %s is %s, and told %v", what, name, r.state(), r.advice)
			}
		}
	}
	check("with three", plan.ManyPlaces, plan.FewPlaces, plan.NoPlaces)
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "c SchedulerIgnored here: spec.sessionAffinity: ClientIP:") {
		t.Errorf("told %q", b.warnings)
	}
	b.moveEndpoints("b")
	b.confirmed()
	check("once one has changed", plan.ManyPlaces, plan.FewPlaces, plan.NoPlaces)
	affine("b", 0)
	b.confirmed()
	check("once one does without", plan.ManyPlaces, plan.ManyPlaces, plan.FewPlaces)
	affine("b", time.Hour)
	b.confirmed()
	check("once it asks again", plan.ManyPlaces, plan.NoPlaces, plan.FewPlaces)
	affine("a", 0)
	b.confirmed()
	check("once the first does without", plan.ManyPlaces, plan.ManyPlaces, plan.FewPlaces)
}

// Contract clause 11: a Service whose clients are not remembered needs more, and has no more than there is room for.
func TestContract11AServiceWithoutPlacesNeedsRoom(t *testing.T) {
	b := newBench(t, func(s *settings) {
		s.limit, s.unit = 10, "elements"
		s.needs = func(s plan.Service) int {
			if s.Places == plan.NoPlaces {
				return 100
			}
			return len(s.Ports)
		}
	})
	b.mode = modeNftables
	b.affinity = plan.NewAffinityShares(1, 1)
	b.synced()
	for i, name := range []string{"a", "b", "c"} {
		b.put(name, fmt.Sprintf("198.51.100.%d", 1+i), "10.200.1.1", "10.200.1.2")
		b.change(name, func(s *lb.Service) { s.AffinityTimeout = time.Hour })
	}
	b.confirmed()
	for name, served := range map[string]bool{"a": true, "b": true, "c": false} {
		if got := b.rules.wanted[key(name)]; (len(got.Ports) > 0) != served || got.Places == plan.NoPlaces {
			t.Errorf("%s has %d ports, and places %d", name, len(got.Ports), got.Places)
		}
	}
	if len(b.warnings) == 0 || !strings.HasPrefix(b.warnings[0], "c TooLarge") {
		t.Errorf("told %q", b.warnings)
	}
	b.change("a", func(s *lb.Service) { s.AffinityTimeout = 0 })
	b.confirmed()
	if got := b.rules.wanted[key("c")]; len(got.Ports) == 0 || got.Places == plan.NoPlaces {
		t.Errorf("once one does without, it has %d ports, and places %d", len(got.Ports), got.Places)
	}
}

// Contract clause 11: a Service that is too large has the places of the plan that stays, which count, and one that has
// none gets none by that.
func TestContract11WhatIsTooLargeKeepsItsPlaces(t *testing.T) {
	b := newBench(t, func(s *settings) {
		s.limit, s.unit = 1000, "elements"
		s.needs = func(s plan.Service) int {
			if s.Places == plan.NoPlaces {
				return 100 * len(s.Ports)
			}
			return len(s.Ports)
		}
	})
	b.mode = modeNftables
	b.affinity = plan.NewAffinityShares(1, 1)
	b.synced()
	affine := func(names ...string) {
		for _, name := range names {
			b.put(name, fmt.Sprintf("198.51.100.%d", name[0]), "10.200.1.1", "10.200.1.2")
			b.change(name, func(s *lb.Service) { s.AffinityTimeout = time.Hour })
			b.confirmed()
		}
	}
	check := func(what string, want map[string]plan.Places) {
		t.Helper()
		for name, places := range want {
			if got := b.rules.wanted[key(name)]; got.Places != places || len(got.Ports) == 0 {
				t.Errorf("%s: %s has places %d, want %d; %d ports", what, name, got.Places, places, len(got.Ports))
			}
		}
	}
	affine("a", "b", "c")
	have := map[string]plan.Places{"a": plan.ManyPlaces, "b": plan.FewPlaces, "c": plan.NoPlaces}
	check("at first", have)
	for name := range have {
		had, _ := b.slices.Get(key(name))
		b.slices.Set(key(name), append([]lb.Slice{tooMany(name)}, had...))
		b.markEndpoints(key(name))
		b.confirmed()
		if b.records[key(name)].planned.Excess == nil {
			t.Errorf("%s is not too large", name)
		}
	}
	check("too large", have)
	if held := b.shares.Held(key("c")); held != 100 {
		t.Errorf("what c keeps counts as %d, want 100, as its clients are not remembered", held)
	}
	affine("d")
	have["d"] = plan.NoPlaces
	check("one more", have)
	b.change("a", func(s *lb.Service) { s.UID = "another" })
	b.confirmed()
	if got := b.rules.wanted[key("a")]; len(got.Ports) > 0 {
		t.Errorf("another Service has %d ports of the one before", len(got.Ports))
	}
	delete(have, "a")
	have["c"] = plan.ManyPlaces
	check("once the one with many is gone", have)
}
