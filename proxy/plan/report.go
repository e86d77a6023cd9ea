package plan

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Report says what the node delivers of a Service: for each VIP, and for its health port. It never
// says more than the kernel is confirmed to hold (applied), nor more than is still wanted
// (desired), so an endpoint counts only if it is in both. failure is why the last attempt to apply
// desired did not succeed; nil while it is merely under way.
func Report(desired, applied Service, failure error) []lb.Delivery {
	var deliveries []lb.Delivery
	for _, vip := range desired.VIPs {
		deliveries = append(deliveries, deliver(desired, applied, failure, vip))
	}
	return deliveries
}

func deliver(desired, applied Service, failure error, vip netip.Addr) lb.Delivery {
	d := lb.Delivery{Service: desired.Key, VIP: vip, Policy: desired.Policy}
	want, have := portsOf(desired, vip), portsOf(applied, vip)
	if d.Refusal = desired.deniedAt(vip); d.Refusal == nil {
		d.Refusal = refusal(want, have, failure, vip)
	}
	if d.Refusal != nil {
		return d
	}
	var cluster, local counter
	for _, p := range want {
		held, ok := applied.port(p)
		if !ok {
			continue
		}
		// What comes from outside reaches the set of the policy that the kernel follows now.
		reached := held.Backends.For(held.External)
		local.add(p.Backends.Local, reached)
		if desired.Policy == lb.Local {
			reached = held.Backends.Cluster // where else there are endpoints, whether or not this node sends there
		}
		cluster.add(p.Backends.Cluster, reached)
	}
	d.Ready, d.Serving = cluster.counts()
	d.LocalReady, d.LocalServing = local.counts()
	return d
}

// deniedAt returns why the Service does not get a port of its VIP; nil if it gets all of them. The
// ports that it gets are in the kernel all the same.
func (s Service) deniedAt(vip netip.Addr) *lb.Refusal {
	for _, d := range s.Denied {
		if d.Kind == LoadBalancer && d.Addr == vip {
			return &d.Refusal
		}
	}
	return nil
}

func refusal(want, have []Port, failure error, vip netip.Addr) *lb.Refusal {
	switch {
	case len(want) == 0:
		return lb.Refuse(lb.ReasonNotProgrammed,
			"the Service has no %s cluster IP, or no ports, so nothing can be programmed for %s", lb.FamilyOf(vip), vip)
	case errors.As(failure, new(TooLarge)) && !reflect.DeepEqual(want, have):
		return lb.Refuse(lb.ReasonNotProgrammed, "the Service is too large: %v", failure)
	case failure != nil && !reflect.DeepEqual(want, have):
		return lb.Refuse(lb.ReasonNotProgrammed, "the kernel refused the rules for %s: %v", vip, failure)
	case len(have) == 0:
		return lb.Refuse(lb.ReasonNotProgrammed, "the kernel has not confirmed the rules for %s yet", vip)
	}
	return nil // what was programmed stays so while a newer plan is under way
}

// portsOf returns the ports that have a frontend on vip, without their other frontends.
func portsOf(s Service, vip netip.Addr) []Port {
	var ports []Port
	for _, p := range s.Ports {
		p.Frontends = slices.DeleteFunc(slices.Clone(p.Frontends),
			func(f Frontend) bool { return f.Kind != LoadBalancer || f.Addr != vip })
		p.Serving = nil // concerns flows, not rules
		if len(p.Frontends) > 0 {
			ports = append(ports, p)
		}
	}
	return ports
}

// Health returns, for each address family in which the Service needs a health server, how many
// ready endpoints of this node the rules in the kernel deliver to. Endpoints count by address: two
// ports of one pod are one.
func Health(desired, applied Service) map[lb.Family]int {
	if desired.HealthPort == 0 {
		return nil
	}
	counts := map[lb.Family]int{}
	for _, family := range desired.Families() {
		var local counter
		for _, p := range desired.Only(family).Ports {
			if held, ok := applied.port(p); ok && held.External == lb.Local {
				local.add(p.Backends.Local, held.Backends.Local)
			}
		}
		counts[family], _ = local.counts()
	}
	return counts
}

// counter counts endpoints by address.
type counter struct{ ready, serving map[netip.Addr]bool }

// add counts the wanted backends that are also reached.
func (c *counter) add(wanted, reached []lb.Backend) {
	if c.ready == nil {
		c.ready, c.serving = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	}
	held := make(map[netip.AddrPort]bool, len(reached))
	for _, b := range reached {
		held[b.Addr] = true
	}
	for _, b := range wanted {
		switch {
		case !held[b.Addr]:
		case b.Ready:
			c.ready[b.Addr.Addr()] = true
		default:
			c.serving[b.Addr.Addr()] = true
		}
	}
}

func (c *counter) counts() (ready, serving int) {
	for addr := range c.serving {
		if !c.ready[addr] {
			serving++
		}
	}
	return len(c.ready), serving
}
