package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/packet"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// hostileIP is an address of the hostile host beside its own: answers to it are nobody's.
var hostileIP = netip.MustParseAddr("172.26.236.21")

// Protocols (IANA).
const (
	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
	protoGRE  = 47
	protoSCTP = 132
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

// ipPacket returns an IPv4 packet to a VIP from the hostile address, changed before its checksum is
// made.
func ipPacket(protocol byte, to netip.Addr, payload []byte, change func(b []byte)) []byte {
	b := make([]byte, 20, 20+len(payload))
	b[0], b[8], b[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	copy(b[12:], hostileIP.AsSlice())
	copy(b[16:], to.AsSlice())
	if change != nil {
		change(b)
	}
	binary.BigEndian.PutUint16(b[10:], 0)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return append(b, payload...)
}

// tcpSegment returns a segment from a port to port 80 of a VIP, with a right checksum, then
// changed.
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
	pseudo := append(append(from.AsSlice(), to.Addr().AsSlice()...), 0, protoTCP, 0, 20)
	binary.BigEndian.PutUint16(b[16:], checksum(append(pseudo, b...)))
	if change != nil {
		change(b)
	}
	return b
}

func icmpMessage(kind, code byte, id uint16, rest []byte) []byte {
	b := append([]byte{kind, code, 0, 0, byte(id >> 8), byte(id), 0, 0}, rest...)
	binary.BigEndian.PutUint16(b[2:], checksum(b))
	return b
}

// hostilePacket is what is sent to the node that answers for a VIP, and what comes back.
type hostilePacket struct {
	name string
	// packets are the IP packets of the row with the mark, which is a port or an identifier that the
	// answer has too.
	packets func(mark uint16) [][]byte
	answer  string // empty for none
}

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
		{"a SYN-ACK of nothing", tcp(syn|ack, nil), "RST"},
		{"a FIN of nothing", tcp(fin|ack, nil), "RST"},
		{"TTL 1", ip(func(b []byte) { b[8] = 1 }), "ICMP 11/0"},
		{"TTL 0", ip(func(b []byte) { b[8] = 0 }), ""},
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
		}, ""},
		{"UDP with a length of 0", func(mark uint16) [][]byte {
			b := binary.BigEndian.AppendUint16(nil, mark)
			return one(ipPacket(protoUDP, vip.Addr(), append(b, 0, 80, 0, 0, 0, 0), nil))
		}, ""},
		{"SCTP", func(mark uint16) [][]byte {
			b := binary.BigEndian.AppendUint16(nil, mark)
			return one(ipPacket(protoSCTP, vip.Addr(), append(b, append([]byte{0, 80}, make([]byte, 28)...)...), nil))
		}, ""},
		{"GRE", func(uint16) [][]byte { return one(ipPacket(protoGRE, vip.Addr(), make([]byte, 32), nil)) }, ""},
		{"IP in IP to the DNS", func(mark uint16) [][]byte {
			return one(ipPacket(4, vip.Addr(), ipPacket(protoTCP, netip.MustParseAddr("10.96.0.10"),
				tcpSegment(hostileIP, vip, mark, syn, nil), nil), nil))
		}, ""},
		{"protocol 255", func(uint16) [][]byte { return one(ipPacket(255, vip.Addr(), make([]byte, 32), nil)) }, ""},
		{"a port that the Service does not have", func(mark uint16) [][]byte {
			to := netip.AddrPortFrom(vip.Addr(), 81)
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, to, mark, syn, nil), nil))
		}, ""},
		{"port 0", func(mark uint16) [][]byte {
			to := netip.AddrPortFrom(vip.Addr(), 0)
			return one(ipPacket(protoTCP, vip.Addr(), tcpSegment(hostileIP, to, mark, syn, nil), nil))
		}, ""},
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
		}, ""},
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

// firstMark is the port of the first row. Those of hosts begin at 10000.
const firstMark = 2000

// hostilePackets sends packets to the node that answers for the VIP of the bystander, and looks at
// what comes back.
func hostilePackets(t *testing.T, l *lab.Lab) {
	mustExec(t, l, hostileHost, "ip", "addr", "add", hostileIP.String()+"/32", "dev", "eth0")
	w := openWire(t, l, hostileHost)
	node := nodeMAC(t, l, answerer(t, l, seedVIP.Addr()))
	heard := listenFor(t, w)
	rows := hostilePacketRows()
	for i, row := range rows {
		for _, p := range row.packets(firstMark + uint16(i)) {
			if err := w.send(ethernetFrame(node, w.own, 0x0800, p)); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
		}
	}
	// All answers that are to come have come before those that are not to come are missed.
	for i, row := range rows {
		if row.answer == "" {
			continue
		}
		t.Run(row.name, func(t *testing.T) {
			eventually(t, "the answer", func() error {
				if got := heard(firstMark + uint16(i)); got != row.answer {
					return fmt.Errorf("%q, want %q", got, row.answer)
				}
				return nil
			})
		})
	}
	time.Sleep(time.Second)
	for i, row := range rows {
		if row.answer != "" {
			continue
		}
		t.Run(row.name, func(t *testing.T) {
			if got := heard(firstMark + uint16(i)); got != "" {
				t.Errorf("%q, want silence", got)
			}
		})
	}
	t.Run("a flood of SYNs from one address", func(t *testing.T) {
		for port := range uint16(5000) {
			_ = w.send(ethernetFrame(node, w.own, 0x0800, ipPacket(protoTCP, seedVIP.Addr(),
				tcpSegment(hostileIP, seedVIP, 5000+port, syn, nil), nil)))
		}
		eventually(t, "one of them is answered", func() error {
			for port := range uint16(5000) {
				if heard(5000+port) == "SYN-ACK" {
					return nil
				}
			}
			return errors.New("none is")
		})
	})
	t.Run("a flood of ACKs from many addresses", func(t *testing.T) {
		for i := range 5000 {
			source := netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)})
			_ = w.send(ethernetFrame(node, w.own, 0x0800, ipPacket(protoTCP, seedVIP.Addr(),
				tcpSegment(source, seedVIP, uint16(i), ack, nil), func(b []byte) { copy(b[12:], source.AsSlice()) })))
		}
		_, err := l.Ask(t.Context(), hostileHost, "tcp", seedVIP)
		if err != nil {
			t.Error(err)
		}
	})
}

// listenFor notes what comes back to the hostile host, by mark. It ends with the test.
func listenFor(t *testing.T, w *wire) (heard func(mark uint16) string) {
	t.Helper()
	var mu sync.Mutex
	marks := map[uint16]string{}
	var reading sync.WaitGroup
	t.Cleanup(func() {
		w.conn.Close()
		reading.Wait()
	})
	reading.Go(func() {
		b := make([]byte, 2048)
		for {
			n, from, err := w.conn.ReadFrom(b)
			if err != nil {
				return
			}
			if at, ok := from.(*packet.Addr); ok && bytes.Equal(at.HardwareAddr, w.own) {
				continue
			}
			if mark, what, ok := answerIn(b[:n], w.own); ok {
				mu.Lock()
				marks[mark] = what
				mu.Unlock()
			}
		}
	})
	return func(mark uint16) string {
		mu.Lock()
		defer mu.Unlock()
		return marks[mark]
	}
}

// answerIn reads an answer to one of the packets.
func answerIn(frame []byte, own net.HardwareAddr) (mark uint16, what string, ok bool) {
	if len(frame) < 14+20+8 || !bytes.Equal(frame[:6], own) || frame[12] != 8 || frame[13] != 0 {
		return 0, "", false
	}
	ip := frame[14:]
	header := int(ip[0]&15) * 4
	if len(ip) < header+8 || !bytes.Equal(ip[16:20], hostileIP.AsSlice()) {
		return 0, "", false
	}
	body := ip[header:]
	switch ip[9] {
	case protoTCP:
		if len(body) < 20 {
			return 0, "", false
		}
		mark = binary.BigEndian.Uint16(body[2:])
		switch flags := body[13]; {
		case flags&rst != 0:
			return mark, "RST", true
		case flags&(syn|ack) == syn|ack:
			return mark, "SYN-ACK", true
		default:
			return mark, fmt.Sprintf("TCP %08b", flags), true
		}
	case protoICMP:
		mark = binary.BigEndian.Uint16(body[4:])
		if body[0] != 0 && len(body) >= 8+20+8 { // an error has what it is about
			mark = binary.BigEndian.Uint16(body[8+int(body[8]&15)*4:])
		}
		return mark, fmt.Sprintf("ICMP %d/%d", body[0], body[1]), true
	case protoUDP:
		return binary.BigEndian.Uint16(body[2:]), "UDP", true
	}
	return 0, "", false
}
