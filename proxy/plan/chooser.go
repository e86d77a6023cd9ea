package plan

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// chooser chooses the endpoints for the ports of one Service. Ports for which all slices have one
// number differ in that number alone, so that they are chosen once: what a Service costs does not
// grow with its ports times its endpoints.
type chooser struct {
	at      lb.Place
	weights lb.Weights
	places  map[portID][]place
	// slices is how many slices with endpoints there are.
	slices map[lb.Family]int
	first  map[lb.Family]chosen
}

// portID is what a slice knows a port by.
type portID struct {
	family   lb.Family
	name     string
	protocol lb.Protocol
}

// place is where endpoints of a slice listen for a port.
type place struct {
	slice     int // which of those with endpoints
	number    uint16
	endpoints []lb.Endpoint
}

func newChooser(endpoints []lb.Slice, at lb.Place) chooser {
	c := chooser{at, nil, map[portID][]place{}, map[lb.Family]int{}, map[lb.Family]chosen{}}
	for _, slice := range endpoints {
		if len(slice.Endpoints) == 0 {
			continue
		}
		c.slices[slice.Family]++
		for _, p := range slice.Ports {
			id := portID{slice.Family, p.Name, p.Protocol}
			c.places[id] = append(c.places[id], place{c.slices[slice.Family], p.Port, slice.Endpoints})
		}
	}
	return c
}

// chosen are the endpoints of a port. Those that serve are needed where flows are cut, which is not
// done to TCP.
type chosen struct {
	backends lb.Usable
	serving  []netip.AddrPort
}

func (c chooser) port(port lb.ServicePort, family lb.Family) chosen {
	places := c.places[portID{family, port.Name, port.Protocol}]
	if len(places) == 0 {
		return chosen{}
	}
	same := c.same(places, family)
	if first, ok := c.first[family]; ok && same {
		return first.withPort(places[0].number, port.Protocol)
	}
	now := chosen{c.choose(places, port, family), serving(places)}
	if same {
		c.first[family] = now
	}
	if port.Protocol == lb.TCP {
		now.serving = nil
	}
	return now
}

// same reports whether all slices of a family have one number for a port, once each.
func (c chooser) same(places []place, family lb.Family) bool {
	for i, at := range places {
		if at.number != places[0].number || i > 0 && at.slice == places[i-1].slice {
			return false
		}
	}
	return len(places) == c.slices[family]
}

func (c chooser) choose(places []place, port lb.ServicePort, family lb.Family) lb.Usable {
	all := make([]lb.Slice, len(places))
	for i, at := range places {
		all[i] = lb.Slice{Family: family, Endpoints: at.endpoints,
			Ports: []lb.SlicePort{{Name: port.Name, Protocol: port.Protocol, Port: at.number}}}
	}
	usable := lb.Choose(all, port.Name, port.Protocol, family, c.at)
	c.weights.Weigh(all, usable)
	return usable
}

// withPort returns the same endpoints at another port.
func (c chosen) withPort(number uint16, protocol lb.Protocol) chosen {
	move := func(from []lb.Backend) []lb.Backend {
		if len(from) == 0 || from[0].Addr.Port() == number {
			return from
		}
		to := make([]lb.Backend, len(from))
		for i, b := range from {
			b.Addr = netip.AddrPortFrom(b.Addr.Addr(), number)
			to[i] = b
		}
		return to
	}
	moved := chosen{backends: lb.Usable{Cluster: move(c.backends.Cluster), Local: move(c.backends.Local)}}
	if protocol != lb.TCP && len(c.serving) > 0 {
		moved.serving = make([]netip.AddrPort, len(c.serving))
		for i, addr := range c.serving {
			moved.serving[i] = netip.AddrPortFrom(addr.Addr(), number)
		}
	}
	return moved
}
