package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Farewell returns the status for a Service that has lost its addresses but still shows that they
// are announced. It returns nil if the Service shows no such thing, if it is not of the class, or
// if another node writes the status.
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
