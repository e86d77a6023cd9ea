package bgp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

func TestCheckListen(t *testing.T) {
	for address, want := range map[string]string{
		":179": "", "10.0.0.1:179": "", "0.0.0.0:1": "", "[::]:1179": "", "[fd00::1]:179": "", "[fe80::1%eth0]:65535": "",
		"179": "missing port", "10.0.0.1": "missing port", "::1:179": "too many colons", ":0": `"0" is not a port`,
		":65536": `"65536" is not a port`,
		":bgp":   `"bgp" is not a port`, "localhost:179": `"localhost" is not an address`,
		"224.0.0.1:179": "not an address of a node", "10.0.0.0/8:179": "not an address",
	} {
		err := CheckListen(address)
		if want == "" && err != nil {
			t.Errorf("%s: %v", address, err)
		}
		if want != "" &&
			(err == nil || !strings.Contains(err.Error(), want) ||
				!strings.Contains(err.Error(), "such as :179, 10.0.0.1:179 or [::]:1179")) {
			t.Errorf("%s: %v, want %q and what would be right", address, err, want)
		}
	}
}

// freePort holds a port of all addresses until the returned function is called.
func freePort(t *testing.T) (port string, free func()) {
	held, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { held.Close() })
	_, port, _ = net.SplitHostPort(held.Addr().String())
	return port, func() { held.Close() }
}

// startListening runs an actor that listens for real.
func startListening(t *testing.T, address string) *Actor {
	a := New(Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Listen: address,
		Dial: func(ctx context.Context, _ Target) (net.Conn, error) {
			return nil, errors.New("connection refused")
		}})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return a
}

// metric returns the value of the first gauge or counter of that name that has a label or value
// like this one.
func metric(t *testing.T, a *Actor, name, label string) float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(a)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && strings.Contains(fmt.Sprint(m.GetLabel()), label) {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("no metric %s with %q", name, label)
	return 0
}

func waitForGauge(t *testing.T, a *Actor, name string, want float64) {
	t.Helper()
	routertest.Eventually(t, name, limit, func() error {
		if metric(t, a, name, "") != want {
			return errors.New("has another value")
		}
		return nil
	})
}

// An address that is in use is not the end: sessions go on, and the listener is there when it is
// free.
func TestListenerWaitsForItsAddress(t *testing.T) {
	port, free := freePort(t)
	a := startListening(t, ":"+port)
	set(a, external(func(d *plan.BGPSession) { d.Addr = netip.MustParseAddr("127.0.0.9") }))
	eventually(t, a, "attempts", func(s Status) bool { return s.LastError == "connection refused" })
	if metric(t, a, "landfall_bgp_listening", "") != 0 {
		t.Error("listens")
	}
	free()
	waitForGauge(t, a, "landfall_bgp_listening", 1)
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 8)}}
	conn, err := dialer.DialContext(t.Context(), "tcp", "127.0.0.1:"+port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetReadDeadline(time.Now().Add(limit))
	if n, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("an unexpected peer reads %d bytes, %v", n, err)
	}
	waitForGauge(t, a, "landfall_bgp_connections_refused_total", 1)
	dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}
	p := newFakePeer(t)
	if p.conn, err = dialer.DialContext(t.Context(), "tcp", "127.0.0.1:"+port); err != nil {
		t.Fatal(err)
	}
	defer p.conn.Close()
	p.handshakes(routerOpen())
	eventually(t, a, "in step", synced)
}

// Peers with a password are let in with it only, and the passwords follow what is desired.
func TestListenerPasswords(t *testing.T) {
	port, free := freePort(t)
	free()
	a := startListening(t, ":"+port)
	for _, test := range []struct{ name, peer, to string }{{"IPv4", "127.0.0.9", "127.0.0.1"}, {"IPv6", "::1", "::1"}} {
		t.Run(test.name, func(t *testing.T) {
			peer := netip.MustParseAddr(test.peer)
			with := func(password string) {
				set(a, external(func(d *plan.BGPSession) {
					d.Addr, d.Password, d.MultiHop = peer, password, true
					if peer.Is6() {
						d.Families = []lb.Family{lb.IPv6}
					}
				}))
			}
			to := netip.MustParseAddrPort(net.JoinHostPort(test.to, port))
			// greeted reports whether the speaker answers to that password.
			greeted := func(password string) error {
				conn, err := dial(t.Context(), Target{Peer: to, Source: peer, Password: password, Timeout: 250 * time.Millisecond})
				if err != nil {
					return err
				}
				defer conn.Close()
				conn.SetReadDeadline(time.Now().Add(time.Second))
				_, err = io.ReadFull(conn, make([]byte, headerLength))
				return err
			}
			check := func(what, right string, wrong ...string) {
				t.Helper()
				routertest.Eventually(t, what, limit, func() error { return greeted(right) })
				for _, password := range wrong {
					if greeted(password) == nil {
						t.Errorf("%s: %q is as good as %q", what, password, right)
					}
				}
			}
			with("right")
			check("a password", "right", "wrong", "")
			with("other")
			check("another password", "other", "right", "")
			with("")
			check("no password", "", "other")
			with("right")
			check("a password again", "right", "")
			before := metric(t, a, "landfall_bgp_connections_refused_total", "")
			a.Set(nil)
			routertest.Eventually(t, "no peer", limit, func() error {
				if greeted(""); metric(t, a, "landfall_bgp_connections_refused_total", "") == before {
					return errors.New("the kernel still wants a password")
				}
				return nil
			})
		})
	}
}

// Each peer whose password the kernel refuses is logged, also if another one failed a moment ago.
func TestEachFailingPasswordIsLogged(t *testing.T) {
	var out bytes.Buffer
	long, wanted := strings.Repeat("x", 81), map[netip.Addr]string{}
	a := New(Options{Log: slog.New(slog.NewTextHandler(&out, nil)), Listen: "127.0.0.1:0", Changed: func() {}})
	l := a.listener
	l.passwords = func() map[netip.Addr]string { return wanted }
	socket, err := l.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	signed := map[netip.Addr]string{}
	first, second := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for _, step := range []struct {
		peer     netip.Addr
		password string
		want     string
	}{
		{first, long, "level=WARN msg=\"a BGP peer with a password cannot connect\" peer=192.0.2.1"},
		{second, long, "level=WARN msg=\"a BGP peer with a password cannot connect\" peer=192.0.2.2"},
		{first, "right", "level=INFO msg=\"a BGP peer with a password can connect again\" peer=192.0.2.1"},
		{second, "right", "level=INFO msg=\"a BGP peer with a password can connect again\" peer=192.0.2.2"},
		{second, "other", ""},
	} {
		wanted[step.peer] = step.password
		out.Reset()
		l.sign(socket, signed)
		_, got, _ := strings.Cut(strings.TrimSpace(out.String()), " ")
		level, rest, _ := strings.Cut(got, " address=")
		if _, peer, ok := strings.Cut(rest, "peer="); ok {
			level += " peer=" + peer
		}
		if level != step.want {
			t.Errorf("peer %s, password %q: logged %q, want %q", step.peer, step.password, got, step.want)
		}
	}
}

// What a connection that the peer has opened sends lives as long as on one of ours.
func TestAcceptedSocketsAreSetUpAsOurs(t *testing.T) {
	for _, test := range []struct {
		listen, dial     string
		level, ttl, mark int
	}{
		{":0", "127.0.0.1", unix.IPPROTO_IP, unix.IP_TTL, unix.IP_TOS},
		{"127.0.0.1:0", "127.0.0.1", unix.IPPROTO_IP, unix.IP_TTL, unix.IP_TOS},
		{":0", "::1", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_TCLASS},
	} {
		l := &listener{address: test.listen}
		socket, err := l.open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer socket.Close()
		_, port, _ := net.SplitHostPort(socket.Addr().String())
		ours, err := net.Dial("tcp", net.JoinHostPort(test.dial, port))
		if err != nil {
			t.Fatal(err)
		}
		defer ours.Close()
		conn, err := socket.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		target := targetOf(
			external(func(d *plan.BGPSession) { d.Addr, d.Password = netip.MustParseAddr(test.dial), "secret" }),
			netip.Addr{})
		if !target.admits(conn) {
			t.Errorf("%+v: from %v", test, conn.RemoteAddr())
		}
		if err := target.adopt(conn); err != nil {
			t.Errorf("%+v: %v", test, err)
		}
		raw, _ := conn.(*net.TCPConn).SyscallConn()
		raw.Control(func(fd uintptr) {
			ttl, _ := unix.GetsockoptInt(int(fd), test.level, test.ttl)
			mark, _ := unix.GetsockoptInt(int(fd), test.level, test.mark)
			if ttl != ttlNeighbor || mark != classControl {
				t.Errorf("%+v: TTL %d, class %#x", test, ttl, mark)
			}
		})
	}
}
