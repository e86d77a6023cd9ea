package main

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// farewell corrects what a Service shows that has lost its addresses; nil when it shows nothing
// wrong or another node corrects it.
func (s *speaker) farewell(key lb.Key) *lb.AnnouncedStatus {
	service, ok := s.from.services.Get(key)
	stale := service.Announcements != "" ||
		slices.ContainsFunc(service.Conditions, func(c lb.Condition) bool { return c.Type == lb.ConditionAnnounced })
	if !ok || !stale || s.stopping || service.Type != lb.LoadBalancer || service.Class != s.class ||
		plan.Winner(netip.Addr{}, s.from.members.Live()) != s.self {
		return nil
	}
	return &lb.AnnouncedStatus{Condition: lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoAddress,
		Message: "the Service holds no address"}}
}

// report says what is to be written to a Service, if it is for this node to say.
func (s *speaker) report(key lb.Key) {
	if len(s.vips[key]) == 0 {
		s.tellReporter(key, s.farewell(key))
		return
	}
	var decisions []plan.Decision
	for _, vip := range s.vips[key] {
		decisions = append(decisions, s.decisions[vip])
	}
	if s.stopping {
		decisions = nil // the heir reports
	}
	if r, ok := plan.Summarize(s.self, decisions); ok {
		status := r.Status()
		s.tellReporter(key, &status)
	} else {
		s.tellReporter(key, nil)
	}
}

func (s *speaker) tellReporter(key lb.Key, status *lb.AnnouncedStatus) {
	s.to.report.Update(map[lb.Key]*lb.AnnouncedStatus{key: status})
}
