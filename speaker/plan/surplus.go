package plan

import (
	"fmt"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// MaxVIPs is how many VIPs the Services of a cluster have at most: speakers tell one another of no
// more, and announce none beyond.
const MaxVIPs = 1 << 16

// Surplus says why VIPs beyond MaxVIPs are not announced.
func Surplus(vips []netip.Addr) *lb.Refusal {
	which := vips[0].String()
	if more := len(vips) - 1; more > 0 {
		which += fmt.Sprintf(" and %d more", more)
	}
	return lb.Refuse(lb.ReasonTooManyVIPs, "no node announces %s: %s, those that the controller has confirmed "+
		"first, and then those of the oldest Services", which, Describe(lb.ReasonTooManyVIPs))
}

// SurplusStatus returns the status for a Service whose VIPs are all beyond MaxVIPs; nil if another
// node writes it.
func SurplusStatus(f Facts, vips []netip.Addr) *lb.AnnouncedStatus {
	if f.Stopping || Winner(vips[0], f.Live) != f.Self {
		return nil
	}
	why := Surplus(vips)
	return &lb.AnnouncedStatus{Condition: lb.Condition{Type: lb.ConditionAnnounced, Reason: why.Reason,
		Message: why.Message}}
}
