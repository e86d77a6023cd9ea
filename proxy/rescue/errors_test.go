package rescue

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// Routers tell the VIP when an answer is too large for the way to a client, and may send that to any node that
// announces it. Nodes move such errors to the one that knows the connection, through the tunnel here.
func TestContract5ErrorsReachTheNodeOfTheConnection(t *testing.T) {
	r := newRacks(t, 3)
	narrow(t, r.client, "10.9.0.1", "fd09::1")
	r.router.Run(t, "ip", "link", "set", "far0", "mtu", "1300")
	r.turn(0)
	before := slices.Concat(r.dial(t, far4.vip, 3), r.dial(t, far6.vip, 3))
	r.turn(1)
	r.meet(t)
	after := slices.Concat(r.dial(t, far4.vip, 3), r.dial(t, far6.vip, 3))
	for _, node := range []int{1, 2} {
		r.turn(node)
		for _, conn := range slices.Concat(before, after) {
			if err := echo(conn, 100_000); err != nil {
				t.Fatalf("%s, at node %d: %v", conn.RemoteAddr(), node, err)
			}
		}
	}
}

// narrow has a client ask for segments as large as its link takes, and send smaller ones. The router's way to it
// takes less.
func narrow(t *testing.T, client *nstest.NS, gateway, gateway6 string) {
	client.Run(t, "ip", "route", "replace", "default", "via", gateway, "mtu", "lock", "900", "advmss", "1460")
	client.Run(t, "ip", "-6", "route", "replace", "default", "via", gateway6, "mtu", "lock", "1280", "advmss", "1440")
}

// The same on one LAN, where only the previous owner is asked.
func TestContract5ErrorsReachThePreviousOwner(t *testing.T) {
	l := newLAN(t)
	router := l.client
	far := nstest.New(t)
	nstest.Veth(t, far, "eth0", far4.client+"/24", router, "far0", "10.9.0.1/24")
	far.Run(t, "ip", "addr", "add", far6.client+"/64", "dev", "eth0", "nodad")
	router.Run(t, "ip", "addr", "add", "fd09::1/64", "dev", "far0", "nodad")
	router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	narrow(t, far, "10.9.0.1", "fd09::1")
	router.Run(t, "ip", "link", "set", "far0", "mtu", "1300")
	for _, node := range []*nstest.NS{l.a, l.b} {
		node.Run(t, "ip", "route", "add", "10.9.0.0/24", "via", v4.client)
		node.Run(t, "ip", "route", "add", "fd09::/64", "via", v6.client)
	}
	client := lan{client: far}
	l.point(t, v4.vip, l.macA)
	l.point(t, v6.vip, l.macA)
	conns := slices.Concat(client.dial(t, v4.vip, 3), client.dial(t, v6.vip, 3))
	want(t, l.b, rescuer(t, l.b), from(v4.vip, v4.a, v6.vip, v6.a), 2)
	want(t, l.a, rescuer(t, l.a), from(v4.vip, v4.b, v6.vip, v6.b), 2)
	l.point(t, v4.vip, l.macB)
	l.point(t, v6.vip, l.macB)
	for _, conn := range conns {
		if err := echo(conn, 100_000); err != nil {
			t.Fatalf("%s: %v", conn.RemoteAddr(), err)
		}
	}
}

// An error about what no node knows goes round once, and between nodes that would each move it to the other not
// at all. A flood of them ends at the limit.
func TestContract11ErrorsEnd(t *testing.T) {
	const sent = 40
	r := newRack(t, 4)
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		wantArrivals(t, r.lan, r.nodes, sent, errorAbout(r.macs[0], at.vip), []int{sent, sent, sent, sent})
	}
	l := newLAN(t)
	want(t, l.a, rescuer(t, l.a), from(v4.vip, v4.b, v6.vip, v6.b), 2)
	want(t, l.b, rescuer(t, l.b), from(v4.vip, v4.a, v6.vip, v6.a), 2)
	for _, at := range []addresses{v4, v6} {
		wantArrivals(t, l, []*nstest.NS{l.a, l.b}, sent, errorAbout(l.macA, at.vip), []int{sent, sent})
	}
	l = newLAN(t)
	want(t, l.a, limited(t, l.a, 1), from(v4.vip, v4.b, v6.vip, v6.b), 2)
	for _, at := range []addresses{v4, v6} {
		wantArrivals(t, l, []*nstest.NS{l.b}, 10_000, errorAbout(l.macA, at.vip), []int{burst})
	}
}

// wantArrivals sends a frame some times, and compares how often it arrives at nodes. Within the time of a slow
// machine some more than the limit of 1 a second may.
func wantArrivals(t *testing.T, l lan, nodes []*nstest.NS, n int, frame []byte, wanted []int) {
	t.Helper()
	var reads []func() int
	for _, node := range nodes {
		node.Run(t, "nft", "add table inet arrivals; delete table inet arrivals")
		reads = append(reads, arrivals(t, node, madeUp...))
	}
	l.send(t, func(yield func([]byte) bool) {
		for range n {
			if !yield(frame) {
				return
			}
		}
	})
	time.Sleep(time.Second) // what goes round comes back within that
	for i, read := range reads {
		if got := read(); got < wanted[i] || got > wanted[i]+30 {
			t.Errorf("to %v: %d packets arrive at node %d, want %d", frame[:6], got, i, wanted[i])
		}
	}
}

// errorAbout is the frame of a router's error about an answer of a VIP, whose connection nobody knows.
func errorAbout(mac, vip string) []byte {
	hardware, _ := net.ParseMAC(mac)
	router, dest := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr(vip)
	if dest.Is6() {
		router = netip.MustParseAddr("2001:db8::1")
	}
	ports := []byte{0, 80, 0x9c, 0x40, 0, 0, 0, 0} // of a TCP header, and the sequence number
	tooBig := func(kind, code byte, inner []byte) []byte {
		return append([]byte{kind, code, 0, 0, 0, 0, 5, 0}, append(inner, ports...)...)
	}
	frame := append(slices.Clone(hardware), 2, 0, 0, 0, 0, 9)
	if dest.Is6() {
		inner := append([]byte{0x60, 0, 0, 0, 0, 8, unix.IPPROTO_TCP, 64}, append(dest.AsSlice(), router.AsSlice()...)...)
		icmp := tooBig(2, 0, inner)
		pseudo := append(append(router.AsSlice(), dest.AsSlice()...), 0, 0, 0, byte(len(icmp)), 0, 0, 0, unix.IPPROTO_ICMPV6)
		binary.BigEndian.PutUint16(icmp[2:], checksum(append(pseudo, icmp...)))
		frame = append(frame, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(icmp)), unix.IPPROTO_ICMPV6, 64)
		return append(append(append(frame, router.AsSlice()...), dest.AsSlice()...), icmp...)
	}
	header := func(size, protocol byte, source, dest netip.Addr) []byte {
		ip := append([]byte{0x45, 0, 0, size, 0, 0, 0, 0, 64, protocol, 0, 0}, source.AsSlice()...)
		ip = append(ip, dest.AsSlice()...)
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
		return ip
	}
	icmp := tooBig(3, 4, header(28, unix.IPPROTO_TCP, dest, router))
	binary.BigEndian.PutUint16(icmp[2:], checksum(icmp))
	frame = append(frame, 0x08, 0)
	return append(append(frame, header(byte(20+len(icmp)), unix.IPPROTO_ICMP, router, dest)...), icmp...)
}
