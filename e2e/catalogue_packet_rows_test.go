package e2e

import (
	"encoding/binary"
	"net/netip"
)

// packetMaker makes packets of one family to a target, from the hostile address unless said otherwise.
type packetMaker struct {
	six bool
	to  netip.AddrPort
	// other is a client that has a connection to the target.
	other netip.AddrPort
}

// making is what makes the packets of a row.
type making = func(mark uint16) [][]byte

func one(b []byte) [][]byte { return [][]byte{b} }

func (m packetMaker) host() netip.Addr { return hostileOf(m.six) }

// either returns what goes with the family.
func (m packetMaker) either(four, six string) string {
	if m.six {
		return six
	}
	return four
}

// noSuchPort is the answer to packets for a port or a protocol that no Service has, unless they are of TCP. The kernel
// takes what it does not know for data with a checksum, and does not answer if that is wrong.
func (m packetMaker) noSuchPort() string { return m.either("ICMP 3/3", "ICMPv6 1/4") }

// expired is the answer to packets that have come too far.
func (m packetMaker) expired() string { return m.either("ICMP 11/0", "ICMPv6 3/0") }

// packet makes packets of a protocol with this payload.
func (m packetMaker) packet(protocol byte, payload func(mark uint16) []byte, change func(b []byte)) making {
	return func(mark uint16) [][]byte { return one(packetOf(m.six, protocol, m.to.Addr(), payload(mark), change)) }
}

// tcp makes segments with these flags, changed.
func (m packetMaker) tcp(flags byte, change func(b []byte)) making {
	return m.packet(protoTCP, func(mark uint16) []byte { return tcpSegment(m.host(), m.to, mark, flags, change) }, nil)
}

// syn makes a connection's beginning, whose IP header is changed.
func (m packetMaker) syn(change func(b []byte)) making {
	return m.packet(protoTCP, func(mark uint16) []byte { return tcpSegment(m.host(), m.to, mark, syn, nil) }, change)
}

// port makes a segment to another port of the target.
func (m packetMaker) port(port uint16, flags byte) making { return m.at(m.to.Addr(), port, flags) }

// at makes a segment to another address.
func (m packetMaker) at(addr netip.Addr, port uint16, flags byte) making {
	m.to = netip.AddrPortFrom(addr, port)
	return m.tcp(flags, nil)
}

// from is a row with the beginnings of connections from another source, where the answer would go. They are several,
// for pods on several nodes: a kernel passes on some sources only to where they came from.
func (m packetMaker) from(name, source string) hostilePacket {
	addr, at := netip.MustParseAddr(source), 12
	if m.six {
		at = 8
	}
	return hostilePacket{name: "from " + name, spoofed: true, packets: func(mark uint16) (all [][]byte) {
		for i := range uint16(16) {
			segment := tcpSegment(addr, m.to, mark|i<<12, syn, nil) // marks are below 4096
			all = append(all, packetOf(m.six, protoTCP, m.to.Addr(), segment, func(b []byte) { copy(b[at:], addr.AsSlice()) }))
		}
		return all
	}}
}

// reaching is a row of spoofed packets that pods get: they answer by way of the node, which sends that to the source.
func (p hostilePacket) reaching() hostilePacket {
	p.answer = reachesPod
	return p
}

// inName makes a segment of the other client's connection, of bytes that neither end waits for.
func (m packetMaker) inName(flags byte) making {
	at := 12
	if m.six {
		at = 8
	}
	return func(uint16) [][]byte {
		segment := tcpSegment(m.other.Addr(), m.to, m.other.Port(), flags, nil)
		return one(packetOf(m.six, protoTCP, m.to.Addr(), segment, func(b []byte) { copy(b[at:], m.other.Addr().AsSlice()) }))
	}
}

func (m packetMaker) udp(change func(b []byte)) making {
	return m.packet(protoUDP, func(mark uint16) []byte { return udpDatagram(m.host(), m.to, mark, change) }, nil)
}

// icmp makes a message, changed after its checksum is made.
func (m packetMaker) icmp(kind, code byte, word, rest func(mark uint16) []byte, change func(b []byte)) making {
	protocol := byte(protoICMP)
	if m.six {
		protocol = protoICMPv6
	}
	return m.packet(protocol, func(mark uint16) []byte {
		b := append(append([]byte{kind, code, 0, 0}, word(mark)...), rest(mark)...)
		if m.six {
			binary.BigEndian.PutUint16(b[2:], checksumBetween(m.host(), m.to.Addr(), protoICMPv6, b))
		} else {
			binary.BigEndian.PutUint16(b[2:], checksum(b))
		}
		if change != nil {
			change(b)
		}
		return b
	}, nil)
}

// identified is the word of an ICMP message that has an identifier.
func identified(mark uint16) []byte { return []byte{byte(mark >> 8), byte(mark), 0, 0} }

// zeros returns so many bytes whatever the mark.
func zeros(n int) func(uint16) []byte { return func(uint16) []byte { return make([]byte, n) } }

// ping makes an echo request, changed.
func (m packetMaker) ping(change func(b []byte)) making {
	return m.icmp(m.echo(8, 128), 0, identified, zeros(16), change)
}

func (m packetMaker) echo(four, six byte) byte {
	if m.six {
		return six
	}
	return four
}

// failure makes an ICMP error about an answer of the target to a client: to the hostile address, or, of the
// connection that the other client has, to that.
func (m packetMaker) failure(kind, code byte, ofOther bool) making {
	word := zeros(4)
	if m.six && kind == 2 || !m.six && kind == 3 && code == 4 {
		word = func(uint16) []byte { return []byte{0, 0, 5, 0} } // the path takes 1280 bytes
	}
	return m.icmp(kind, code, word, func(mark uint16) []byte {
		to := netip.AddrPortFrom(m.host(), mark)
		if ofOther {
			to = m.other
		}
		segment := tcpSegment(m.to.Addr(), to, m.to.Port(), syn|ack, nil)
		from := 12
		if m.six {
			from = 8
		}
		return packetOf(m.six, protoTCP, to.Addr(), segment, func(b []byte) { copy(b[from:], m.to.Addr().AsSlice()) })
	}, nil)
}

// failures are rows of made-up ICMP errors. All of them are about connections, and none is answered.
func (m packetMaker) failures() (rows []hostilePacket) {
	type failure struct {
		name       string
		kind, code byte
	}
	kinds := []failure{
		{"unreachable port", 3, 3}, {"unreachable host", 3, 1}, {"smaller path", 3, 4}, {"redirect", 5, 1},
		{"time exceeded", 11, 0}, {"parameter problem", 12, 0},
	}
	if m.six {
		kinds = []failure{
			{"unreachable port", 1, 4}, {"unreachable host", 1, 3}, {"smaller path", 2, 0},
			{"failure of an unknown kind", 100, 0}, {"time exceeded", 3, 0}, {"parameter problem", 4, 0},
		}
	}
	for _, k := range kinds {
		rows = append(rows, hostilePacket{name: "a made-up " + k.name, packets: m.failure(k.kind, k.code, false)},
			hostilePacket{name: "a made-up " + k.name + " of another's connection", packets: m.failure(k.kind, k.code, true)})
	}
	return rows
}

// othersSegments are segments in the name of another client, which the hostile host hears nothing of.
func (m packetMaker) othersSegments() []hostilePacket {
	return []hostilePacket{
		{name: "a SYN in another's connection", packets: m.inName(syn)},
		{name: "a RST in another's connection", packets: m.inName(rst)},
		{name: "a FIN in another's connection", packets: m.inName(fin | ack)},
		{name: "data in another's connection", packets: m.inName(push | ack)},
	}
}

// usualSYN is the row of a packet that nothing is wrong with.
const usualSYN = "a SYN, as it should be"

// segments are those of TCP, of no connection, to a port that answers. stray is the answer to what neither begins nor
// ends a connection and makes no sense.
func (m packetMaker) segments(stray string) []hostilePacket {
	return []hostilePacket{
		{name: usualSYN, packets: m.tcp(syn, nil), answer: "SYN-ACK"},
		{name: "a wrong checksum of TCP", packets: m.tcp(syn, func(b []byte) { b[16]++ })},
		{name: "a TCP header of 0 bytes", packets: m.tcp(syn, func(b []byte) { b[12] = 0 })},
		{name: "a TCP header of 60 bytes in 20", packets: m.tcp(syn, func(b []byte) { b[12] = 0xf0 })},
		{name: "half a TCP header", packets: m.packet(protoTCP, func(mark uint16) []byte {
			return tcpSegment(m.host(), m.to, mark, syn, nil)[:10]
		}, nil)},
		{name: "no flags", packets: m.tcp(0, nil), answer: stray},
		{name: "all flags", packets: m.tcp(fin|syn|rst|push|ack|urgent, nil)},
		{name: "SYN and FIN", packets: m.tcp(syn|fin, nil), answer: stray},
		{name: "SYN and RST", packets: m.tcp(syn|rst, nil)},
		{name: "a RST of nothing", packets: m.tcp(rst, nil)},
		{name: "an ACK of nothing", packets: m.tcp(ack, nil), answer: "RST"},
		{name: "a SYN-ACK of nothing", packets: m.tcp(syn|ack, nil), answer: stray},
		{name: "a FIN of nothing", packets: m.tcp(fin|ack, nil), answer: stray},
		{name: m.either("TTL 1", "hop limit 1"), packets: m.syn(func(b []byte) { b[m.ttl()] = 1 }), answer: m.expired()},
		{name: m.either("TTL 0", "hop limit 0"), packets: m.syn(func(b []byte) { b[m.ttl()] = 0 }), answer: m.expired()},
		{name: "UDP to a TCP port", packets: m.udp(nil), answer: m.noSuchPort()},
		{name: "UDP with a length of 0", packets: m.udp(func(b []byte) { b[5] = 0 })},
		{name: "UDP with a length beyond the packet", packets: m.udp(func(b []byte) { b[4] = 0xff })},
		{name: "UDP with a wrong checksum", packets: m.udp(func(b []byte) { b[6]++ })},
	}
}

// ttl is where a packet has its TTL or hop limit.
func (m packetMaker) ttl() int { return int(m.echo(8, 7)) }

// ofVIP are the rows of a VIP that both families have. routed is a VIP over BGP.
func (m packetMaker) ofVIP(routed netip.Addr) []hostilePacket {
	rows := append(m.segments(""), []hostilePacket{
		{name: "SCTP", packets: m.packet(protoSCTP, func(mark uint16) []byte {
			b := binary.BigEndian.AppendUint16(nil, mark)
			return append(b, append([]byte{0, 80}, make([]byte, 28)...)...)
		}, nil)},
		{name: "GRE", packets: m.packet(protoGRE, zeros(32), nil), answer: m.noSuchPort()},
		{name: "a port that the Service does not have", packets: m.port(81, syn), answer: "RST"},
		{name: "the end of a connection to such a port", packets: m.port(81, fin|ack)},
		{name: "port 0", packets: m.port(0, syn), answer: "RST"},
		{name: "the Service's node port", packets: m.port(seedNodePort.Port(), syn), answer: "RST"},
		{name: "the port of the node's health", packets: m.port(10256, syn), answer: "RST"},
		{name: "the relay's port", packets: m.port(relayPort, syn), answer: "RST"},
		{name: "a port that no Service over BGP has", packets: m.at(routed, 81, syn), answer: "RST"},
		{name: "a ping", packets: m.ping(nil), answer: m.either("ICMP 0/0", "ICMPv6 129/0")},
		{name: "a ping with a wrong checksum", packets: m.ping(func(b []byte) { b[2]++ })},
		{name: "the answer to a ping that nobody sent", packets: m.icmp(m.echo(0, 129), 0, identified, zeros(16), nil)},
		{name: "an ICMP error about nothing", packets: m.icmp(m.echo(3, 1), m.echo(3, 4), zeros(4), zeros(0), nil)},
	}...)
	return append(append(rows, m.failures()...), m.othersSegments()...)
}

// ofNodePort are the rows of a node port that both families have. What the rules do not lead elsewhere, the node's
// own TCP answers.
func (m packetMaker) ofNodePort(node, vip, loopback, cluster string) []hostilePacket {
	own := m.from("the node's own address", node)
	if m.six { // the kernel takes it for a martian in IPv4 alone
		own = own.reaching()
	}
	rows := append(m.segments("RST"), []hostilePacket{
		{name: "a port that no Service has", packets: m.port(seedNodePort.Port()+1, syn), answer: "RST"},
		own,
		m.from("a VIP", vip).reaching(),
		m.from(loopback, loopback),
		{name: "the node port at " + loopback, packets: m.at(netip.MustParseAddr(loopback), seedNodePort.Port(), syn)},
		{name: "the node's health at " + loopback, packets: m.at(netip.MustParseAddr(loopback), 10256, syn)},
		{name: "a cluster IP that no Service has", packets: m.at(netip.MustParseAddr(cluster), 80, syn)},
	}...)
	return append(append(rows, m.failures()...), m.othersSegments()...)
}

// vipPackets are the rows of the VIP; node is the address of a node that does not answer for it.
func vipPackets(node netip.Addr, other netip.AddrPort) []hostilePacket {
	m := packetMaker{to: seedVIP, other: other}
	vip := m.to.Addr()
	return append(m.ofVIP(routedVIP.Addr()), []hostilePacket{
		{name: "IP version 5", packets: m.syn(func(b []byte) { b[0] = 0x55 })},
		{name: "IP version 6", packets: m.syn(func(b []byte) { b[0] = 0x65 })},
		{name: "an IP header of 16 bytes", packets: m.syn(func(b []byte) { b[0] = 0x44 })},
		{name: "an IP header of 60 bytes in 40", packets: m.syn(func(b []byte) { b[0] = 0x4f })},
		{name: "a length beyond the packet", packets: m.syn(func(b []byte) { b[2] = 0xff })},
		{name: "a length of 20", packets: m.syn(func(b []byte) { b[3] = 20 })},
		{name: "a wrong checksum of IP", packets: func(mark uint16) [][]byte {
			b := m.syn(nil)(mark)[0]
			b[10]++
			return one(b)
		}},
		m.from("the VIP itself", vip.String()).reaching(),
		m.from("127.0.0.1", "127.0.0.1"),
		m.from("0.0.0.0", "0.0.0.0"),
		m.from("255.255.255.255", "255.255.255.255"),
		m.from("a multicast address", "224.0.0.1"),
		m.from("a node's address", node.String()).reaching(),
		{name: "a recorded route", packets: m.options(7, 7, 4, 0, 0, 0, 0, 0), answer: "SYN-ACK"},
		{name: "a route by way of the DNS", packets: m.options(append([]byte{131, 7, 4}, append(
			netip.MustParseAddr("10.96.0.10").AsSlice(), 0)...)...)},
		{name: "a strict route by way of the DNS", packets: m.options(append([]byte{137, 7, 4}, append(
			netip.MustParseAddr("10.96.0.10").AsSlice(), 0)...)...)},
		{name: "an option beyond the header", packets: m.options(7, 40, 4, 0), answer: "ICMP 12/0"},
		{name: "an option of 0 bytes", packets: m.options(7, 0, 4, 0), answer: "ICMP 12/0"},
		{name: "a first fragment alone", packets: m.fragments(8)},
		{name: "a header in three fragments", packets: m.fragments(8, 8, 16), answer: "SYN-ACK"},
		{name: "fragments that overlap", packets: m.fragments(16, 8)},
		{name: "a fragment at the end of 64 KiB", packets: m.packet(protoTCP, zeros(64),
			func(b []byte) { b[6], b[7] = 0x1f, 0xff })},
		{name: "IP in IP to the DNS", packets: func(mark uint16) [][]byte {
			return one(ipPacket(protoIPv4, vip, ipPacket(protoTCP, netip.MustParseAddr("10.96.0.10"),
				tcpSegment(hostileIP, m.to, mark, syn, nil), nil), nil))
		}},
		{name: "protocol 255", packets: m.packet(255, zeros(32), nil), answer: m.noSuchPort()},
		{name: "a timestamp request", packets: m.icmp(13, 0, identified, zeros(12), nil), answer: m.noSuchPort()},
	}...)
}

func nodePortPackets(other netip.AddrPort) []hostilePacket {
	m := packetMaker{to: seedNodePort, other: other}
	rows := m.ofNodePort(m.to.Addr().String(), seedVIP.Addr().String(), "127.0.0.1", "10.96.200.200")
	return append(rows, []hostilePacket{
		m.from("0.0.0.0", "0.0.0.0"),
		{name: "to 255.255.255.255", packets: m.at(netip.MustParseAddr("255.255.255.255"), m.to.Port(), syn)},
		{name: "to all of the LAN", packets: m.at(netip.MustParseAddr("172.26.236.255"), m.to.Port(), syn)},
		{name: "to a multicast address", packets: m.at(netip.MustParseAddr("224.0.0.1"), m.to.Port(), syn)},
		{name: "a port that a cluster IP does not have", packets: m.at(seedClusterIP.Addr(), 81, syn), answer: "RST"},
		{name: "a route by way of the DNS", packets: m.options(append([]byte{131, 7, 4}, append(
			netip.MustParseAddr("10.96.0.10").AsSlice(), 0)...)...)},
		{name: "a header in three fragments", packets: m.fragments(8, 8, 16), answer: "SYN-ACK"},
		{name: "IP in IP to the DNS", packets: func(mark uint16) [][]byte {
			return one(ipPacket(protoIPv4, m.to.Addr(), ipPacket(protoTCP, netip.MustParseAddr("10.96.0.10"),
				tcpSegment(hostileIP, m.to, mark, syn, nil), nil), nil))
		}, answer: "ICMP 3/2"},
	}...)
}

// options makes a connection's beginning with options of IPv4.
func (m packetMaker) options(options ...byte) making {
	return func(mark uint16) [][]byte {
		return one(ipPacketWith(options, protoTCP, m.to.Addr(), tcpSegment(m.host(), m.to, mark, syn, nil), nil))
	}
}

// fragments makes a connection's beginning in fragments of so many bytes, at 0 and at these places; the last one goes
// to the end.
func (m packetMaker) fragments(cut int, more ...int) making {
	return func(mark uint16) (all [][]byte) {
		segment := tcpSegment(m.host(), m.to, mark, syn, nil)
		for i, at := range append([]int{0}, more...) {
			end := len(segment)
			if i < len(more) {
				end = at + cut
			}
			last := i == len(more) && len(more) > 0
			all = append(all, ipPacket(protoTCP, m.to.Addr(), segment[at:min(end, len(segment))], func(b []byte) {
				offset := uint16(at / 8)
				if !last {
					offset |= 0x2000
				}
				binary.BigEndian.PutUint16(b[6:], offset)
			}))
		}
		return all
	}
}
