package gate

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Endpoints says what a node can deliver of one VIP of a Service going by its endpoints alone,
// where another proxy than Landfall's forwards: whether that one has programmed the kernel is not
// known, so it is taken for granted.
func Endpoints(s lb.Service, vip netip.Addr, slices []lb.Slice, node string) lb.Delivery {
	d := lb.Delivery{Service: s.Key, VIP: vip, Policy: s.ExternalPolicy}
	var all, local counter
	for _, port := range s.Ports {
		usable := lb.Choose(slices, port.Name, port.Protocol, lb.FamilyOf(vip), lb.Place{Node: node})
		all.add(usable.Cluster)
		local.add(usable.Local)
	}
	d.Ready, d.Serving = all.counts()
	d.LocalReady, d.LocalServing = local.counts()
	return d
}

// counter counts endpoints over the ports of a Service: an endpoint that is ready for one of them
// counts as ready.
type counter map[netip.Addr]bool

func (c *counter) add(backends []lb.Backend) {
	if *c == nil {
		*c = counter{}
	}
	for _, b := range backends {
		(*c)[b.Addr.Addr()] = (*c)[b.Addr.Addr()] || b.Ready
	}
}

func (c counter) counts() (ready, serving int) {
	for _, isReady := range c {
		if isReady {
			ready++
		} else {
			serving++
		}
	}
	return ready, serving
}
