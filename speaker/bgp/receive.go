package bgp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// maxLearned bounds how many of the peer's routes are kept, and maxShown how many are shown;
// maxReturned bounds those of the own AS, of which only the prefix is kept.
const (
	maxLearned  = 10_000
	maxShown    = 100
	maxReturned = 65_536
)

// receive reads messages until one of them, or the lack of them, ends the session.
func (c *connection) receive() error {
	for {
		c.deadline(c.n.HoldTime)
		if c.closing.Load() {
			return nil
		}
		m, err := c.next()
		if err != nil {
			return err
		}
		switch m.kind {
		case bgp.BGP_MSG_KEEPALIVE:
		case bgp.BGP_MSG_UPDATE:
			err = c.heardUpdate(m.body)
		case bgp.BGP_MSG_ROUTE_REFRESH:
			err = c.heardRefresh(m.body)
		case bgp.BGP_MSG_NOTIFICATION:
			return received(m.body)
		default:
			err = fault(bgp.BGP_ERROR_FSM_ERROR, subUnexpectedUp, []byte{m.kind}, "the peer sends a message of type %d", m.kind)
		}
		if err != nil {
			return err
		}
	}
}

// heardRefresh answers a wish to hear a family again (RFC 2918). One for a family that was not
// negotiated is ignored.
func (c *connection) heardRefresh(body []byte) error {
	if len(body) != 4 {
		return fault(bgp.BGP_ERROR_ROUTE_REFRESH_MESSAGE_ERROR, 1, nil, "a ROUTE-REFRESH of %d octets", len(body))
	}
	if body[3] == bgp.SAFI_UNICAST && body[2] == 0 { // the octet between is used by RFC 7313, which we do not offer
		switch binary.BigEndian.Uint16(body) {
		case bgp.AFI_IP:
			poke(c.refresh[lb.IPv4])
		case bgp.AFI_IP6:
			poke(c.refresh[lb.IPv6])
		}
	}
	return nil
}

// wishes hold a token for each family of which the peer wants to hear all again.
type wishes map[lb.Family]chan struct{}

func newWishes() wishes {
	return wishes{lb.IPv4: make(chan struct{}, 1), lb.IPv6: make(chan struct{}, 1)}
}

// heardUpdate checks an UPDATE and keeps its routes if they are accepted. Faults that do not make
// the rest unreadable concern only the routes in the message (RFC 7606), which are nothing to us.
func (c *connection) heardUpdate(body []byte) error {
	defer c.s.opts.pulses.Begin()()
	c.s.count(func(n *Counters) { n.UpdatesIn++ })
	external := !c.d.Internal(c.n.PeerASN)
	changes, err := parseUpdate(body, c.n, external)
	if err != nil {
		return err
	}
	if c.s.want().AcceptRoutes {
		c.s.learn(changes)
	}
	if external {
		c.s.returns(changes, c.d.LocalASN)
	}
	return nil
}

// parseUpdate returns what an UPDATE changes, or the fault that ends the session.
func parseUpdate(body []byte, n Negotiated, external bool) (changes map[netip.Prefix]ReceivedRoute, fatal error) {
	defer func() {
		if r := recover(); r != nil {
			fatal = fault(bgp.BGP_ERROR_UPDATE_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_MALFORMED_ATTRIBUTE_LIST, nil,
				"cannot be decoded: %v", r)
		}
	}()
	if bad := checkNetworks(body); bad != nil {
		return nil, bad
	}
	u := &bgp.BGPUpdate{}
	err := u.DecodeFromBytes(body)
	if err == nil {
		families := map[bgp.RouteFamily]bgp.BGPAddPathMode{}
		for _, f := range n.Families {
			families[routeFamily(f)] = bgp.BGP_ADD_PATH_NONE
		}
		_, err = bgp.ValidateUpdateMsg(u, families, external, false, true)
	}
	var m *bgp.MessageError
	if err != nil && (!errors.As(err, &m) || m.ErrorHandling == bgp.ERROR_HANDLING_SESSION_RESET && m.TypeCode != 0) {
		return nil, faultOf(err) // type code 0: of a family that was not negotiated
	}
	return learned(u, err == nil), nil
}

// checkNetworks returns the fault of the first field of prefixes that is syntactically incorrect
// (RFC 4271 section 6.3, RFC 7606 section 5.3), for which the packet library has another subcode.
func checkNetworks(body []byte) error {
	withdrawn, rest, ok := field(body)
	if !ok {
		return nil // the library says what is wrong
	}
	_, nlri, ok := field(rest)
	if !ok {
		return nil
	}
	for _, f := range []struct {
		name     string
		prefixes []byte
	}{{"withdrawn routes", withdrawn}, {"NLRI", nlri}} {
		for prefixes := f.prefixes; len(prefixes) > 0; {
			bits := int(prefixes[0])
			size := 1 + (bits+7)/8
			if bits > 32 || size > len(prefixes) {
				return fault(bgp.BGP_ERROR_UPDATE_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_INVALID_NETWORK_FIELD, nil,
					"%s: a prefix of %d bits in %d octets", f.name, bits, len(prefixes)-1)
			}
			prefixes = prefixes[size:]
		}
	}
	return nil
}

// field splits off a field that begins with its length in two octets.
func field(b []byte) (content, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, nil, false
	}
	size := 2 + int(binary.BigEndian.Uint16(b))
	if len(b) < size {
		return nil, nil, false
	}
	return b[2:size], b[size:], true
}

// learned returns what an UPDATE changes: a route that is not valid is withdrawn.
func learned(u *bgp.BGPUpdate, usable bool) map[netip.Prefix]ReceivedRoute {
	changes := map[netip.Prefix]ReceivedRoute{}
	put := func(n bgp.AddrPrefixInterface, r ReceivedRoute) {
		if p, ok := prefixOf(n); ok {
			r.Prefix = p
			changes[p] = r
		}
	}
	var route ReceivedRoute
	if usable {
		route = describe(u.PathAttributes)
	}
	for _, n := range u.WithdrawnRoutes {
		put(n, ReceivedRoute{})
	}
	for _, n := range u.NLRI {
		put(n, route)
	}
	for _, a := range u.PathAttributes {
		switch a := a.(type) {
		case *bgp.PathAttributeMpUnreachNLRI:
			for _, n := range a.Value {
				put(n, ReceivedRoute{})
			}
		case *bgp.PathAttributeMpReachNLRI:
			for _, n := range a.Value {
				put(n, route)
			}
		}
	}
	return changes
}

// describe returns the attributes in words. The next hop is valid for all routes that are in use.
func describe(attributes []bgp.PathAttributeInterface) ReceivedRoute {
	var r ReceivedRoute
	for _, a := range attributes {
		switch a := a.(type) {
		case *bgp.PathAttributeNextHop:
			r.NextHop, _ = netip.AddrFromSlice(a.Value)
		case *bgp.PathAttributeMpReachNLRI:
			r.NextHop, _ = netip.AddrFromSlice(a.Nexthop)
		case *bgp.PathAttributeAsPath:
			r.ASPath = bgp.AsPathString(a)
		case *bgp.PathAttributeCommunities:
			for _, v := range a.Value {
				r.Communities = append(r.Communities, lb.Community{A: v >> 16, B: v & 0xffff}.String())
			}
		case *bgp.PathAttributeLargeCommunities:
			for _, v := range a.Values {
				r.Communities = append(r.Communities, lb.Community{Large: true, A: v.ASN, B: v.LocalData1,
					C: v.LocalData2}.String())
			}
		}
	}
	r.NextHop = r.NextHop.Unmap()
	return r
}

// What is kept of a received route at most; a longer path ends with more. A router can put 1,000 communities into a
// message, and all routes that are kept then take 300 MiB.
const (
	maxKeptPath        = 256
	maxKeptCommunities = 32
	more               = " ..."
)

// bounded returns the route as it is kept.
func (r ReceivedRoute) bounded() ReceivedRoute {
	if len(r.ASPath) > maxKeptPath {
		r.ASPath = r.ASPath[:max(0, strings.LastIndexAny(r.ASPath[:maxKeptPath+1], " ,"))] + more
	}
	if n := len(r.Communities) - maxKeptCommunities; n > 0 {
		r.Communities = append(slices.Clone(r.Communities[:maxKeptCommunities]), fmt.Sprintf("and %d more", n))
	}
	return r
}

// accept begins or ends to keep the peer's routes. To have those that it has sent before, it is
// asked to send them again.
func (c *connection) accept(routes bool) error {
	if routes == c.accepting {
		return nil
	}
	c.accepting = routes
	c.s.unlearn()
	if !routes || !c.n.RouteRefresh {
		return nil
	}
	for _, f := range c.n.Families {
		afi, _ := bgp.RouteFamilyToAfiSafi(routeFamily(f))
		if err := c.write(routeRefresh(afi)); err != nil {
			return err
		}
	}
	return nil
}

// nextHops returns the next hop of each negotiated family's routes.
func nextHops(d plan.BGPSession, n Negotiated) map[lb.Family]netip.Addr {
	hops := map[lb.Family]netip.Addr{}
	own := n.Local.Addr().WithZone("")
	for _, f := range n.Families {
		other := d.NextHop4
		if f == lb.IPv6 {
			other = d.NextHop6
		}
		switch {
		case lb.FamilyOf(own) == f, f == lb.IPv4 && n.ExtendedNextHop:
			hops[f] = own
		case other.IsValid():
			hops[f] = other
		}
	}
	return hops
}

// refusals says why routes are held back.
func (c *connection) refusals(d plan.BGPSession, held map[lb.Family]int) map[lb.Family]lb.Refusal {
	var refusals map[lb.Family]lb.Refusal
	for f, count := range held {
		if refusals == nil {
			refusals = map[lb.Family]lb.Refusal{}
		}
		refusals[f] = refusal(d, c.n, f, count)
	}
	return refusals
}

func refusal(d plan.BGPSession, n Negotiated, f lb.Family, count int) lb.Refusal {
	routes := fmt.Sprintf("%d %s routes cannot be sent", count, f)
	switch {
	case slices.Contains(n.Families, f) && f == lb.IPv4:
		return *lb.Refuse(
			lb.ReasonNoNextHop,
			"%s: the peer cannot take an IPv6 next hop for them (RFC 8950), and the node has no IPv4 address", routes)
	case slices.Contains(n.Families, f):
		return *lb.Refuse(lb.ReasonNoNextHop, "%s: the node has no IPv6 address for a next hop", routes)
	case slices.Contains(d.Families, f):
		return *lb.Refuse(lb.ReasonFamilyNotOffered, "%s: the peer does not take routes of that family; activate it there",
			routes)
	}
	return *lb.Refuse(lb.ReasonFamilyNotOffered,
		"%s: the session is for the other family; set dualStackAddressFamily, or add a peer with an %s address", routes, f)
}
