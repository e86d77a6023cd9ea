package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/mdlayher/packet"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// wire sends frames from a host's interface to the LAN.
type wire struct {
	conn *packet.Conn
	own  net.HardwareAddr
}

func openWire(t *testing.T, l *lab.Lab, host string) *wire {
	t.Helper()
	w := &wire{}
	err := l.In(host, func() error {
		i, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		w.own = i.HardwareAddr
		w.conn, err = packet.Listen(i, packet.Raw, 0x0003, nil) // ETH_P_ALL
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.conn.Close() })
	return w
}

func (w *wire) send(frame []byte) error {
	_, err := w.conn.WriteTo(frame, &packet.Addr{HardwareAddr: net.HardwareAddr(frame[:6])})
	return err
}

// nodeMAC returns the address of a node's interface on the LAN.
func nodeMAC(t testing.TB, l *lab.Lab, node string) (mac net.HardwareAddr) {
	t.Helper()
	err := l.In(node, func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			mac = i.HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return mac
}

func ethernetFrame(to, from net.HardwareAddr, kind uint16, payload []byte) []byte {
	b := append(append([]byte{}, to...), from...)
	b = append(binary.BigEndian.AppendUint16(b, kind), payload...)
	return append(b, make([]byte, max(0, 60-len(b)))...) // as the wire pads it
}

// broken are frames that a node leaves without an answer, and why.
type broken struct {
	name, reason string
	frame        []byte
}

var (
	broadcast = net.HardwareAddr{255, 255, 255, 255, 255, 255}
	groupMAC  = net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}
	nobodysIP = netip.MustParseAddr("172.26.236.240")
)

// arpPayload returns a request for an address, changed.
func arpPayload(sender net.HardwareAddr, from, target netip.Addr, change func(b []byte)) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, 0, 1}
	b = append(append(b, sender...), from.AsSlice()...)
	b = append(append(b, make([]byte, 6)...), target.AsSlice()...)
	if change != nil {
		change(b)
	}
	return b
}

func brokenARP(own, node net.HardwareAddr) []broken {
	vip := seedVIP.Addr()
	ask := func(to net.HardwareAddr, target netip.Addr, change func(b []byte)) []byte {
		return ethernetFrame(to, own, 0x0806, arpPayload(own, hostileIP, target, change))
	}
	set := func(at int, value ...byte) []byte {
		return ask(node, vip, func(b []byte) { copy(b[at:], value) })
	}
	from := func(sender net.HardwareAddr, ip, target netip.Addr) []byte {
		return ethernetFrame(node, own, 0x0806, arpPayload(sender, ip, target, nil))
	}
	return []broken{
		{"hardware type 6", "malformed", set(0, 0, 6)},
		{"hardware type 0", "malformed", set(0, 0, 0)},
		{"protocol IPv6", "malformed", set(2, 0x86, 0xdd)},
		{"hardware addresses of 0 bytes", "malformed", set(4, 0)},
		{"hardware addresses of 8 bytes", "malformed", set(4, 8)},
		{"hardware addresses of 255 bytes", "malformed", set(4, 255)},
		{"addresses of 0 bytes", "malformed", set(5, 0)},
		{"addresses of 16 bytes", "malformed", set(5, 16)},
		{"operation 0", "not-request", set(6, 0, 0)},
		{"operation 3, reverse ARP", "not-request", set(6, 0, 3)},
		{"operation 65535", "not-request", set(6, 255, 255)},
		{"an answer that nobody asked for", "not-request", ask(node, nobodysIP, func(b []byte) { b[7] = 2 })},
		{"a sender that is a group", "bad-sender", from(groupMAC, hostileIP, vip)},
		{"a sender that is everybody", "bad-sender", from(broadcast, hostileIP, vip)},
		{"a sender with the node's own address", "bad-sender", from(node, hostileIP, vip)},
		{"news of an address of nobody", "announced", from(own, nobodysIP, nobodysIP)},
		{"news of 0.0.0.0", "announced", from(own, netip.IPv4Unspecified(), netip.IPv4Unspecified())},
		{"a question for an address of nobody", "not-ours", ask(broadcast, nobodysIP, nil)},
		{"a question for 255.255.255.255", "not-ours", ask(node, netip.MustParseAddr("255.255.255.255"), nil)},
		{"a question for 127.0.0.1", "not-ours", ask(node, netip.MustParseAddr("127.0.0.1"), nil)},
		{"a question with 1400 bytes after it", "not-ours", append(ask(node, nobodysIP, nil), make([]byte, 1400)...)},
		{"a question for a VIP of BGP", "not-ours", ask(node, routedVIP.Addr(), nil)},
		{"a question to a group", "not-for-us", ask(groupMAC, vip, nil)},
	}
}

// solicitation returns a neighbor solicitation for an address, changed before and after its
// checksum is made.
func solicitationOf(to, from net.HardwareAddr, source, destination, target netip.Addr,
	before, after func(ip, icmp []byte)) []byte {
	icmp := append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, target.AsSlice()...)
	icmp = append(append(icmp, 1, 1), from...)
	ip := make([]byte, 40)
	ip[0], ip[6], ip[7] = 6<<4, 58, 255
	binary.BigEndian.PutUint16(ip[4:], uint16(len(icmp)))
	copy(ip[8:], source.AsSlice())
	copy(ip[24:], destination.AsSlice())
	if before != nil {
		before(ip, icmp)
	}
	binary.BigEndian.PutUint16(icmp[2:], checksum6(ip, icmp))
	if after != nil {
		after(ip, icmp)
	}
	return ethernetFrame(to, from, 0x86dd, append(ip, icmp...))
}

// checksum6 returns the checksum of an upper-layer packet (RFC 8200 section 8.1).
func checksum6(ip, body []byte) uint16 {
	pseudo := append(bytes.Clone(ip[8:40]), 0, 0, byte(len(body)>>8), byte(len(body)), 0, 0, 0, ip[6])
	return checksum(append(pseudo, body...))
}

// checksum returns the Internet checksum (RFC 1071).
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i, octet := range b {
		sum += uint32(octet) << (8 * (1 - i%2))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func brokenNDP(own, node net.HardwareAddr, vip netip.Addr) []broken {
	stranger, nobody := lab.Twin(hostileIP), lab.Twin(nobodysIP)
	group := netip.MustParseAddr("ff02::1:ff00:180")
	groupMAC := net.HardwareAddr{0x33, 0x33, 0xff, 0, 1, 0x80}
	// To the node alone: switches that look into multicast drop what makes no sense there.
	with := func(before, after func(ip, icmp []byte)) []byte {
		return solicitationOf(node, own, stranger, group, vip, before, after)
	}
	return []broken{
		{"a wrong checksum", "malformed", with(nil, func(_, icmp []byte) { icmp[2]++ })},
		{"hop limit 64", "malformed", with(func(ip, _ []byte) { ip[7] = 64 }, nil)},
		{"hop limit 0", "malformed", with(func(ip, _ []byte) { ip[7] = 0 }, nil)},
		{"code 1", "malformed", with(func(_, icmp []byte) { icmp[1] = 1 }, nil)},
		{"version 4", "malformed", with(func(ip, _ []byte) { ip[0] = 0x45 }, nil)},
		{"a length beyond the packet", "malformed", with(nil, func(ip, _ []byte) { ip[4] = 255 })},
		{"a length of 4", "malformed", with(nil, func(ip, _ []byte) { ip[4], ip[5] = 0, 4 })},
		{"a length of 0", "malformed", with(nil, func(ip, _ []byte) { ip[4], ip[5] = 0, 0 })},
		{"an option of 0 bytes", "malformed", with(func(_, icmp []byte) { icmp[25] = 0 }, nil)},
		{"an option of 2040 bytes", "malformed", with(func(_, icmp []byte) { icmp[25] = 255 }, nil)},
		{"a group as target", "malformed", solicitationOf(node, own, stranger, group, group, nil, nil)},
		{"an advertisement of an address of nobody", "not-request", solicitationOf(groupMAC, own, stranger, group, nobody,
			func(_, icmp []byte) { icmp[0] = 136 }, nil)},
		{"a source that is a group", "bad-sender", solicitationOf(groupMAC, own, group, group, vip, nil, nil)},
		{"a sender with the node's own address", "bad-sender",
			solicitationOf(groupMAC, node, stranger, group, vip, nil, nil)},
		{"a question for an address of nobody", "not-ours", solicitationOf(groupMAC, own, stranger, group, nobody, nil, nil)},
		{"somebody who is about to take an address of nobody", "not-ours",
			solicitationOf(groupMAC, own, netip.IPv6Unspecified(), group, nobody, nil, nil)},
		{"a question for ::", "not-ours", solicitationOf(groupMAC, own, stranger, group, netip.IPv6Unspecified(), nil, nil)},
		{"a question for ::1", "not-ours", solicitationOf(groupMAC, own, stranger, group, netip.IPv6Loopback(), nil, nil)},
	}
}

// hostileNeighbors sends frames that no host would to the nodes that answer for the VIPs of the
// bystander.
func hostileNeighbors(t *testing.T, l *lab.Lab) {
	w := openWire(t, l, hostileHost)
	vip6 := lab.Twin(seedVIP.Addr())
	owner, owner6 := answerer(t, l, seedVIP.Addr()), answerer(t, l, vip6)
	const many = 50 // more than others cause meanwhile
	for _, kind := range []struct {
		name, owner string
		rows        []broken
	}{
		{"ARP", owner, brokenARP(w.own, nodeMAC(t, l, owner))},
		{"NDP", owner6, brokenNDP(w.own, nodeMAC(t, l, owner6), vip6)},
	} {
		t.Run(kind.name, func(t *testing.T) {
			for _, row := range kind.rows {
				t.Run(row.name, func(t *testing.T) {
					wantCounted(t, l.Agent("speaker", kind.owner),
						fmt.Sprintf("landfall_speaker_arp_dropped_total{interface=\"eth0\",reason=%q}", row.reason), many,
						func() error { return w.send(row.frame) })
				})
			}
		})
	}
	t.Run("a storm of questions", func(t *testing.T) {
		questions := ethernetFrame(broadcast, w.own, 0x0806, arpPayload(w.own, hostileIP, nobodysIP, nil))
		storm := func() error {
			for range 20000 {
				_ = w.send(questions)
			}
			return nil
		}
		wantCounted(t, l.Agent("speaker", owner),
			`landfall_speaker_arp_dropped_total{interface="eth0",reason="not-ours"}`, 1, storm)
		wantARPAnswer(t, w, seedVIP.Addr(), nodeMAC(t, l, owner))
	})
	t.Run("the VIP claimed by many devices", func(t *testing.T) {
		// Only the owner hears them, so that no client is led astray: that no speaker can prevent.
		node := nodeMAC(t, l, owner)
		for i := range 1000 {
			mac := net.HardwareAddr{2, 0xad, 0, 0, byte(i >> 8), byte(i)}
			_ = w.send(ethernetFrame(node, mac, 0x0806, arpPayload(mac, seedVIP.Addr(), seedVIP.Addr(), nil)))
		}
		eventually(t, "the owner reports some of them, and stays", func() error {
			page, err := l.Agent("speaker", owner).Get(t.Context(), "/metrics")
			if err != nil {
				return err
			}
			n := bytes.Count([]byte(page), []byte(`landfall_speaker_address_conflict{interface="eth0",mac="02:ad:`))
			if n == 0 || n > 8 {
				return fmt.Errorf("%d devices are reported, want 1 to 8", n)
			}
			if now := answerers(t, l, seedVIP.Addr()); len(now) != 1 || now[0] != owner {
				return errors.New("another node answers")
			}
			return nil
		})
	})
}

// wantARPAnswer asks who has an address, again from time to time, until somebody answers, who is to be the one.
func wantARPAnswer(t *testing.T, w *wire, addr netip.Addr, want net.HardwareAddr) {
	t.Helper()
	question := ethernetFrame(broadcast, w.own, 0x0806, arpPayload(w.own, hostileIP, addr, nil))
	eventually(t, addr.String()+" is answered for", func() error {
		if err := w.conn.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			return err
		}
		if err := w.send(question); err != nil {
			return err
		}
		frame := make([]byte, 2048)
		for {
			n, _, err := w.conn.ReadFrom(frame)
			if err != nil {
				return err
			}
			reply := []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 2}
			if n < 14+28 || !bytes.Equal(frame[:6], w.own) || !bytes.Equal(frame[12:22], reply) ||
				!bytes.Equal(frame[28:32], addr.AsSlice()) {
				continue
			}
			if !bytes.Equal(frame[22:28], want) {
				t.Fatalf("%v answers, want %v", net.HardwareAddr(frame[22:28]), want)
			}
			return nil
		}
	})
}
