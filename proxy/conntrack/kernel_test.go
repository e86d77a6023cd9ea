package conntrack

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// open opens the table of a namespace.
func open(t testing.TB, ns *nstest.NS) Netlink {
	t.Helper()
	var n Netlink
	ns.Do(t, func() (err error) {
		n, err = Open()
		return err
	})
	t.Cleanup(n.Close)
	return n
}

// make makes a flow in the kernel's table, from a client to f.To, answered by f.From.
func (n Netlink) make(client netip.AddrPort, f Flow) error { return n.makeIn(client, f, 0) }

// makeIn makes a flow in a state of TCP.
func (n Netlink) makeIn(client netip.AddrPort, f Flow, tcpState uint8) error {
	inet := uint8(unix.AF_INET)
	if f.To.Addr().Is6() {
		inet = unix.AF_INET6
	}
	const newFlow = unix.NFNL_SUBSYS_CTNETLINK << 8
	all := flowAttributes(client, f, tcpState)
	return n.conn.Request(request(inet, newFlow, unix.NLM_F_CREATE|unix.NLM_F_EXCL, all), nil)
}

// flowAttributes describes a flow as the kernel does.
func flowAttributes(client netip.AddrPort, f Flow, tcpState uint8) (all nfnetlink.Attributes) {
	tuple := func(kind uint16, from, to netip.AddrPort) {
		source, destination := uint16(sourceIPv4), uint16(destIPv4)
		if f.To.Addr().Is6() {
			source, destination = sourceIPv6, destIPv6
		}
		all.Nested(kind, func() {
			all.Nested(tupleIP, func() {
				all.Bytes(source, from.Addr().AsSlice())
				all.Bytes(destination, to.Addr().AsSlice())
			})
			all.Nested(tupleProtocol, func() {
				all.Bytes(attrProtocol, []byte{f.Protocol})
				all.Bytes(attrSourcePort, binary.BigEndian.AppendUint16(nil, from.Port()))
				all.Bytes(attrPort, binary.BigEndian.AppendUint16(nil, to.Port()))
			})
		})
	}
	const timeout, infoSCTP = 7, 3 // CTA_TIMEOUT, CTA_PROTOINFO_SCTP
	tuple(tupleOriginal, client, f.To)
	tuple(tupleReply, f.From, client)
	all.Number(timeout, 600)
	if f.Protocol == unix.IPPROTO_SCTP {
		all.Nested(protocolInfo, func() {
			all.Nested(infoSCTP, func() {
				const established = 4
				all.Bytes(1, []byte{established})
				all.Number(2, 1)
				all.Number(3, 1)
			})
		})
	}
	if tcpState != 0 {
		all.Nested(protocolInfo, func() {
			all.Nested(infoTCP, func() { all.Bytes(infoState, []byte{tcpState}) })
		})
	}
	return all
}

// The kernel's own table: exactly the flows that are meant go.
func TestKernelTable(t *testing.T) {
	ns := nstest.New(t)
	n := open(t, ns)
	at := netip.MustParseAddrPort
	for i, f := range []Flow{
		{unix.IPPROTO_UDP, at("10.96.0.10:53"), at("192.168.1.2:5353")},
		{unix.IPPROTO_UDP, at("10.96.0.10:53"), at("192.168.1.3:5353")},
		{unix.IPPROTO_UDP, at("10.96.0.10:54"), at("192.168.1.3:5353")},
		{unix.IPPROTO_UDP, at("10.96.0.11:53"), at("192.168.1.3:5353")},
		{unix.IPPROTO_SCTP, at("10.96.0.10:53"), at("192.168.1.3:5353")},
		{unix.IPPROTO_TCP, at("10.96.0.10:53"), at("192.168.1.3:5353")},
		{unix.IPPROTO_UDP, at("[fd00::10]:53"), at("[fd00::3]:5353")},
	} {
		client := netip.AddrPortFrom(netip.MustParseAddr("172.31.0.2"), uint16(4000+i))
		if f.To.Addr().Is6() {
			client = netip.AddrPortFrom(netip.MustParseAddr("fd31::2"), uint16(4000+i))
		}
		if err := n.make(client, f); err != nil {
			t.Fatalf("%v: %v", f, err)
		}
	}
	for _, tt := range []struct {
		about About
		want  int
	}{
		{About{unix.IPPROTO_UDP, at("10.96.0.10:53"), at("192.168.1.3:5353")}, 1},
		{About{unix.IPPROTO_UDP, at("10.96.0.10:53"), at("192.168.1.3:5353")}, 0},
		{About{unix.IPPROTO_SCTP, at("10.96.0.10:53"), netip.AddrPort{}}, 1},
		{About{unix.IPPROTO_UDP, at("[fd00::10]:53"), at("[fd00::3]:5353")}, 1},
		{About{}, 2},
	} {
		gone := func(f Flow) bool {
			return f.Protocol != unix.IPPROTO_TCP && f.From.Addr() != at("192.168.1.2:0").Addr()
		}
		if got, err := n.Delete(tt.about, gone); err != nil || got != tt.want {
			t.Errorf("%v: deleted %d, error %v, want %d", tt.about, got, err, tt.want)
		}
	}
	left := ns.Run(t, "conntrack", "-L")
	if lines := strings.Count(left, "dport=53 "); lines != 2 || !strings.Contains(left, "src=192.168.1.2") ||
		!strings.Contains(left, "tcp") {
		t.Errorf("left are\n%s", left)
	}
}

// In a large table too, exactly the flows that are meant go, whoever looks for them.
func TestLargeTable(t *testing.T) {
	ns := nstest.New(t)
	n := open(t, ns)
	to, other := netip.MustParseAddrPort("10.96.0.10:53"), netip.MustParseAddrPort("10.96.0.11:53")
	to6 := netip.MustParseAddrPort("[fd00::10]:53")
	stays, goes := netip.MustParseAddrPort("192.168.1.2:5353"), netip.MustParseAddrPort("192.168.1.3:5353")
	goes6 := netip.MustParseAddrPort("[fd00::3]:5353")
	fill(t, n, smallTable+100, func(i int) Flow {
		return []Flow{{unix.IPPROTO_UDP, to, stays}, {unix.IPPROTO_UDP, to, goes}, {unix.IPPROTO_UDP, other, goes},
			{unix.IPPROTO_TCP, to, goes}, {unix.IPPROTO_UDP, to6, goes6}}[i%5]
	})
	count := func() string { return strings.TrimSpace(ns.Run(t, "conntrack", "-C")) }
	for _, tt := range []struct {
		about About
		left  string
	}{
		{About{unix.IPPROTO_UDP, to, goes}, "8080"},
		{About{unix.IPPROTO_UDP, to, goes}, "8080"},
	} {
		if _, err := n.Delete(tt.about, func(f Flow) bool { return Flow(tt.about) == f }); err != nil {
			t.Fatal(err)
		}
		if left := count(); left != tt.left {
			t.Errorf("%v: %s are left, want %s", tt.about, left, tt.left)
		}
	}
	fill(t, n, smallTable, func(int) Flow {
		return Flow{unix.IPPROTO_UDP, netip.MustParseAddrPort("10.96.0.12:53"), netip.MustParseAddrPort("192.168.1.9:53")}
	})
	v6 := About{unix.IPPROTO_UDP, to6, goes6}
	if got, err := n.Delete(v6, func(f Flow) bool { return Flow(v6) == f }); err != nil || got != (smallTable+100)/5 {
		t.Errorf("%v: deleted %d, error %v", v6, got, err)
	}
	if left := count(); left != "16060" {
		t.Errorf("%s are left", left)
	}
}

// fill makes flows of clients that are all different.
func fill(t testing.TB, n Netlink, flows int, of func(i int) Flow) {
	t.Helper()
	for i := range flows {
		f := of(i)
		addr := netip.AddrFrom4([4]byte{172, byte(i >> 16), byte(i >> 8), byte(i)})
		if f.To.Addr().Is6() {
			addr = netip.AddrFrom16([16]byte{0xfd, 1, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
		}
		if err := n.make(netip.AddrPortFrom(addr, 4000), f); err != nil {
			t.Fatal(fmt.Errorf("flow %d: %w", i, err))
		}
	}
}

// The kernel sends only what is asked for.
func TestKernelFilters(t *testing.T) {
	ns := nstest.New(t)
	n := open(t, ns)
	backend := netip.MustParseAddrPort("192.168.1.3:5353")
	fill(t, n, 100, func(i int) Flow {
		return Flow{unix.IPPROTO_UDP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), 53), backend}
	})
	sent := 0
	about := About{unix.IPPROTO_UDP, netip.MustParseAddrPort("10.96.0.7:53"), backend}
	err := n.conn.Dump(request(unix.AF_INET, getFlow, unix.NLM_F_DUMP, about.filter()), func(nfnetlink.Message) error {
		sent++
		return nil
	})
	if err != nil || sent != 1 {
		t.Errorf("%d flows came, error %v; want 1 of 100", sent, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte(About{unix.IPPROTO_UDP, netip.MustParseAddrPort("10.96.0.7:53"), netip.AddrPort{}}.filter()))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, ok := decode(b); ok && len(identity(b)) == 0 {
			t.Error("a flow without an identity")
		}
	})
}

// FuzzDecodeConnection checks that what counts as an open connection of TCP is one, and is read as the other reader
// of flows reads it.
func FuzzDecodeConnection(f *testing.F) {
	at := netip.MustParseAddrPort
	for _, seed := range []Flow{
		{unix.IPPROTO_TCP, at("10.96.0.7:53"), at("192.168.1.3:5353")},
		{unix.IPPROTO_TCP, at("[2001:db8::7]:53"), at("[2001:db8::3]:5353")},
		{unix.IPPROTO_UDP, at("10.96.0.7:53"), at("192.168.1.3:5353")},
	} {
		for _, tcpState := range []uint8{0, firstOpen - 1, firstOpen, lastOpen, lastOpen + 1} {
			f.Add([]byte(flowAttributes(seed.From, seed, tcpState)))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, ok := decodeConnection(b)
		if !ok {
			return
		}
		said := Flow{unix.IPPROTO_TCP, c.To, c.To}
		again, ok := decodeConnection(flowAttributes(netip.AddrPortFrom(c.Client, 1), said, firstOpen))
		if !ok || again != c {
			t.Errorf("%+v is read back as %+v, %v", c, again, ok)
		}
		flow, ok := decodeFlow(b)
		if ok && (flow.Client.Addr() != c.Client || flow.To != c.To || flow.Protocol != lb.TCP) {
			t.Errorf("%+v is also %+v", c, flow)
		}
	})
}

// Questions in a table that is nearly as full as Linux lets it be by default.
func BenchmarkFullTable(b *testing.B) {
	ns := nstest.New(b)
	n := open(b, ns)
	backend := netip.MustParseAddrPort("192.168.1.3:5353")
	fill(b, n, 250_000, func(i int) Flow {
		return Flow{unix.IPPROTO_UDP, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i % 16), byte(i % 256)}), 53),
			backend}
	})
	for name, about := range map[string]About{"few": {unix.IPPROTO_UDP, netip.MustParseAddrPort("10.96.99.99:53"),
		backend}, "all": {}} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if got, err := n.Delete(about, func(Flow) bool { return false }); err != nil || got != 0 {
					b.Fatal(got, err)
				}
			}
		})
	}
}

// Connections are TCP flows of clients that are open at least one way.
func TestKernelConnections(t *testing.T) {
	n := open(t, nstest.New(t))
	at := netip.MustParseAddrPort
	const synSent, established, finWait, closeWait, lastAck, timeWait = 1, 3, 4, 5, 6, 7
	vip, pod := at("192.0.2.10:80"), at("10.1.0.2:8080")
	for i, state := range []uint8{synSent, established, finWait, closeWait, lastAck, timeWait} {
		client := netip.AddrPortFrom(netip.MustParseAddr("172.31.0.2"), uint16(4000+i))
		if err := n.makeIn(client, Flow{unix.IPPROTO_TCP, vip, pod}, state); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []Flow{{unix.IPPROTO_UDP, vip, pod}, {unix.IPPROTO_SCTP, vip, pod}} {
		if err := n.make(at("172.31.0.2:5000"), f); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.makeIn(at("[fd31::2]:4000"), Flow{unix.IPPROTO_TCP, at("[fd00::10]:80"), at("[fd00::3]:80")},
		established); err != nil {
		t.Fatal(err)
	}
	got := map[Connection]int{}
	if err := n.Connections(func(c Connection) { got[c]++ }); err != nil {
		t.Fatal(err)
	}
	want := map[Connection]int{
		{netip.MustParseAddr("172.31.0.2"), vip}:              3,
		{netip.MustParseAddr("fd31::2"), at("[fd00::10]:80")}: 1,
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// The kernel says where a flow came from and went to before it was translated, by who sends and receives it
// since.
func TestKernelOriginal(t *testing.T) {
	ns := nstest.New(t)
	n := open(t, ns)
	for _, family := range []struct{ client, to, at string }{
		{"192.0.2.9:5", "198.51.100.1:53", "192.0.2.1:7484"}, {"[2001:db8::9]:5", "[2001:db8:1::1]:53", "[2001:db8::1]:7484"},
	} {
		client, to, at := netip.MustParseAddrPort(family.client), netip.MustParseAddrPort(family.to),
			netip.MustParseAddrPort(family.at)
		if err := n.make(client, Flow{Protocol: unix.IPPROTO_UDP, To: to, From: at}); err != nil {
			t.Fatal(err)
		}
		gotFrom, gotTo, ok, err := n.Original(unix.IPPROTO_UDP, client, at)
		if err != nil || !ok || gotFrom != client || gotTo != to {
			t.Errorf("%s to %s, %v, %v", gotFrom, gotTo, ok, err)
		}
		for _, other := range []netip.AddrPort{netip.AddrPortFrom(client.Addr(), 6), netip.AddrPortFrom(to.Addr(), 5)} {
			if _, _, ok, err := n.Original(unix.IPPROTO_UDP, other, at); ok || err != nil {
				t.Errorf("of another client: %v, %v", ok, err)
			}
		}
		if _, _, ok, err := n.Original(unix.IPPROTO_TCP, client, at); ok || err != nil {
			t.Errorf("of another protocol: %v, %v", ok, err)
		}
	}
}
