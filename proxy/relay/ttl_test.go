package relay

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// The relay knows with which TTL clients send, also of connections that SYN cookies began.
func TestContract11TheTTLIsKnownWithSYNCookies(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	ns.Run(t, "ip", "link", "set", "lo", "up")
	for _, cookies := range []string{"0", "2"} { // never, always
		ns.Run(t, "sysctl", "-qw", "net.ipv4.tcp_syncookies="+cookies)
		for family, at := range map[lb.Family]string{lb.IPv4: "127.0.0.1", lb.IPv6: "::1"} {
			ns.Do(t, func() error {
				l, err := listenTCP(family, 0)
				if err != nil {
					return err
				}
				defer l.socket.Close()
				for _, ttl := range []int{1, 2, 40, 255} {
					client, err := Dial(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(at), l.port), ttl)
					if err != nil {
						return err
					}
					defer client.Close()
					conn, _, err := l.accept()
					if err != nil {
						return err
					}
					defer conn.Close()
					if got := conn.ttl(family); got != ttl {
						t.Errorf("%s, tcp_syncookies=%s: a client sends with TTL %d, not %d", family, cookies, got, ttl)
					}
				}
				return nil
			})
		}
	}
}

// A backend that does not answer a client with a low TTL may be too far away for that: it is no suspect.
func TestContract11ALowTTLMakesNoSuspect(t *testing.T) {
	for ttl, suspects := range map[int]int{2: 0, enoughHops: 0, enoughHops + 1: 1, 64: 1} {
		g := newRig(t, nil)
		g.relayed(nil, refusing(t))
		dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			_ = c.Control(func(fd uintptr) { err = setTTL(int(fd), unix.AF_INET, ttl) })
			return err
		}}
		at := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(g.sockets.ports()[lb.IPv4])}
		if conn, err := dialer.Dial("tcp", at.String()); err == nil { // else it is reset already
			conn.Close()
		}
		g.until("the connection failed", func() bool { return g.Counts()[0].Failures == 1 })
		g.table.mu.Lock()
		s := g.table.services[id{web, lb.TCP}]
		g.table.mu.Unlock()
		s.mu.Lock()
		if len(s.suspects) != suspects {
			t.Errorf("with TTL %d: %v", ttl, s.suspects)
		}
		s.mu.Unlock()
	}
}

// FuzzTTL checks that a TTL is read from whatever the kernel has saved, which clients have sent, is one of a header's
// byte, and that the one that was written is read, behind other control messages too.
func FuzzTTL(f *testing.F) {
	f.Add(append([]byte{0x45, 0, 0, 60, 0, 0, 0, 0, 64, 6}, make([]byte, 50)...), []byte{}, byte(1), true)
	f.Add(append([]byte{0x60, 0, 0, 0, 0, 40, 6, 63}, make([]byte, 72)...),
		answerFrom(netip.MustParseAddr("2001:db8::1")), byte(255), false)
	f.Add([]byte{0x45}, answerFrom(netip.MustParseAddr("192.0.2.1")), byte(0), true)
	f.Add([]byte{}, []byte{1}, byte(64), false)
	f.Fuzz(func(t *testing.T, packet, control []byte, sent byte, v4 bool) {
		ttl, ok := ttlOf(packet)
		if ttl < 0 || ttl > 255 || ok && !bytes.Contains(packet, []byte{byte(ttl)}) || onward(ttl) > ttl {
			t.Errorf("%x has TTL %d", packet, ttl)
		}
		packet = bytes.Clone(packet)
		if v4 && len(packet) > 8 {
			packet[0], packet[8] = 0x40|packet[0]&0xf, sent
		} else if len(packet) > 7 {
			packet[0], packet[7], v4 = 0x60|packet[0]&0xf, sent, false
		}
		if got, ok := ttlOf(packet); len(packet) > 8 && (got != int(sent) || !ok) {
			t.Errorf("%x has TTL %d, %v, want %d", packet, got, ok, sent)
		}
		level, kind := int32(unix.IPPROTO_IPV6), int32(unix.IPV6_HOPLIMIT)
		if v4 {
			level, kind = unix.IPPROTO_IP, unix.IP_TTL
		}
		for _, before := range [][]byte{nil, answerFrom(netip.IPv6Loopback()), control} {
			if _, _, err := arrivedAt(before); len(before) > 0 && (err != nil || len(before)%unix.SizeofPtr != 0) {
				continue // the kernel aligns messages
			}
			if _, got, _ := arrivedAt(append(bytes.Clone(before), message(level, kind, sent)...)); got != int(sent) {
				t.Errorf("behind %x, a message with TTL %d is read as %d", before, sent, got)
			}
		}
	})
}

// message is a control message with a number.
func message(level, kind int32, n byte) []byte {
	b := make([]byte, unix.CmsgSpace(4))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(4))
	binary.NativeEndian.PutUint32(b[unix.CmsgLen(0):], uint32(n))
	return b
}
