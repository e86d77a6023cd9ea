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
	if !stale || f.Stopping || service.Type != lb.LoadBalancer || service.Class != class ||
		Winner(netip.Addr{}, f.Live) != f.Self {
		return nil
	}
	return &lb.AnnouncedStatus{Condition: lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoAddress,
		Message: "the Service holds no address"}}
}
