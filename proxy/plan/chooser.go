package plan

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// chooser chooses the endpoints for the ports of one Service. Ports for which all slices have one
// number differ in that number alone, so that they are chosen once: what a Service costs does not
// grow with its ports times its endpoints.
type chooser struct {
	endpoints []lb.Slice
	at        lb.Place
	first     map[lb.Family]chosen
}

type chosen struct {
	backends lb.Usable
	serving  []netip.AddrPort
}

func (c chooser) port(port lb.ServicePort, family lb.Family) chosen {
	number, same := c.number(port, family)
	if first, ok := c.first[family]; ok && same {
		return first.withPort(number)
	}
	now := chosen{
		lb.Choose(c.endpoints, port.Name, port.Protocol, family, c.at), serving(c.endpoints, port, family),
	}
	if same {
		c.first[family] = now
	}
	return now
}

// number returns the number that all slices of a family have for a port, once each.
func (c chooser) number(port lb.ServicePort, family lb.Family) (number uint16, same bool) {
	for _, slice := range c.endpoints {
		if slice.Family != family {
			continue
		}
		times := 0
		for _, p := range slice.Ports {
			if p.Name != port.Name || p.Protocol != port.Protocol {
				continue
			}
			if times++; same && p.Port != number {
				return 0, false
			}
			number = p.Port
		}
		if times != 1 {
			return 0, false
		}
		same = true
	}
	return number, same
}

func (c chosen) withPort(number uint16) chosen {
	move := func(from []lb.Backend) []lb.Backend {
		to := append([]lb.Backend(nil), from...)
		for i := range to {
			to[i].Addr = netip.AddrPortFrom(to[i].Addr.Addr(), number)
		}
		return to
	}
	to := append([]netip.AddrPort(nil), c.serving...)
	for i := range to {
		to[i] = netip.AddrPortFrom(to[i].Addr(), number)
	}
	return chosen{lb.Usable{Cluster: move(c.backends.Cluster), Local: move(c.backends.Local)}, to}
}
