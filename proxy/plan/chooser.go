package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// chooser chooses the endpoints for the ports of one Service. Ports for which all slices have one
// number differ in that number alone, so that they are chosen once: what a Service costs does not
// grow with its ports times its endpoints.
type chooser struct {
	at      lb.Place
	weights *lb.Weigher // nil if the scheduler heeds none
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
	weight    uint8 // of the slice
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
			c.places[id] = append(c.places[id], place{c.slices[slice.Family], p.Port, slice.Endpoints, slice.Weight})
		}
	}
	return c
}

// chosen are the endpoints of a port: see Port. Those that serve are needed where flows are cut, which is
// not done to TCP.
type chosen struct {
	backends lb.Usable
	number   uint16
	serving  []netip.AddrPort
}

func (c chooser) port(port lb.ServicePort, family lb.Family) chosen {
	places := c.places[portID{family, port.Name, port.Protocol}]
	if len(places) == 0 {
		return chosen{}
	}
	same := c.same(places, family)
	now, known := c.first[family]
	switch {
	case !same:
		now = chosen{backends: c.choose(places, port, family), serving: serving(places)}
	case !known:
		now = chosen{backends: c.choose(anywhere(places), port, family), serving: serving(places)}
		c.first[family] = now
	}
	if same {
		now.number = places[0].number
	}
	switch {
	case port.Protocol == lb.TCP:
		now.serving = nil
	case same:
		now.serving = withPort(now.serving, now.number)
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
		all[i] = lb.Slice{Family: family, Endpoints: at.endpoints, Weight: at.weight,
			Ports: []lb.SlicePort{{Name: port.Name, Protocol: port.Protocol, Port: at.number}}}
	}
	usable := lb.Choose(all, port.Name, port.Protocol, family, c.at)
	if c.weights != nil {
		c.weights.Weigh(all, usable)
	}
	return usable
}

// anywhere returns the places without their numbers.
func anywhere(places []place) []place {
	places = slices.Clone(places)
	for i := range places {
		places[i].number = 0
	}
	return places
}

// withPort returns the same addresses with another port.
func withPort(from []netip.AddrPort, number uint16) []netip.AddrPort {
	if len(from) == 0 || from[0].Port() == number {
		return from
	}
	to := make([]netip.AddrPort, len(from))
	for i, addr := range from {
		to[i] = netip.AddrPortFrom(addr.Addr(), number)
	}
	return to
}
