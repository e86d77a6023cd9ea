package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Farewell corrects what a Service shows that has lost its addresses; nil when it shows nothing
// wrong, is not of the class, or another node corrects it.
func Farewell(f Facts, class string, service lb.Service) *lb.AnnouncedStatus {
	stale := service.Announcements != "" ||
		slices.ContainsFunc(service.Conditions, func(c lb.Condition) bool { return c.Type == lb.ConditionAnnounced })
	if !stale || f.Stopping || service.Type != lb.LoadBalancer || service.Class != class ||
		Winner(netip.Addr{}, f.Live) != f.Self {
		return nil
	}
	return &lb.AnnouncedStatus{Condition: lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoAddress,
		Message: "the Service holds no address"}}
}
