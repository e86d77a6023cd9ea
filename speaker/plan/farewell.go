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
	if service.Type != lb.LoadBalancer {
		// The controller waits for this before it removes the finalizer, and all else with it.
		stale = service.Finalizer && (service.Announcements != "" || slices.ContainsFunc(service.Conditions,
			func(c lb.Condition) bool { return c.Type == lb.ConditionAnnounced && c.Status }))
	}
	if !stale || f.Stopping || service.Class != class ||
		Winner(netip.Addr{}, f.Live) != f.Self {
		return nil
	}
	condition := lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoAddress,
		Message: "the Service holds no address"}
	switch {
	case service.Deleting:
		condition.Message = "the Service is being deleted"
	case service.Headless:
		condition.Reason, condition.Message = lb.ReasonHeadless, "the label "+lb.LabelHeadless+" takes the Service down"
	}
	return &lb.AnnouncedStatus{Condition: condition}
}
