package gate

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Endpoints says what a node can deliver of one VIP of a Service going by its endpoints alone,
// where another proxy than Landfall's forwards: whether that one has programmed the kernel is not
// known, so it is taken for granted. It counts what lb.Choose chooses for the ports, without asking that about each of
// them: nobody refuses a Service here that has too many ports and endpoints.
func Endpoints(s lb.Service, vip netip.Addr, all []lb.Slice, node string) lb.Delivery {
	all = slices.DeleteFunc(slices.Clone(all), func(slice lb.Slice) bool { return slice.Family != lb.FamilyOf(vip) })
	ports := readyAt(s.Ports, all, node)
	cluster, local := counter{}, counter{}
	for _, slice := range all {
		var served, anywhere, idle, idleHere bool // whether that is so of one of the ports
		for _, p := range slice.Ports {
			if has := ports[portID{p.Name, p.Protocol}]; has != nil {
				served, anywhere = true, anywhere || !has.hinted || !has.near
				idle, idleHere = idle || !has.any, idleHere || !has.here
			}
		}
		if !served {
			continue
		}
		for _, ep := range slice.Endpoints {
			switch here := isOn(node, ep); {
			case ep.Ready:
				cluster.add(ep, anywhere || slices.Contains(ep.ForNodes, node))
				local.add(ep, here)
			case ep.Serving && ep.Terminating:
				cluster.add(ep, idle)
				local.add(ep, here && idleHere)
			}
		}
	}
	d := lb.Delivery{Service: s.Key, VIP: vip, Policy: s.ExternalPolicy}
	d.Ready, d.Serving = cluster.counts()
	d.LocalReady, d.LocalServing = local.counts()
	return d
}

func isOn(node string, ep lb.Endpoint) bool { return ep.Node != "" && ep.Node == node }

// portID is what a slice knows a port by.
type portID struct {
	name     string
	protocol lb.Protocol
}

// ready is what is known of the ready endpoints of a port: whether there are any, and some on the node, whether hints
// assign all to nodes, and some to this one.
type ready struct{ any, here, hinted, near bool }

// readyAt returns what is known of the ready endpoints of ports, each slice gone through once.
func readyAt(ports []lb.ServicePort, all []lb.Slice, node string) map[portID]*ready {
	of := make(map[portID]*ready, len(ports))
	for _, p := range ports {
		of[portID{p.Name, p.Protocol}] = &ready{hinted: true}
	}
	for _, slice := range all {
		has := ready{hinted: true}
		for _, ep := range slice.Endpoints {
			if ep.Ready {
				has.any, has.here = true, has.here || isOn(node, ep)
				has.hinted, has.near = has.hinted && len(ep.ForNodes) > 0, has.near || slices.Contains(ep.ForNodes, node)
			}
		}
		for _, p := range slice.Ports {
			if port := of[portID{p.Name, p.Protocol}]; port != nil {
				port.any, port.here = port.any || has.any, port.here || has.here
				port.hinted, port.near = port.hinted && has.hinted, port.near || has.near
			}
		}
	}
	return of
}

// counter counts endpoints over the ports of a Service: an endpoint that is ready for one of them
// counts as ready.
type counter map[netip.Addr]bool

func (c counter) add(ep lb.Endpoint, counts bool) {
	if counts {
		c[ep.Addr] = c[ep.Addr] || ep.Ready
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
