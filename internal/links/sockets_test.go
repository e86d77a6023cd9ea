package links

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestConnected looks for connections that either end has opened, in both families, from each of a host's addresses.
func TestConnected(t *testing.T) {
	node, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "eth0", "192.0.2.9/24", router, "eth0", "192.0.2.1/24")
	node.Run(t, "ip", "addr", "add", "192.0.2.8/24", "dev", "eth0")
	node.Run(t, "ip", "addr", "add", "2001:db8::9/64", "dev", "eth0", "nodad")
	router.Run(t, "ip", "addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad")
	hold := func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) } // until the other end closes
	router.Serve(t, "192.0.2.1:179", hold)
	router.Serve(t, "[2001:db8::1]:179", hold)
	node.Serve(t, ":179", hold) // a socket for both families
	for _, test := range []struct {
		name               string
		from               *nstest.NS
		source, to         string
		local, peer, other string
	}{
		{"IPv4", node, "192.0.2.9:0", "192.0.2.1:179", "192.0.2.9", "192.0.2.1:179", "192.0.2.8"},
		{"IPv4, its second address", node, "192.0.2.8:0", "192.0.2.1:179", "192.0.2.8", "192.0.2.1:179", "192.0.2.9"},
		{"IPv4, by the peer", router, "192.0.2.1:0", "192.0.2.9:179", "192.0.2.9", "192.0.2.1:179", "192.0.2.8"},
		{"IPv6", node, "[2001:db8::9]:0", "[2001:db8::1]:179", "2001:db8::9", "[2001:db8::1]:179", "2001:db8::8"},
		{"IPv6, by the peer", router, "[2001:db8::1]:0", "[2001:db8::9]:179", "2001:db8::9", "[2001:db8::1]:179",
			"2001:db8::8"},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := func(local, peer string, want bool) {
				t.Helper()
				node.Do(t, func() error {
					found, err := Connected(netip.MustParseAddr(local), netip.MustParseAddrPort(peer))
					if found != want {
						t.Errorf("a connection between %s and %s: %v", local, peer, found)
					}
					return err
				})
			}
			want(test.local, test.peer, false)
			var conn net.Conn
			test.from.Do(t, func() (err error) {
				dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(test.source))}
				conn, err = dialer.Dial("tcp", test.to)
				return err
			})
			want(test.local, test.peer, true)
			want(test.other, test.peer, false)
			at := netip.MustParseAddrPort(test.peer)
			want(test.local, netip.AddrPortFrom(at.Addr(), 180).String(), false)
			conn.Close()
			want(test.local, test.peer, false)
		})
	}
	node.Do(t, func() error {
		if got := LocalTo(netip.MustParseAddr("192.0.2.1")); got.String() != "192.0.2.9" {
			t.Errorf("to the router from %s", got)
		}
		if got := LocalTo(netip.MustParseAddr("198.51.100.1")); got.IsValid() {
			t.Errorf("to nowhere from %s", got)
		}
		return nil
	})
}

// TestConnectedElsewhere has a connection that is bound to a device, as programs bind them to the router's interface,
// or the kernel to a VRF. This kernel need not have VRFs.
func TestConnectedElsewhere(t *testing.T) {
	node, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "eth0", "192.0.2.9/24", router, "eth0", "192.0.2.1/24")
	router.Serve(t, "192.0.2.1:179", func(conn net.Conn) { _, _ = conn.Read(make([]byte, 1)) })
	node.Do(t, func() error {
		dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			_ = c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "eth0") })
			return err
		}}
		conn, err := dialer.Dial("tcp", "192.0.2.1:179")
		if err != nil {
			return err
		}
		defer conn.Close()
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		local, peer := netip.MustParseAddr("192.0.2.9"), netip.MustParseAddrPort("192.0.2.1:179")
		if found, err := Connected(local, peer); err != nil || !found {
			t.Errorf("a connection that is bound to an interface: %v, %v", found, err)
		}
		found, err := connected(local, peer, func(device int) bool { return device == eth0.Index })
		if err != nil || found {
			t.Errorf("one that is elsewhere: %v, %v", found, err)
		}
		return nil
	})
}

// FuzzEndsOf checks that whatever the kernel tells of a connection has two addresses or is refused, and that those that
// were written are read.
func FuzzEndsOf(f *testing.F) {
	v4, v6 := make([]byte, 72), make([]byte, 72)
	v4[0], v6[0] = unix.AF_INET, unix.AF_INET6
	copy(v4[socketSource:], []byte{192, 0, 2, 9})
	copy(v6[socketSource:], netip.MustParseAddr("::ffff:192.0.2.9").AsSlice())
	for _, seed := range [][]byte{v4, v6, v4[:sizeofSocketEnds], v6[:sizeofSocketEnds-1], {}} {
		f.Add(seed, []byte{192, 0, 2, 9}, []byte{192, 0, 2, 1}, uint32(7))
	}
	f.Add(v6, netip.MustParseAddr("2001:db8::9").AsSlice(), netip.MustParseAddr("2001:db8::1").AsSlice(), uint32(0))
	f.Fuzz(func(t *testing.T, m, source, peer []byte, device uint32) {
		from, to, index, ok := endsOf(m)
		if ok != (from.IsValid() && to.IsValid()) || from.Is4In6() || to.Is4In6() || index < 0 || !ok && index != 0 {
			t.Errorf("%x is read as %s, %s, %d, %v", m, from, to, index, ok)
		}
		wantFrom, _ := netip.AddrFromSlice(source)
		wantTo, _ := netip.AddrFromSlice(peer)
		if !ok || !wantFrom.IsValid() || wantFrom.BitLen() != wantTo.BitLen() {
			return
		}
		m = bytes.Clone(m)
		m[0] = unix.AF_INET6
		if wantFrom.Is4() {
			m[0] = unix.AF_INET
		}
		copy(m[socketSource:socketPeer], source)
		copy(m[socketPeer:socketDevice], peer)
		binary.NativeEndian.PutUint32(m[socketDevice:], device)
		from, to, index, ok = endsOf(m)
		if from != wantFrom.Unmap() || to != wantTo.Unmap() || uint32(index) != device || !ok {
			t.Errorf("%s, %s, %d are read as %s, %s, %d, %v", wantFrom, wantTo, device, from, to, index, ok)
		}
	})
}
