package e2e

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
)

// Protocols (IANA).
const (
	protoHopByHop    = 0
	protoICMP        = 1
	protoIPv4        = 4
	protoTCP         = 6
	protoUDP         = 17
	protoIPv6        = 41
	protoRouting     = 43
	protoFragment    = 44
	protoGRE         = 47
	protoICMPv6      = 58
	protoNone        = 59
	protoDestination = 60
	protoSCTP        = 132
)

// Flags of TCP.
const (
	fin = 1 << iota
	syn
	rst
	push
	ack
	urgent
)

func hostileOf(six bool) netip.Addr {
	if six {
		return hostileIP6
	}
	return hostileIP
}

func frameOf(six bool, to, from net.HardwareAddr, ip []byte) []byte {
	if six {
		return ethernetFrame(to, from, 0x86dd, ip)
	}
	return ethernetFrame(to, from, 0x0800, ip)
}

func packetOf(six bool, protocol byte, to netip.Addr, payload []byte, change func(b []byte)) []byte {
	if six {
		return ip6Packet(protocol, to, payload, change)
	}
	return ipPacket(protocol, to, payload, change)
}

// ipPacket returns an IPv4 packet from the hostile address, changed before its checksum is made.
func ipPacket(protocol byte, to netip.Addr, payload []byte, change func(b []byte)) []byte {
	return ipPacketWith(nil, protocol, to, payload, change)
}

// ipPacketWith is ipPacket with options, of a length that is a multiple of 4.
func ipPacketWith(options []byte, protocol byte, to netip.Addr, payload []byte, change func(b []byte)) []byte {
	b := make([]byte, 20, 20+len(options)+len(payload))
	b[0], b[8], b[9] = 0x45+byte(len(options)/4), 64, protocol
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(options)+len(payload)))
	copy(b[12:], hostileIP.AsSlice())
	copy(b[16:], to.AsSlice())
	b = append(b, options...)
	if change != nil {
		change(b)
	}
	binary.BigEndian.PutUint16(b[10:], 0)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return append(b, payload...)
}

// ip6Packet returns an IPv6 packet from the hostile address, changed.
func ip6Packet(next byte, to netip.Addr, payload []byte, change func(b []byte)) []byte {
	b := make([]byte, 40, 40+len(payload))
	b[0], b[6], b[7] = 6<<4, next, 64
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	copy(b[8:], hostileIP6.AsSlice())
	copy(b[24:], to.AsSlice())
	if change != nil {
		change(b)
	}
	return append(b, payload...)
}

// tcpSegment returns a segment from a port to a port of a VIP, with a right checksum, then changed.
func tcpSegment(from netip.Addr, to netip.AddrPort, port uint16, flags byte, change func(b []byte)) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, port)
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint32(b[4:], 1000)
	b[12], b[13] = 5<<4, flags
	if flags&ack != 0 {
		binary.BigEndian.PutUint32(b[8:], 2000)
	}
	binary.BigEndian.PutUint16(b[14:], 1024)
	binary.BigEndian.PutUint16(b[16:], checksumBetween(from, to.Addr(), protoTCP, b))
	if change != nil {
		change(b)
	}
	return b
}

// udpDatagram returns a datagram with a right checksum, then changed.
func udpDatagram(from netip.Addr, to netip.AddrPort, port uint16, change func(b []byte)) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, port), to.Port())
	b = append(b, 0, 12, 0, 0, 'h', 'e', 'y', '!')
	binary.BigEndian.PutUint16(b[6:], checksumBetween(from, to.Addr(), protoUDP, b))
	if change != nil {
		change(b)
	}
	return b
}

// checksumBetween returns the checksum of a payload with its pseudo-header, whose sum is the same in both families.
func checksumBetween(from, to netip.Addr, protocol byte, payload []byte) uint16 {
	pseudo := slices.Concat(from.AsSlice(), to.AsSlice(), []byte{0, protocol, byte(len(payload) >> 8), byte(len(payload))})
	return checksum(append(pseudo, payload...))
}

// stamped gives a packet its mark, which an ICMP error about it quotes: as the identification, for which it makes the
// checksum again unless it is wrong on purpose, or as the flow label.
func stamped(six bool, b []byte, mark uint16) []byte {
	if six {
		binary.BigEndian.PutUint16(b[2:], mark)
		return b
	}
	header := b[:20]
	if length := int(b[0]&15) * 4; length > 20 && length <= len(b) {
		header = b[:length]
	}
	right := checksum(header) == 0
	binary.BigEndian.PutUint16(header[4:], mark)
	if right {
		header[10], header[11] = 0, 0
		binary.BigEndian.PutUint16(header[10:], checksum(header))
	}
	return b
}

func icmpMessage(kind, code byte, id uint16, rest []byte) []byte {
	b := append([]byte{kind, code, 0, 0, byte(id >> 8), byte(id), 0, 0}, rest...)
	binary.BigEndian.PutUint16(b[2:], checksum(b))
	return b
}
