package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// soleVIPs returns those of a Service's VIPs that have no other use than Services: an IPAddressPool
// contains such a VIP, and neither a Node nor a pod has it.
func (e ExternalIPs) soleVIPs(vips []netip.Addr) []netip.Addr {
	var sole []netip.Addr
	for _, vip := range vips {
		if e.pool(vip) != "" && e.Nodes.refuse(vip) == nil {
			sole = append(sole, vip)
		}
	}
	return sole
}

// pool returns the first by name of the pools that contain an address; "" if none does.
func (e ExternalIPs) pool(addr netip.Addr) string {
	first := ""
	for name, ranges := range e.Pools {
		if (first == "" || name < first) && slices.ContainsFunc(ranges, func(r lb.Range) bool { return r.Contains(addr) }) {
			first = name
		}
	}
	return first
}
