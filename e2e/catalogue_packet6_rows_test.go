package e2e

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// header6 is an extension header of IPv6: its number, and what follows its first byte.
type header6 struct {
	kind byte
	rest []byte
}

// options6 is a header of options (RFC 8200 section 4.2), which it pads.
func options6(kind byte, options ...byte) header6 {
	rest := append([]byte{0}, options...)
	switch missing := (8 - (1+len(rest))%8) % 8; missing {
	case 0:
	case 1:
		rest = append(rest, 0)
	default:
		rest = append(append(rest, 1, byte(missing-2)), make([]byte, missing-2)...)
	}
	rest[0] = byte((1+len(rest))/8 - 1)
	return header6{kind, rest}
}

// routing6 is a routing header that has one more address to visit.
func routing6(kind, left byte, by netip.Addr) header6 {
	fixed := []byte{2, kind, left, 0, 0, 0, 0}
	return header6{protoRouting, append(fixed, by.AsSlice()...)}
}

// chained returns a payload behind extension headers, and the number of the first.
func chained(protocol byte, payload []byte, headers ...header6) (first byte, b []byte) {
	for _, h := range slices.Backward(headers) {
		payload = slices.Concat([]byte{protocol}, h.rest, payload)
		protocol = h.kind
	}
	return protocol, payload
}

// behind makes a connection's beginning behind extension headers.
func (m packetMaker) behind(headers ...header6) making {
	return func(mark uint16) [][]byte {
		first, b := chained(protoTCP, tcpSegment(m.host(), m.to, mark, syn, nil), headers...)
		return one(ip6Packet(first, m.to.Addr(), b, nil))
	}
}

// part6 is a fragment: which bytes it has, and whether more are to follow.
type part6 struct {
	from, to int
	more     bool
}

// fragments6 makes a payload in fragments (RFC 8200 section 4.5).
func (m packetMaker) fragments6(protocol byte, payload func(mark uint16) []byte, parts ...part6) making {
	return func(mark uint16) (all [][]byte) {
		whole := payload(mark)
		for _, p := range parts {
			at := uint16(p.from)
			if p.more {
				at |= 1
			}
			rest := binary.BigEndian.AppendUint32(append([]byte{0}, byte(at>>8), byte(at)), uint32(mark))
			first, b := chained(protocol, whole[min(p.from, len(whole)):min(p.to, len(whole))], header6{protoFragment, rest})
			all = append(all, ip6Packet(first, m.to.Addr(), b, nil))
		}
		return all
	}
}

// synWithData is a connection's beginning with so many bytes, so that its header fits into the first fragment.
func (m packetMaker) synWithData(n int) func(mark uint16) []byte {
	return func(mark uint16) []byte {
		b := append(tcpSegment(m.host(), m.to, mark, syn, nil), make([]byte, n)...)
		b[16], b[17] = 0, 0
		binary.BigEndian.PutUint16(b[16:], checksumBetween(m.host(), m.to.Addr(), protoTCP, b))
		return b
	}
}

// Options of IPv6: what a node does that does not know one is in the first two bits.
const (
	optionSkip    = 0x1e
	optionDiscard = 0x5e
	optionReport  = 0x9e
	optionJumbo   = 0xc2
)

// dns6 is a cluster IP that a source might want a packet to go by.
var dns6 = netip.MustParseAddr("fd00:10:96::10")

// headers6 are rows of extension headers and fragments, which both kinds of target have. foreign, cut and discovery are
// the answers to another protocol in IPv6, to a first fragment without the whole header of TCP, and to neighbor
// discovery from far away: the rules answer for a VIP, and the node's own kernel for its addresses.
func (m packetMaker) headers6(foreign, cut, discovery string) []hostilePacket {
	segment := func(mark uint16) []byte { return tcpSegment(m.host(), m.to, mark, syn, nil) }
	return []hostilePacket{
		{name: "options for each hop", packets: m.behind(options6(protoHopByHop, optionSkip, 0)), answer: "SYN-ACK"},
		{name: "an option for each hop that is discarded", packets: m.behind(options6(protoHopByHop, optionDiscard, 0))},
		{name: "an option for each hop that is reported", packets: m.behind(options6(protoHopByHop, optionReport, 0)),
			answer: "ICMPv6 4/2"},
		{name: "an option for each hop beyond the header", packets: m.behind(header6{protoHopByHop, []byte{0, optionSkip, 200,
			0, 0, 0, 0}})},
		{name: "options for each hop beyond the packet", packets: m.behind(header6{protoHopByHop, []byte{255, 1, 4, 0, 0, 0,
			0}})},
		{name: "options for each hop that are not the first", packets: m.behind(options6(protoDestination),
			options6(protoHopByHop)), answer: "ICMPv6 4/1"},
		{name: "a jumbogram of a usual length", packets: m.behind(options6(protoHopByHop, optionJumbo, 4, 0, 1, 0, 0)),
			answer: "ICMPv6 4/0"},
		{name: "a jumbogram of 16 MiB", packets: func(mark uint16) [][]byte {
			first, b := chained(protoTCP, segment(mark), options6(protoHopByHop, optionJumbo, 4, 1, 0, 0, 0))
			return one(ip6Packet(first, m.to.Addr(), b, func(b []byte) { b[4], b[5] = 0, 0 }))
		}},
		{name: "options for the destination", packets: m.behind(options6(protoDestination, optionSkip, 0)),
			answer: "SYN-ACK"},
		{name: "an option for the destination that is discarded", packets: m.behind(options6(protoDestination,
			optionDiscard, 0))},
		{name: "an option for the destination that is reported", packets: m.behind(options6(protoDestination,
			optionReport, 0)), answer: "ICMPv6 4/2"},
		{name: "options for the destination beyond the packet", packets: m.behind(header6{protoDestination,
			[]byte{255, 1, 4, 0, 0, 0, 0}})},
		{name: "40 headers", packets: m.behind(slices.Repeat([]header6{options6(protoDestination)}, 40)...),
			answer: "SYN-ACK"},
		{name: "a route of type 0", packets: m.behind(routing6(0, 1, dns6)), answer: "ICMPv6 4/0"},
		{name: "a route of type 0 at its end", packets: m.behind(routing6(0, 0, dns6)), answer: "SYN-ACK"},
		{name: "a route of a mobile host", packets: m.behind(routing6(2, 1, dns6)), answer: "ICMPv6 4/0"},
		{name: "a route by segments", packets: m.behind(routing6(4, 1, dns6))},
		{name: "a route of an unknown type", packets: m.behind(routing6(253, 1, dns6)), answer: "ICMPv6 4/0"},
		{name: "no next header", packets: m.packet(protoNone, zeros(20), nil)},
		{name: "IPv6 in IPv6 to the DNS", packets: m.packet(protoIPv6, func(mark uint16) []byte {
			to := netip.AddrPortFrom(dns6, 53)
			return ip6Packet(protoTCP, dns6, tcpSegment(hostileIP6, to, mark, syn, nil), nil)
		}, nil), answer: foreign},
		{name: "IPv4 in IPv6 to the DNS", packets: m.packet(protoIPv4, func(mark uint16) []byte {
			to := netip.MustParseAddrPort("10.96.0.10:53")
			return ipPacket(protoTCP, to.Addr(), tcpSegment(hostileIP, to, mark, syn, nil), nil)
		}, nil), answer: foreign},
		{name: "a fragment that is all", packets: m.fragments6(protoTCP, segment, part6{0, 20, false}), answer: "SYN-ACK"},
		{name: "two fragments", packets: m.fragments6(protoTCP, m.synWithData(20), part6{0, 24, true}, part6{24, 40, false}),
			answer: "SYN-ACK"},
		{name: "a first fragment alone", packets: m.fragments6(protoTCP, m.synWithData(20), part6{0, 24, true}),
			late: "ICMPv6 3/1"}, // after a minute
		{name: "a last fragment alone", packets: m.fragments6(protoTCP, m.synWithData(20), part6{24, 40, false})},
		{name: "a header in three fragments", packets: m.fragments6(protoTCP, segment, part6{0, 8, true},
			part6{8, 16, true}, part6{16, 20, false}), answer: cut},
		{name: "fragments that overlap", packets: m.fragments6(protoTCP, m.synWithData(20), part6{0, 32, true},
			part6{24, 40, false})},
		{name: "a fragment of 20 bytes with more to follow", packets: m.fragments6(protoTCP, segment, part6{0, 20, true}),
			answer: "ICMPv6 4/0"},
		{name: "a fragment at the end of 64 KiB", packets: func(mark uint16) [][]byte {
			rest := binary.BigEndian.AppendUint32([]byte{0, 0xff, 0xf8}, uint32(mark))
			first, b := chained(protoTCP, make([]byte, 64), header6{protoFragment, rest})
			return one(ip6Packet(first, m.to.Addr(), b, nil))
		}},
		{name: "a fragment in a fragment", packets: m.behind(header6{protoFragment, []byte{0, 0, 0, 0, 0, 0, 1}},
			header6{protoFragment, []byte{0, 0, 0, 0, 0, 0, 2}}), answer: "SYN-ACK"},
		{name: "IP version 4", packets: m.syn(func(b []byte) { b[0] = 0x45 })},
		{name: "IP version 7", packets: m.syn(func(b []byte) { b[0] = 0x70 })},
		{name: "a length beyond the packet", packets: m.syn(func(b []byte) { b[4] = 0xff })},
		{name: "a length of 0", packets: m.syn(func(b []byte) { b[5] = 0 })},
		{name: "a length of 10", packets: m.syn(func(b []byte) { b[5] = 10 })},
		m.from("::", "::").reaching(),
		m.from("a multicast address", "ff02::1"),
		m.from("an IPv4 address", "::ffff:172.26.236.21").reaching(),
		{name: "a redirect", packets: m.icmp(137, 0, zeros(4), func(uint16) []byte {
			return append(m.host().AsSlice(), m.to.Addr().AsSlice()...)
		}, nil)},
		{name: "a message of a router", packets: m.icmp(134, 0, zeros(4), zeros(8), nil), answer: discovery},
		{name: "a question for groups", packets: m.icmp(130, 0, zeros(4), zeros(16), nil), answer: discovery},
	}
}

func vipPackets6(node netip.Addr, other netip.AddrPort) []hostilePacket {
	m := packetMaker{six: true, to: seedVIP6, other: other}
	routed := m
	routed.to = routedVIP6
	return slices.Concat(m.ofVIP(routedVIP6.Addr()), m.headers6("", "", m.noSuchPort()), []hostilePacket{
		m.from("the VIP itself", m.to.Addr().String()).reaching(),
		m.from("::1", "::1"),
		m.from("a node's address", node.String()).reaching(),
		{name: "protocol 255", packets: m.packet(255, zeros(32), nil)},
		{name: "UDP without a checksum", packets: m.udp(func(b []byte) { b[6], b[7] = 0, 0 }), answer: m.noSuchPort()},
		{name: "a message of a router to a VIP over BGP", packets: routed.icmp(134, 0, zeros(4), zeros(8), nil),
			answer: m.noSuchPort()},
		{name: "a question for names", packets: m.icmp(139, 0, identified, zeros(24), nil), answer: m.noSuchPort()},
	})
}

func nodePortPackets6(other netip.AddrPort) []hostilePacket {
	m := packetMaker{six: true, to: seedNodePort6, other: other}
	return slices.Concat(m.ofNodePort(m.to.Addr().String(), seedVIP6.Addr().String(), "::1", "fd00:10:96::dead"),
		m.headers6("ICMPv6 4/1", "ICMPv6 4/3", ""), []hostilePacket{
			{name: "to all hosts", packets: m.at(netip.MustParseAddr("ff02::1"), m.to.Port(), syn)},
			{name: "to all routers", packets: m.at(netip.MustParseAddr("ff02::2"), m.to.Port(), syn)},
		})
}
