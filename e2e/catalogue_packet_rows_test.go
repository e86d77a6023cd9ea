package e2e

import (
	"encoding/binary"
	"net/netip"
)

// hostilePacket is what is sent to the node that answers for a VIP, and what comes back.
type hostilePacket struct {
	name string
	// packets are the IP packets of the row with the mark, which is a port or an identifier that the
	// answer has too.
	packets func(mark uint16) [][]byte
	answer  string // empty for none
}

// noSuchPort is the answer to packets for a port or a protocol that no Service has, unless they are
// of TCP. The kernel takes what it does not know for data with a checksum, and does not answer if
// that is wrong.
const noSuchPort = "ICMP 3/3"

func hostilePacketRows() []hostilePacket {
	vip := seedVIP
	one := func(b []byte) [][]byte { return [][]byte{b} }
	tcp := func(flags byte, change func(b []byte)) func(uint16) [][]byte {
		return func(mark uint16) [][]byte {
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, vip, mark, flags, change), nil))
		}
	}
	ip := func(change func(b []byte)) func(uint16) [][]byte {
		return func(mark uint16) [][]byte {
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, vip, mark, syn, nil), change))
		}
	}
	from := func(source string) func(uint16) [][]byte {
		addr := netip.MustParseAddr(source)
		return func(mark uint16) [][]byte {
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(addr, vip, mark, syn, nil),
				func(b []byte) { copy(b[12:], addr.AsSlice()) }))
		}
	}
	inner := func(mark uint16) []byte { // of a connection of the bystander's Service that nobody has
		return append(ipPacket(protoTCP, hostileIP, nil, func(b []byte) {
			copy(b[12:], vip.Addr().AsSlice())
			b[3] = 40
		}), 0, 80, byte(mark>>8), byte(mark), 0, 0, 0, 1)
	}
	failure := func(kind, code byte) func(uint16) [][]byte {
		return func(mark uint16) [][]byte {
			return one(ipPacket(protoICMP, vip.Addr(), icmpMessage(kind, code, 0, inner(mark)), nil))
		}
	}
	fragments := func(cut int, more ...int) func(uint16) [][]byte {
		return func(mark uint16) (all [][]byte) {
			segment := append(tcpSegment(hostileIP, vip, mark, syn, nil), make([]byte, 4)...)[:20]
			for i, at := range append([]int{0}, more...) {
				end := len(segment)
				if i < len(more) {
					end = at + cut
				}
				part := segment[at:min(end, len(segment))]
				last := i == len(more) && len(more) > 0
				all = append(all, ipPacket(protoTCP, vip.Addr(), part, func(b []byte) {
					binary.BigEndian.PutUint16(b[4:], mark)
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
	return []hostilePacket{
		{"a SYN, as it should be", tcp(syn, nil), "SYN-ACK"},
		{"a wrong checksum of TCP", tcp(syn, func(b []byte) { b[16]++ }), ""},
		{"a TCP header of 0 bytes", tcp(syn, func(b []byte) { b[12] = 0 }), ""},
		{"a TCP header of 60 bytes in 20", tcp(syn, func(b []byte) { b[12] = 0xf0 }), ""},
		{"no flags", tcp(0, nil), ""},
		{"all flags", tcp(fin|syn|rst|push|ack|urgent, nil), ""},
		{"SYN and FIN", tcp(syn|fin, nil), ""},
		{"SYN and RST", tcp(syn|rst, nil), ""},
		{"a RST of nothing", tcp(rst, nil), ""},
		{"an ACK of nothing", tcp(ack, nil), "RST"},
		{"a SYN-ACK of nothing", tcp(syn|ack, nil), ""},
		{"a FIN of nothing", tcp(fin|ack, nil), ""},
		{"TTL 1", ip(func(b []byte) { b[8] = 1 }), "ICMP 11/0"},
		{"TTL 0", ip(func(b []byte) { b[8] = 0 }), "ICMP 11/0"},
		{"IP version 5", ip(func(b []byte) { b[0] = 0x55 }), ""},
		{"an IP header of 16 bytes", ip(func(b []byte) { b[0] = 0x44 }), ""},
		{"a length beyond the packet", ip(func(b []byte) { b[2] = 0xff }), ""},
		{"a length of 20", ip(func(b []byte) { b[3] = 20 }), ""},
		{"a wrong checksum of IP", func(mark uint16) [][]byte {
			b := ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, vip, mark, syn, nil), nil)
			b[10]++
			return one(b)
		}, ""},
		{"from the VIP itself", from("172.26.236.180"), ""},
		{"from 127.0.0.1", from("127.0.0.1"), ""},
		{"from 0.0.0.0", from("0.0.0.0"), ""},
		{"from 255.255.255.255", from("255.255.255.255"), ""},
		{"from a multicast address", from("224.0.0.1"), ""},
		{"from a node's address", from("172.26.236.177"), ""},
		{"a first fragment alone", fragments(8), ""},
		{"a header in three fragments", fragments(8, 8, 16), "SYN-ACK"},
		{"a fragment at the end of 64 KiB", func(mark uint16) [][]byte {
			return one(ipPacket(protoTCP, vip.Addr(), make([]byte, 64), func(b []byte) { b[6], b[7] = 0x1f, 0xff }))
		}, ""},
		{"UDP to a TCP port", func(mark uint16) [][]byte {
			b := binary.BigEndian.AppendUint16(nil, mark)
			return one(ipPacket(protoUDP, vip.Addr(), append(b, 0, 80, 0, 12, 0, 0, 'h', 'e', 'l', 'o'), nil))
		}, noSuchPort},
		{"UDP with a length of 0", func(mark uint16) [][]byte {
			b := binary.BigEndian.AppendUint16(nil, mark)
			return one(ipPacket(protoUDP, vip.Addr(), append(b, 0, 80, 0, 0, 0, 0), nil))
		}, ""},
		{"SCTP", func(mark uint16) [][]byte {
			b := binary.BigEndian.AppendUint16(nil, mark)
			return one(ipPacket(protoSCTP, vip.Addr(), append(b, append([]byte{0, 80}, make([]byte, 28)...)...), nil))
		}, ""},
		{"GRE", func(uint16) [][]byte { return one(ipPacket(protoGRE, vip.Addr(), make([]byte, 32), nil)) }, noSuchPort},
		{"IP in IP to the DNS", func(mark uint16) [][]byte {
			return one(ipPacket(4, vip.Addr(), ipPacket(protoTCP, netip.MustParseAddr("10.96.0.10"),
				tcpSegment(hostileIP, vip, mark, syn, nil), nil), nil))
		}, ""},
		{"protocol 255", func(uint16) [][]byte { return one(ipPacket(255, vip.Addr(), make([]byte, 32), nil)) }, noSuchPort},
		{"a port that the Service does not have", func(mark uint16) [][]byte {
			to := netip.AddrPortFrom(vip.Addr(), 81)
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, to, mark, syn, nil), nil))
		}, "RST"},
		{"the end of a connection to such a port", func(mark uint16) [][]byte {
			to := netip.AddrPortFrom(vip.Addr(), 81)
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, to, mark, fin|ack, nil), nil))
		}, ""},
		{"port 0", func(mark uint16) [][]byte {
			to := netip.AddrPortFrom(vip.Addr(), 0)
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, to, mark, syn, nil), nil))
		}, "RST"},
		{"a port that no Service over BGP has", func(mark uint16) [][]byte {
			to := netip.AddrPortFrom(routedVIP.Addr(), 81)
			return one(ipPacket(protoTCP, to.Addr(), tcpSegment(hostileIP, to, mark, syn, nil), nil))
		}, "RST"},
		{"a ping", func(mark uint16) [][]byte {
			return one(ipPacket(protoICMP, vip.Addr(), icmpMessage(8, 0, mark, make([]byte, 16)), nil))
		}, "ICMP 0/0"},
		{"a ping with a wrong checksum", func(mark uint16) [][]byte {
			b := icmpMessage(8, 0, mark, make([]byte, 16))
			b[2]++
			return one(ipPacket(protoICMP, vip.Addr(), b, nil))
		}, ""},
		{"the answer to a ping that nobody sent", func(mark uint16) [][]byte {
			return one(ipPacket(protoICMP, vip.Addr(), icmpMessage(0, 0, mark, make([]byte, 16)), nil))
		}, ""},
		{"a timestamp request", func(mark uint16) [][]byte {
			return one(ipPacket(protoICMP, vip.Addr(), icmpMessage(13, 0, mark, make([]byte, 12)), nil))
		}, noSuchPort},
		{"a made-up unreachable port", failure(3, 3), ""},
		{"a made-up unreachable host", failure(3, 1), ""},
		{"a made-up smaller path", failure(3, 4), ""},
		{"a made-up redirect", failure(5, 1), ""},
		{"a made-up time exceeded", failure(11, 0), ""},
		{"a made-up parameter problem", failure(12, 0), ""},
		{"an ICMP error about nothing", func(uint16) [][]byte {
			return one(ipPacket(protoICMP, vip.Addr(), icmpMessage(3, 3, 0, nil), nil))
		}, ""},
	}
}
