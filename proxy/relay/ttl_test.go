package relay

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A backend that does not answer a client with a low TTL may be too far away for that: it is no suspect.
func TestContract11ALowTTLMakesNoSuspect(t *testing.T) {
	for ttl, suspects := range map[int]int{2: 0, enoughHops: 0, enoughHops + 1: 1, 64: 1} {
		g := newRig(t, nil)
		g.relayed(nil, refusing(t))
		dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			_ = c.Control(func(fd uintptr) { err = setTTL(int(fd), unix.AF_INET, ttl) })
			return err
		}}
		at := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(g.ports[lb.IPv4])}
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
