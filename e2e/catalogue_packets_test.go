package e2e

import (
	"bytes"
	"context"
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

// hostileIP and hostileIP6 are addresses of the hostile host beside its own: answers to them are nobody's.
var (
	hostileIP  = netip.MustParseAddr("172.26.236.21")
	hostileIP6 = lab.Twin(hostileIP)
)

// seedNodePort6 is the node port of the worked example's Service, over IPv6.
var seedNodePort6 = netip.AddrPortFrom(lab.Twin(seedNodePort.Addr()), seedNodePort.Port())

// hostilePacket is what is sent to a node, and what comes back.
type hostilePacket struct {
	name string
	// packets are the IP packets of the row with the mark, which is a port or an identifier that the
	// answer has too.
	packets func(mark uint16) [][]byte
	answer  string // empty for none
	// spoofed has the packets from an address that the hostile host does not have: their answer is whether they reach
	// a pod.
	spoofed bool
	// late is an answer that may still come after the row was found silent; empty for none.
	late string
}

// reachesPod is the answer to spoofed packets that a pod gets.
const reachesPod = "a pod gets it"

// packetTarget is what the packets of some rows are for: they go to the node, which answers for the address.
type packetTarget struct {
	name string
	six  bool
	node string
	// rows makes the rows. Some are about a connection of another client to the target, which has this address.
	rows func(other netip.AddrPort) []hostilePacket
	at   netip.AddrPort
}

// packetTargets are all of them; owner and owner6 are the nodes that answer for the VIPs.
func packetTargets(owner, owner6 string) []packetTarget {
	// A node that does not answer for the VIP.
	away := func(owner string) netip.Addr {
		if owner == besieged {
			return netip.MustParseAddr("172.26.236.176")
		}
		return seedNodePort.Addr()
	}
	four := func(other netip.AddrPort) []hostilePacket { return vipPackets(away(owner), other) }
	six := func(other netip.AddrPort) []hostilePacket { return vipPackets6(lab.Twin(away(owner6)), other) }
	return []packetTarget{
		{"a VIP", false, owner, four, seedVIP},
		{"a node port", false, besieged, nodePortPackets, seedNodePort},
		{"a VIP of IPv6", true, owner6, six, seedVIP6},
		{"a node port over IPv6", true, besieged, nodePortPackets6, seedNodePort6},
	}
}

// floods reports whether the target is flooded, too.
func (p packetTarget) floods() bool { return p.at == seedVIP || p.at == seedVIP6 }

// Marks, which are ports. Each turn has its own, as nodes remember connections. The ports of hosts begin at 10000, and
// are at other addresses.
const (
	firstMark  = 2000
	marksOf    = 1000 // of a turn
	firstFlood = 20000
	flood      = 5000 // packets
)

// hostile is the hostile host: what it sends, and what it hears, and pods get, by family and mark.
type hostile struct {
	l              *lab.Lab
	w              *wire
	heard, reached func(six bool, mark uint16) string
	sent           []sentRow
}

// sentRow is a row that was sent.
type sentRow struct {
	hostilePacket
	target packetTarget
	mark   uint16
	node   net.HardwareAddr
}

func (r sentRow) String() string { return r.target.name + "/" + r.name }

// packets sends packets to the nodes that answer for the VIPs of the bystander, and to node ports, and looks at what
// comes back. It has marks of its own in each turn.
func (h *hostile) packets(t *testing.T, turn int) {
	targets := packetTargets(answerer(t, h.l, seedVIP.Addr()), answerer(t, h.l, seedVIP6.Addr()))
	mark, rows := uint16(firstMark+turn*marksOf), len(h.sent)
	var others []net.Conn
	for _, target := range targets {
		other, err := h.l.Dial(t.Context(), lab.FarClientName, "tcp", target.at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		others = append(others, other)
		for _, row := range target.rows(netip.MustParseAddrPort(other.LocalAddr().String())) {
			r := sentRow{row, target, mark, nodeMAC(t, h.l, target.node)}
			if err := h.send(r); err != nil {
				t.Fatalf("%s: %v", r, err)
			}
			h.sent = append(h.sent, r)
			mark++
		}
	}
	// When the last answer has come that is to come, those that are not to come are missed.
	for _, silent := range []bool{false, true} {
		for _, r := range h.sent[rows:] {
			if silent == (r.answer == "") {
				t.Run(r.String(), func(t *testing.T) { h.wantAnswer(t, r) })
			}
		}
	}
	for _, r := range h.sent[rows:] {
		if r.name == usualSYN { // else nobody would hear what reaches pods, and silence would mean nothing
			t.Run(r.String()+", reaches a pod", func(t *testing.T) {
				eventually(t, "a pod gets it", func() error {
					if h.reached(r.target.six, r.mark) != reachesPod {
						return errors.New("none does")
					}
					return nil
				})
			})
		}
	}
	once, cancel := context.WithCancel(t.Context())
	cancel()
	for i, other := range others {
		t.Run(targets[i].name+"/the connection of another client goes on", func(t *testing.T) {
			if err := lab.Talk(once, other); err != nil {
				t.Error(err)
			}
		})
	}
	for _, target := range targets {
		if target.floods() {
			h.flood(t, target, uint16(firstFlood+turn*flood))
		}
	}
}

func (h *hostile) send(r sentRow) error {
	for _, p := range r.packets(r.mark) {
		if err := h.w.send(frameOf(r.target.six, r.node, h.w.own, stamped(r.target.six, p, r.mark))); err != nil {
			return err
		}
	}
	return nil
}

// wantAnswer waits for the answer to a row, which it sends again from time to time: a busy machine loses frames.
func (h *hostile) wantAnswer(t *testing.T, r sentRow) {
	if err := h.answered(r); r.answer == "" {
		if err != nil {
			t.Error(err)
		}
		return
	}
	eventually(t, "the answer", func() error {
		if within(2*time.Second, func() error { return h.answered(r) }) == nil {
			return nil
		}
		return errors.Join(h.answered(r), h.send(r))
	})
}

// wantNoMore checks that nothing else has come since, such as what a kernel says that looked for an address in vain.
func (h *hostile) wantNoMore(t *testing.T) {
	t.Helper()
	for _, r := range h.sent {
		if err := h.answered(r); err != nil {
			t.Errorf("%s: at last %v", r, err)
		}
	}
}

// answered returns an error unless a row has got its answer, and nothing else.
func (h *hostile) answered(r sentRow) error {
	got := h.heard(r.target.six, r.mark)
	if r.spoofed && got == "" {
		got = h.reached(r.target.six, r.mark)
	}
	if got != r.answer && (got == "" || got != r.late) {
		return fmt.Errorf("%q, want %q", got, r.answer)
	}
	return nil
}

// flood sends a VIP more than it takes from a client.
func (h *hostile) flood(t *testing.T, target packetTarget, first uint16) {
	six, node, vip := target.six, nodeMAC(t, h.l, target.node), target.at
	t.Run(target.name+"/a flood of SYNs from one address", func(t *testing.T) {
		for i := range uint16(flood) {
			segment := tcpSegment(hostileOf(six), vip, first+i, syn, nil)
			_ = h.w.send(frameOf(six, node, h.w.own, packetOf(six, protoTCP, vip.Addr(), segment, nil)))
		}
		eventually(t, "one of them is answered", func() error {
			for i := range uint16(flood) {
				if h.heard(six, first+i) == "SYN-ACK" {
					return nil
				}
			}
			return errors.New("none is")
		})
	})
	t.Run(target.name+"/a flood of ACKs from many addresses", func(t *testing.T) {
		for i := range flood {
			source, at := netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}), 12
			if six {
				source, at = lab.Twin(source), 8
			}
			segment := tcpSegment(source, vip, uint16(i), ack, nil)
			_ = h.w.send(frameOf(six, node, h.w.own, packetOf(six, protoTCP, vip.Addr(), segment,
				func(b []byte) { copy(b[at:], source.AsSlice()) })))
		}
		if _, err := h.l.Ask(t.Context(), hostileHost, "tcp", vip); err != nil {
			t.Error(err)
		}
	})
}

// openHostileHost gives the hostile host its further addresses, and has no kernel leave out an answer.
func openHostileHost(t *testing.T, l *lab.Lab) *hostile {
	t.Helper()
	mustExec(t, l, hostileHost, "ip", "addr", "add", hostileIP.String()+"/32", "dev", "eth0")
	mustExec(t, l, hostileHost, "ip", "addr", "add", hostileIP6.String()+"/128", "dev", "eth0", "nodad")
	hosts := []string{"tor-1"}
	for _, n := range l.Cluster().Nodes {
		hosts = append(hosts, n.Name)
	}
	var pods []*wire
	for _, p := range l.Pods("my-nginx") {
		hosts = append(hosts, p.Name)
		pods = append(pods, openWire(t, l, p.Name))
	}
	for _, host := range hosts { // a kernel would send redirects, and one error a second to each client
		mustExec(t, l, host, "sh", "-c", "for f in /proc/sys/net/ipv4/conf/*/send_redirects; do echo 0 >$f; done")
		mustExec(t, l, host, "sysctl", "-q", "-w", "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
	}
	w := openWire(t, l, hostileHost)
	return &hostile{l: l, w: w, heard: listenFor(t, answerIn, w), reached: listenFor(t, reachedBy, pods...)}
}

// frameReader finds in a frame what it is to a host, by family and mark.
type frameReader = func(frame []byte, own net.HardwareAddr) (six bool, mark uint16, what string, ok bool)

// listenFor notes what comes to hosts, by family and mark. It ends with the test.
func listenFor(t *testing.T, read frameReader, wires ...*wire) (heard func(six bool, mark uint16) string) {
	t.Helper()
	var mu sync.Mutex
	marks := map[bool]map[uint16]string{false: {}, true: {}}
	var reading sync.WaitGroup
	t.Cleanup(func() {
		for _, w := range wires {
			w.conn.Close()
		}
		reading.Wait()
	})
	for _, w := range wires {
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
				if six, mark, what, ok := read(b[:n], w.own); ok {
					mu.Lock()
					marks[six][mark] = what
					mu.Unlock()
				}
			}
		})
	}
	return func(six bool, mark uint16) string {
		mu.Lock()
		defer mu.Unlock()
		return marks[six][mark]
	}
}

// reachedBy finds a connection's beginning that a pod gets, whatever its addresses and ports have become: the mark is
// what stamped has made of it, and tcpSegment the rest.
func reachedBy(frame []byte, _ net.HardwareAddr) (six bool, mark uint16, what string, ok bool) {
	if len(frame) < 14+20 {
		return false, 0, "", false
	}
	ip := frame[14:]
	var protocol byte
	var body []byte
	switch kind := binary.BigEndian.Uint16(frame[12:]); {
	case kind == 0x0800:
		mark, protocol, body = binary.BigEndian.Uint16(ip[4:]), ip[9], ip[min(int(ip[0]&15)*4, len(ip)):]
	case kind == 0x86dd && len(ip) >= 40:
		six, mark, protocol, body = true, binary.BigEndian.Uint16(ip[2:]), ip[6], ip[40:]
	}
	sent := tcpSegment(hostileIP, netip.AddrPort{}, 0, syn, nil)
	ok = protocol == protoTCP && len(body) >= len(sent) && bytes.Equal(body[4:16], sent[4:16]) // what no NAT changes
	return six, mark, reachesPod, ok
}

// answerIn reads an answer to one of the packets.
func answerIn(frame []byte, own net.HardwareAddr) (six bool, mark uint16, what string, ok bool) {
	if len(frame) < 14+20+8 || !bytes.Equal(frame[:6], own) {
		return false, 0, "", false
	}
	ip := frame[14:]
	var protocol byte
	var body []byte
	switch kind := binary.BigEndian.Uint16(frame[12:]); {
	case kind == 0x0800 && bytes.Equal(ip[16:20], hostileIP.AsSlice()):
		protocol, body = ip[9], ip[min(int(ip[0]&15)*4, len(ip)):]
	case kind == 0x86dd && len(ip) >= 48 && (bytes.Equal(ip[24:40], hostileIP6.AsSlice()) || ip[24] == 0xfe):
		six, protocol, body = true, ip[6], ip[40:]
	default:
		return false, 0, "", false
	}
	if len(body) < 8 {
		return false, 0, "", false
	}
	switch protocol {
	case protoTCP:
		if len(body) < 20 {
			return false, 0, "", false
		}
		mark = binary.BigEndian.Uint16(body[2:])
		switch flags := body[13]; {
		case flags&rst != 0:
			what = "RST"
		case flags&(syn|ack) == syn|ack:
			what = "SYN-ACK"
		default:
			what = fmt.Sprintf("TCP %08b", flags)
		}
	case protoICMP:
		mark = binary.BigEndian.Uint16(body[4:])
		if body[0] != 0 && len(body) >= 8+20 { // an error quotes what it is about
			mark = binary.BigEndian.Uint16(body[8+4:])
		}
		what = fmt.Sprintf("ICMP %d/%d", body[0], body[1])
	case protoICMPv6:
		switch {
		case body[0] >= 130 && body[0] <= 137: // neighbor discovery, and groups
			return false, 0, "", false
		case body[0] < 128 && len(body) >= 8+40:
			mark = binary.BigEndian.Uint16(body[8+2:])
		default:
			mark = binary.BigEndian.Uint16(body[4:])
		}
		what = fmt.Sprintf("ICMPv6 %d/%d", body[0], body[1])
	case protoUDP:
		mark, what = binary.BigEndian.Uint16(body[2:]), "UDP"
	default:
		return false, 0, "", false
	}
	return six, mark, what, true
}
