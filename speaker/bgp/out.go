package bgp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// encoding is what decides, besides a route itself, how the route looks on the wire of one session.
type encoding struct {
	internal   bool
	localASN   uint32
	fourOctets bool // the peer knows AS numbers of four octets (RFC 6793)
	// nextHops are the next hops by family. Routes of a family without one cannot be sent.
	nextHops map[lb.Family]netip.Addr
}

// announced is what a peer has heard of a prefix.
type announced struct {
	route   plan.Route
	nextHop netip.Addr
}

func (a announced) equal(b announced) bool { return a.nextHop == b.nextHop && a.route.Equal(b.route) }

// outgoing is what makes the peer hear what it shall.
type outgoing struct {
	messages [][]byte
	// set and gone are the changes to what the peer has heard once the messages are written.
	set  map[netip.Prefix]announced
	gone []netip.Prefix
	// held counts the routes that cannot be sent, by family.
	held map[lb.Family]int
}

// outgoing returns what to send after heard, so that the peer hears want. New routes come before
// withdrawals.
func (e encoding) outgoing(heard map[netip.Prefix]announced, want map[netip.Prefix]plan.Route) outgoing {
	out := outgoing{set: map[netip.Prefix]announced{}, held: map[lb.Family]int{}}
	for prefix, route := range want {
		family := lb.FamilyOf(prefix.Addr())
		nextHop, ok := e.nextHops[family]
		if !ok {
			out.held[family]++
			continue
		}
		a := announced{route, nextHop}
		if before, ok := heard[prefix]; !ok || !before.equal(a) {
			out.set[prefix] = a
		}
	}
	for prefix := range heard {
		_, wanted := want[prefix]
		if _, sendable := e.nextHops[lb.FamilyOf(prefix.Addr())]; !wanted || !sendable {
			out.gone = append(out.gone, prefix)
		}
	}
	slices.SortFunc(out.gone, netip.Prefix.Compare)
	for _, g := range groups(out.set) {
		out.messages = append(out.messages, e.announce(g)...)
	}
	out.messages = append(out.messages, withdraw(out.gone, heard)...)
	return out
}

// group is a set of prefixes that can share UPDATE messages.
type group struct {
	family lb.Family
	announced
	prefixes []netip.Prefix
}

// groups sorts prefixes by what is said of them, in a stable order.
func groups(set map[netip.Prefix]announced) []*group {
	prefixes := make([]netip.Prefix, 0, len(set))
	for p := range set {
		prefixes = append(prefixes, p)
	}
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	var ordered []*group
	byKey := map[string]*group{}
	var key []byte
	for _, p := range prefixes {
		a := set[p]
		family := lb.FamilyOf(p.Addr())
		key = a.appendKey(append(key[:0], family...))
		g := byKey[string(key)]
		if g == nil {
			g = &group{family: family, announced: a}
			byKey[string(key)] = g
			ordered = append(ordered, g)
		}
		g.prefixes = append(g.prefixes, p)
	}
	return ordered
}

func (a announced) appendKey(key []byte) []byte {
	med := byte(0)
	if a.route.HasMED {
		med = 1
	}
	key = append(key, med)
	for _, n := range []uint32{a.route.LocalPref, a.route.MED, uint32(a.route.Prepend)} {
		key = binary.BigEndian.AppendUint32(key, n)
	}
	for _, c := range a.route.Communities {
		large := uint32(0)
		if c.Large {
			large = 1
		}
		for _, n := range []uint32{large, c.A, c.B, c.C} {
			key = binary.BigEndian.AppendUint32(key, n)
		}
	}
	return key
}

// announce packs as many prefixes into each UPDATE as it can hold (RFC 4271 section 9.2).
func (e encoding) announce(g *group) [][]byte {
	attributes := e.attributes(g.route)
	reach := 0
	classic := g.family == lb.IPv4 && g.nextHop.Is4()
	if classic {
		attributes = append(attributes, bgp.NewPathAttributeNextHop(g.nextHop.String()))
	} else {
		reach = len(serialized(mpReach(g.nextHop, nil))) + 3 // its length may take two octets, and it names a family
	}
	room := maxMessage - updateMinimum - reach
	for _, a := range attributes {
		room -= len(serialized(a))
	}
	var messages [][]byte
	for prefixes := range pack(g.prefixes, room) {
		if classic {
			messages = append(messages, update(bgp.NewBGPUpdateMessage(nil, attributes, v4NLRI(prefixes))))
			continue
		}
		// first of all (RFC 7606 section 5.1)
		all := append([]bgp.PathAttributeInterface{mpReach(g.nextHop, prefixes)}, attributes...)
		messages = append(messages, update(bgp.NewBGPUpdateMessage(nil, all, nil)))
	}
	return messages
}

// withdraw takes prefixes back, each in the form in which it was announced.
func withdraw(prefixes []netip.Prefix, heard map[netip.Prefix]announced) [][]byte {
	var classic, mp4, mp6 []netip.Prefix
	for _, p := range prefixes {
		switch {
		case p.Addr().Is6():
			mp6 = append(mp6, p)
		case heard[p].nextHop.Is6():
			mp4 = append(mp4, p)
		default:
			classic = append(classic, p)
		}
	}
	var messages [][]byte
	for part := range pack(classic, maxMessage-updateMinimum) {
		messages = append(messages, update(bgp.NewBGPUpdateMessage(v4NLRI(part), nil, nil)))
	}
	const unreachHeader = 4 + 3 // flags, type and length, then the family
	for _, list := range [][]netip.Prefix{mp4, mp6} {
		for part := range pack(list, maxMessage-updateMinimum-unreachHeader) {
			unreach := bgp.NewPathAttributeMpUnreachNLRI(nlri(part))
			messages = append(messages, update(bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{unreach}, nil)))
		}
	}
	return messages
}

// pack cuts prefixes into parts that take at most room octets each.
func pack(prefixes []netip.Prefix, room int) func(yield func([]netip.Prefix) bool) {
	return func(yield func([]netip.Prefix) bool) {
		for start := 0; start < len(prefixes); {
			end, used := start, 0
			for end < len(prefixes) {
				size := 1 + (prefixes[end].Bits()+7)/8
				if used+size > room && end > start {
					break
				}
				used += size
				end++
			}
			if !yield(prefixes[start:end]) {
				return
			}
			start = end
		}
	}
}

// attributes returns all attributes but the next hop and the prefixes, in the order of their type
// codes.
func (e encoding) attributes(r plan.Route) []bgp.PathAttributeInterface {
	list := []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP)}
	var as4 bgp.PathAttributeInterface
	if e.internal {
		list = append(list, bgp.NewPathAttributeAsPath(nil))
	} else {
		var path bgp.PathAttributeInterface
		path, as4 = e.asPath(1 + r.Prepend)
		list = append(list, path)
	}
	if r.HasMED {
		list = append(list, bgp.NewPathAttributeMultiExitDisc(r.MED))
	}
	if e.internal {
		list = append(list, bgp.NewPathAttributeLocalPref(r.LocalPref))
	}
	var plain []uint32
	var large []*bgp.LargeCommunity
	for _, c := range r.Communities {
		if c.Large {
			large = append(large, &bgp.LargeCommunity{ASN: c.A, LocalData1: c.B, LocalData2: c.C})
		} else {
			plain = append(plain, c.A<<16|c.B)
		}
	}
	if len(plain) > 0 {
		list = append(list, bgp.NewPathAttributeCommunities(plain))
	}
	if as4 != nil {
		list = append(list, as4)
	}
	if len(large) > 0 {
		list = append(list, bgp.NewPathAttributeLargeCommunities(large))
	}
	return list
}

// asPath returns AS_PATH with the own AS number n times and, for a peer that cannot read it there,
// AS4_PATH (RFC 6793 section 4.2.2).
func (e encoding) asPath(n int) (path, as4 bgp.PathAttributeInterface) {
	whole := bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, slices.Repeat([]uint32{e.localASN}, n))
	if e.fourOctets {
		return bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{whole}), nil
	}
	short := []uint16{twoOctets(e.localASN)}
	path = bgp.NewPathAttributeAsPath(
		[]bgp.AsPathParamInterface{bgp.NewAsPathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, slices.Repeat(short, n))})
	if e.localASN > 0xffff {
		as4 = bgp.NewPathAttributeAs4Path([]*bgp.As4PathParam{whole})
	}
	return path, as4
}

// twoOctets returns the AS number for peers that support only two octets.
func twoOctets(asn uint32) uint16 {
	if asn > 0xffff {
		return bgp.AS_TRANS
	}
	return uint16(asn)
}

func mpReach(nextHop netip.Addr, prefixes []netip.Prefix) bgp.PathAttributeInterface {
	a := bgp.NewPathAttributeMpReachNLRI(nextHop.WithZone("").String(), nlri(prefixes))
	if len(prefixes) == 0 {
		a.AFI, a.SAFI = bgp.AFI_IP6, bgp.SAFI_UNICAST
	}
	return a
}

func v4NLRI(prefixes []netip.Prefix) []*bgp.IPAddrPrefix {
	list := make([]*bgp.IPAddrPrefix, len(prefixes))
	for i, p := range prefixes {
		list[i] = bgp.NewIPAddrPrefix(uint8(p.Bits()), p.Addr().String())
	}
	return list
}

func nlri(prefixes []netip.Prefix) []bgp.AddrPrefixInterface {
	list := make([]bgp.AddrPrefixInterface, len(prefixes))
	for i, p := range prefixes {
		if p.Addr().Is4() {
			list[i] = bgp.NewIPAddrPrefix(uint8(p.Bits()), p.Addr().String())
		} else {
			list[i] = bgp.NewIPv6AddrPrefix(uint8(p.Bits()), p.Addr().String())
		}
	}
	return list
}

func serialized(a bgp.PathAttributeInterface) []byte {
	b, _ := a.Serialize()
	return b
}

func update(m *bgp.BGPMessage) []byte {
	b, _ := m.Serialize()
	return b
}

// endOfRIB tells the peer that all routes of a family have been sent (RFC 4724 section 2).
func endOfRIB(f lb.Family) []byte { return update(bgp.NewEndOfRib(routeFamily(f))) }

func routeFamily(f lb.Family) bgp.RouteFamily {
	if f == lb.IPv4 {
		return bgp.RF_IPv4_UC
	}
	return bgp.RF_IPv6_UC
}

// prefixOf returns the prefix of an NLRI of IPv4 or IPv6 unicast.
func prefixOf(n bgp.AddrPrefixInterface) (netip.Prefix, bool) {
	var ip net.IP
	var bits uint8
	switch n := n.(type) {
	case *bgp.IPAddrPrefix:
		ip, bits = n.Prefix.To4(), n.Length
	case *bgp.IPv6AddrPrefix:
		ip, bits = n.Prefix.To16(), n.Length
	}
	addr, ok := netip.AddrFromSlice(ip)
	if !ok {
		return netip.Prefix{}, false
	}
	p := netip.PrefixFrom(addr, int(bits))
	return p, p.IsValid()
}
