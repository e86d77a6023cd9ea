package iptables

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// site is a node with its pods and neighbours as network namespaces.
type site struct {
	t    *testing.T
	w    world
	at   map[string]*nstest.NS // node, outside, stranger, pod, local, local2, remote
	node *nstest.NS
}

// newSite cables a node: clients on eth0, pods on cables of their own, and a pod of another node behind one more.
func newSite(t *testing.T, w world) site {
	s := site{t: t, w: w, node: nstest.New(t), at: map[string]*nstest.NS{}}
	s.at["node"] = s.node
	long := fmt.Sprint("/", w.node.BitLen())
	s.node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.route_localnet=1")
	// A redirect, which the kernel sends a client on the VIP's own subnet before any rule is looked at, uses up the client's allowance
	// of ICMP, so that a refusal for UDP would not be sent.
	s.node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.default.send_redirects=0")
	s.node.Run(t, "ip", "link", "add", "eth0", "type", "bridge")
	s.node.Run(t, "ip", "link", "set", "eth0", "up")
	for _, a := range []netip.Addr{w.node, w.node2} {
		s.node.Run(t, "ip", "addr", "add", a.String()+long, "dev", "eth0", "nodad")
	}
	for name, a := range map[string]netip.Addr{
		"outside": w.outside, "stranger": w.stranger, "pod": w.pod, "local": w.local, "local2": w.local2, "remote": w.remote,
	} {
		s.at[name] = nstest.New(t)
		cable := map[string]string{"outside": "lan0", "stranger": "lan1", "pod": "podc", "local": "poda", "local2": "podb", "remote": "peer"}[name]
		nstest.Veth(t, s.node, cable, "", s.at[name], "eth0", a.String()+long)
		gateway, dev := netip.MustParseAddr("169.254.1.1"), cable
		if w.family == lb.IPv6 {
			gateway = netip.MustParseAddr("fe80::1")
		}
		if strings.HasPrefix(cable, "lan") {
			s.node.Run(t, "ip", "link", "set", cable, "master", "eth0")
			gateway, dev = w.node, "eth0"
		} else {
			s.node.Run(t, "ip", "addr", "replace", gateway.String()+long, "dev", cable, "nodad")
		}
		s.node.Run(t, "ip", "route", "replace", a.String()+long, "dev", dev)
		s.at[name].Run(t, "ip", "route", "add", gateway.String()+long, "dev", "eth0")
		s.at[name].Run(t, "ip", "route", "add", "default", "via", gateway.String(), "dev", "eth0")
	}
	s.node.Run(t, "ip", map[lb.Family]string{lb.IPv4: "-4", lb.IPv6: "-6"}[w.family], "route", "add", "default", "dev", "eth0") // towards nobody
	for name := range map[string]bool{"local": true, "local2": true, "remote": true} {
		s.serve(name)
	}
	return s
}

// serve answers in the namespace with its name and the address that it was reached from.
func (s site) serve(name string) {
	bind := netip.AddrPortFrom(s.w.endpoint(name), backendPort)
	var tcp net.Listener
	var udp net.PacketConn
	s.at[name].Do(s.t, func() (err error) {
		if tcp, err = net.Listen("tcp", bind.String()); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp", bind.String())
		return err
	})
	s.t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(conn, "%s %s", bind, conn.RemoteAddr())
			conn.Close()
		}
	}()
	go func() {
		buf := make([]byte, 16)
		for {
			_, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(packetWriter{udp, from}, "%s %s", bind, from)
		}
	}()
}

type packetWriter struct {
	conn net.PacketConn
	to   net.Addr
}

func (w packetWriter) Write(b []byte) (int, error) { return w.conn.WriteTo(b, w.to) }

// ask connects once and returns who answered and which source address it saw.
func (s site) ask(from string, c semantics, patience time.Duration) (backend string, saw netip.Addr, err error) {
	network := strings.ToLower(string(c.protocol()))
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.source(s.w), 0))}
	if c.udp {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.source(s.w), 0))
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var answer [256]byte
	n := 0
	s.at[from].Do(s.t, func() error {
		var conn net.Conn
		if conn, err = dialer.DialContext(ctx, network, c.destination(s.w).String()); err != nil {
			return nil
		}
		defer conn.Close()
		deadline, _ := ctx.Deadline()
		if err = conn.SetDeadline(deadline); err != nil {
			return err
		}
		if c.udp {
			n, err = askUDP(conn, answer[:], deadline)
		} else {
			n, err = conn.Read(answer[:])
		}
		return nil
	})
	if err != nil {
		return "", netip.Addr{}, err
	}
	backend, seen, _ := strings.Cut(string(answer[:n]), " ")
	return backend, netip.MustParseAddrPort(seen).Addr(), nil
}

// askUDP asks again and again: a datagram can be lost, and the kernel limits how many refusals it sends.
func askUDP(conn net.Conn, answer []byte, deadline time.Time) (int, error) {
	for {
		if _, err := conn.Write([]byte("hello")); err != nil {
			return 0, err
		}
		again := time.Now().Add(500 * time.Millisecond)
		if deadline.Before(again) {
			again = deadline
		}
		if err := conn.SetReadDeadline(again); err != nil {
			return 0, err
		}
		n, err := conn.Read(answer)
		if !errors.Is(err, os.ErrDeadlineExceeded) || !time.Now().Before(deadline) {
			return n, err
		}
	}
}

// Each case with real packets through a real kernel.
func TestPackets(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := worldOf(family)
			s := newSite(t, w)
			kernel := nsKernel{t, s.node, variant(family, "nft")}
			a := newActor(map[lb.Family]Kernel{family: kernel}, seedConfig)
			for _, c := range cases() {
				if c.only != "" && c.only != family || c.want == "none" {
					continue // where nothing matches there is nothing to see
				}
				t.Run(c.name, func(t *testing.T) {
					service, config := c.plan(w)
					a.Configure(config)
					a.Set(plans(service))
					if err := settle(a, false); err != nil {
						t.Fatal(err)
					}
					if c.own {
						vip := fmt.Sprintf("%s/%d", w.vip, w.vip.BitLen())
						s.node.Run(t, "ip", "addr", "add", vip, "dev", "lo")
						defer s.node.Run(t, "ip", "addr", "del", vip, "dev", "lo")
					}
					// Left-over flows would bypass the rules under test.
					s.node.Run(t, "conntrack", "-F")
					s.check(t, c)
				})
			}
		})
	}
}

const (
	long  = 10 * time.Second       // enough for an answer
	short = 300 * time.Millisecond // silence for as long counts as a drop
)

func (s site) check(t *testing.T, c semantics) {
	t.Helper()
	switch c.want {
	case "drop":
		if backend, _, err := s.ask(c.from, c, short); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("answer %q, error %v; want silence", backend, err)
		}
		return
	case "reject":
		if backend, _, err := s.ask(c.from, c, long); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("answer %q, error %v; want a refusal", backend, err)
		}
		return
	}
	want := c.wanted(s.w)
	var got []string
	for i := 0; i < 8 || i < 200 && len(got) < len(want); i++ {
		backend, saw, err := s.ask(c.from, c, long)
		if err != nil {
			t.Fatal(err)
		}
		if masqueraded := saw != c.source(s.w) || c.from == "node" && c.snat; masqueraded != c.snat {
			t.Fatalf("%s saw the source %s; masqueraded should be %v", backend, saw, c.snat)
		}
		if !slices.Contains(got, backend) {
			got = append(got, backend)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("reached %v, want %v", got, want)
	}
}
