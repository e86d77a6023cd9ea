package relay

import (
	"net"
	"net/netip"
	"syscall"
	"testing"

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
