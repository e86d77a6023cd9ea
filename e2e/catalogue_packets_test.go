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

// stamped gives a packet its mark as the identification, which an ICMP error about it quotes, and
// makes the checksum again unless it is wrong on purpose.
func stamped(b []byte, mark uint16) []byte {
	header := b[:20]
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

// firstMark is the port of the first row. Those of hosts begin at 10000.
const firstMark = 2000

// hostilePackets sends packets to the node that answers for the VIP of the bystander, and looks at
// what comes back.
func hostilePackets(t *testing.T, l *lab.Lab) {
	mustExec(t, l, hostileHost, "ip", "addr", "add", hostileIP.String()+"/32", "dev", "eth0")
	hosts := []string{"tor-1"}
	for _, n := range l.Cluster().Nodes {
		hosts = append(hosts, n.Name)
	}
	for _, host := range hosts { // a kernel would send redirects, and one error a second to each client
		mustExec(t, l, host, "sh", "-c", "for f in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 >$f; done")
		mustExec(t, l, host, "sysctl", "-q", "-w", "net.ipv4.icmp_ratelimit=0")
	}
	w := openWire(t, l, hostileHost)
	owner := answerer(t, l, seedVIP.Addr())
	node := nodeMAC(t, l, owner)
	heard := listenFor(t, w)
	rows := hostilePacketRows()
	for i, row := range rows {
		for _, p := range row.packets(firstMark + uint16(i)) {
			if err := w.send(ethernetFrame(node, w.own, 0x0800, stamped(p, firstMark+uint16(i)))); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
		}
	}
	// When the last answer has come that is to come, those that are not to come are missed.
	for _, silent := range []bool{false, true} {
		for i, row := range rows {
			if silent != (row.answer == "") {
				continue
			}
			t.Run(row.name, func(t *testing.T) {
				if got := heard(firstMark + uint16(i)); silent && got != "" {
					t.Fatalf("%q, want silence", got)
				}
				eventually(t, "the answer", func() error {
					if got := heard(firstMark + uint16(i)); got != row.answer {
						return fmt.Errorf("%q, want %q", got, row.answer)
					}
					return nil
				})
			})
		}
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
		if body[0] != 0 && len(body) >= 8+20 { // an error quotes what it is about
			mark = binary.BigEndian.Uint16(body[8+4:])
		}
		return mark, fmt.Sprintf("ICMP %d/%d", body[0], body[1]), true
	case protoUDP:
		return binary.BigEndian.Uint16(body[2:]), "UDP", true
	}
	return 0, "", false
}
