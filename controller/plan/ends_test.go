package plan

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A Service that has another class now, and a status of another controller's, keeps the finalizer: who wrote the status
// may need it.
func TestFinalizerOfAnotherClass(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(*lb.Service)
		release bool
	}{
		"no load balancer": {func(s *lb.Service) { s.Type = lb.ClusterIP }, true},
		"an address":       {func(s *lb.Service) { s.Ingress[0].Addr = netip.MustParseAddr("172.18.0.3") }, false},
		"a hostname":       {func(s *lb.Service) { s.Ingress, s.Hostnames = nil, 1 }, false},
		"nothing":          {func(s *lb.Service) { s.Ingress = nil }, true},
	} {
		s := lb.Service{Key: lb.Key{Namespace: "shop", Name: "web"}, UID: "u", Type: lb.LoadBalancer, Class: "x",
			Ingress: []lb.Ingress{{Addr: netip.MustParseAddr("10.0.0.1")}}, Finalizer: true,
			Conditions: []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned,
				Message: "10.0.0.1 from pool p"}}}
		test.change(&s)
		e := &entry{Service: s}
		if got := e.end(); got.Release != test.release {
			t.Errorf("%s: the finalizer goes: %v", name, got.Release)
		}
		if s.Type == lb.LoadBalancer && s.Hostnames > 0 && asAssigned(&s) {
			t.Errorf("%s counts as assigned", name)
		}
	}
}

// Another load balancer has left an address of no pool beside one of a pool, which the condition confirms with other
// words than one alone.
func TestADeletedServiceThatHoldsAnotherAddressBesideEnds(t *testing.T) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/29")(w)
	service("a", preferDual, holds("fd00::1", "10.0.0.1"))(w)
	w.settle(t, false)
	a := w.services[key("a")]
	a.Finalizer = true
	if !Protected(&a) {
		t.Errorf("it does not count as Landfall's: %v", a.Conditions)
	}
}
