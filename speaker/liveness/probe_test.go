package liveness

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/nstest"
)

func TestAnswers(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().(*net.TCPAddr).AddrPort()
	if !Answers(t.Context(), addr) {
		t.Error("a port that is open does not answer")
	}
	listener.Close()
	if !Answers(t.Context(), addr) {
		t.Error("a port that is closed does not answer")
	}
	// The discard prefix (RFC 6666) is routed nowhere.
	if Answers(t.Context(), netip.AddrPortFrom(netip.MustParseAddr("100::1"), addr.Port())) {
		t.Error("an address without a node answers")
	}
}

// A packet filter that drops gossip, or a queue that is full, does not make a dead node.
func TestAPortThatIsSilentIsNotADeadNode(t *testing.T) {
	nstest.New(t) // the right to ask, or the test is skipped
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(socket)
	if err := syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(socket, 0); err != nil { // and nobody accepts
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(socket)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*syscall.SockaddrInet4).Port))
	for range 8 {
		conn, err := net.DialTimeout("tcp", addr.String(), 200*time.Millisecond)
		if err != nil {
			if !Answers(t.Context(), addr) {
				t.Error("the node counts as dead")
			}
			return
		}
		defer conn.Close()
	}
	t.Fatal("the queue does not fill")
}

func TestPing(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "172.26.236.177/24", b, "eth0", "172.26.236.178/24")
	a.Run(t, "ip", "addr", "add", "fd00::177/64", "dev", "eth0", "nodad")
	b.Run(t, "ip", "addr", "add", "fd00::178/64", "dev", "eth0", "nodad")
	asks := func(to string, patience time.Duration) (answered bool) {
		a.Do(t, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			answered = ping(ctx, netip.MustParseAddr(to))
			return nil
		})
		return answered
	}
	for _, to := range []string{"172.26.236.178", "fd00::178"} {
		if !asks(to, 10*time.Second) {
			t.Errorf("%s does not answer", to)
		}
	}
	b.Run(t, "ip", "link", "set", "eth0", "down")
	for _, to := range []string{"172.26.236.178", "fd00::178"} {
		if asks(to, 100*time.Millisecond) {
			t.Errorf("%s answers, and its link is down", to)
		}
	}
}
