package plan

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestFarewell corrects what a Service shows that is announced no more, and leaves others alone.
func TestFarewell(t *testing.T) {
	announced := lb.Condition{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced}
	service := func(tweak func(*lb.Service)) lb.Service {
		s := lb.Service{Type: lb.LoadBalancer, Announcements: "data", Conditions: []lb.Condition{announced}}
		tweak(&s)
		return s
	}
	winner := Winner(vip, []string{w178})
	for name, test := range map[string]struct {
		tweak func(*lb.Service)
		want  lb.Reason
		says  string
	}{
		"without an address": {func(*lb.Service) {}, lb.ReasonNoAddress, "the Service holds no address"},
		"being deleted": {func(s *lb.Service) { s.Deleting = true }, lb.ReasonNoAddress,
			"the Service is being deleted"},
		"taken down": {func(s *lb.Service) { s.Headless = true }, lb.ReasonHeadless,
			"the label service.kubernetes.io/headless takes the Service down"},
		"of another class": {func(s *lb.Service) { s.Class = "x" }, "", ""},
		"never announced":  {func(s *lb.Service) { s.Announcements, s.Conditions = "", nil }, "", ""},
		"another type":     {func(s *lb.Service) { s.Type = lb.ClusterIP }, "", ""},
		"another type, for which the controller waits": {func(s *lb.Service) { s.Type, s.Finalizer = lb.ClusterIP, true },
			lb.ReasonNoAddress, "the Service holds no address"},
		"another type, and it waits no more": {func(s *lb.Service) {
			s.Type, s.Finalizer, s.Announcements, s.Conditions[0].Status = lb.ClusterIP, true, "", false
		}, "", ""},
	} {
		f := facts(winner)
		f.Live = []string{winner}
		got := Farewell(f, "", service(test.tweak))
		switch {
		case got == nil && test.want == "":
		case got == nil || got.Condition.Reason != test.want || got.Condition.Message != test.says || got.Condition.Status:
			t.Errorf("%s: %+v, want %s: %s", name, got, test.want, test.says)
		}
	}
}
