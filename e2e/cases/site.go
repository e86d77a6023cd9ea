package cases

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

// Site is a node with its pods and neighbors as network namespaces.
type Site struct {
	World World
	Node  *nstest.NS
	// At are the namespaces by name: node, outside, stranger, pod, local, local2, remote.
	At map[string]*nstest.NS

	t *testing.T
}

// NewSite cables a node: clients on eth0, pods on cables of their own, and a pod of another node
// behind one more.
func NewSite(t *testing.T, w World) *Site {
	t.Helper()
	s := &Site{t: t, World: w, Node: nstest.New(t), At: map[string]*nstest.NS{}}
	s.At["node"] = s.Node
	long := fmt.Sprint("/", w.Node.BitLen())
	s.Node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
		"net.ipv4.conf.all.route_localnet=1")
	// A redirect, which the kernel sends a client on the VIP's own subnet before any rule is looked
	// at, uses up the client's allowance of ICMP, so that a refusal for UDP would not be sent.
	// Of IPv6 it has no switch, and the allowance is taken away.
	s.Node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.default.send_redirects=0",
		"net.ipv6.icmp.ratelimit=0")
	s.Node.Run(t, "ip", "link", "add", "eth0", "type", "bridge")
	s.Node.Run(t, "ip", "link", "set", "eth0", "up")
	for _, a := range []netip.Addr{w.Node, w.Node2} {
		s.Node.Run(t, "ip", "addr", "add", a.String()+long, "dev", "eth0", "nodad")
	}
	for name, a := range map[string]netip.Addr{
		"outside": w.Outside, "stranger": w.Stranger, "pod": w.Pod, "local": w.Local, "local2": w.Local2, "remote": w.Remote,
	} {
		s.At[name] = nstest.New(t)
		cable := map[string]string{"outside": "lan0", "stranger": "lan1", "pod": "podc", "local": "poda", "local2": "podb",
			"remote": "peer"}[name]
		nstest.Veth(t, s.Node, cable, "", s.At[name], "eth0", a.String()+long)
		gateway, dev := netip.MustParseAddr("169.254.1.1"), cable
		if w.Family == lb.IPv6 {
			gateway = netip.MustParseAddr("fe80::1")
		}
		if strings.HasPrefix(cable, "lan") {
			s.Node.Run(t, "ip", "link", "set", cable, "master", "eth0")
			gateway, dev = w.Node, "eth0"
		} else {
			s.Node.Run(t, "ip", "addr", "replace", gateway.String()+long, "dev", cable, "nodad")
		}
		s.Node.Run(t, "ip", "route", "replace", a.String()+long, "dev", dev)
		// A redirect for a packet that no rule handles any more would outlive the case.
		s.At[name].Run(t, "sysctl", "-qw", "net.ipv6.conf.all.accept_redirects=0", "net.ipv6.conf.eth0.accept_redirects=0")
		s.At[name].Run(t, "ip", "route", "add", gateway.String()+long, "dev", "eth0")
		s.At[name].Run(t, "ip", "route", "add", "default", "via", gateway.String(), "dev", "eth0")
	}
	// No host answers on eth0.
	s.Node.Run(t, "ip", map[lb.Family]string{lb.IPv4: "-4", lb.IPv6: "-6"}[w.Family], "route", "add", "default", "dev",
		"eth0")
	for name := range map[string]bool{"local": true, "local2": true, "remote": true} {
		s.serve(name)
	}
	return s
}

// serve answers in the namespace with its name and the address that it was reached from.
func (s *Site) serve(name string) {
	bind := netip.AddrPortFrom(s.World.Endpoint(name), BackendPort(lb.TCP))
	bindUDP := netip.AddrPortFrom(s.World.Endpoint(name), BackendPort(lb.UDP))
	bindSCTP := netip.AddrPortFrom(s.World.Endpoint(name), BackendPort(lb.SCTP))
	var tcp, sctp net.Listener
	var udp net.PacketConn
	s.At[name].Do(s.t, func() (err error) {
		if tcp, err = net.Listen("tcp", bind.String()); err != nil {
			return err
		}
		s.t.Cleanup(func() { tcp.Close() })
		if hasSCTP() {
			if sctp, err = listenSCTP(bindSCTP); err != nil {
				return err
			}
			s.t.Cleanup(func() { sctp.Close() })
		}
		udp, err = net.ListenPacket("udp", bindUDP.String())
		return err
	})
	s.t.Cleanup(func() { udp.Close() })
	go answer(tcp, bind)
	if sctp != nil {
		go answer(sctp, bindSCTP)
	}
	go func() {
		buf := make([]byte, 16)
		for {
			_, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(packetWriter{udp, from}, "%s %s", bindUDP, from)
		}
	}()
}

// answer answers each connection with its own address and the client's.
func answer(listener net.Listener, bind netip.AddrPort) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		fmt.Fprintf(conn, "%s %s", bind, conn.RemoteAddr())
		conn.Close()
	}
}

type packetWriter struct {
	conn net.PacketConn
	to   net.Addr
}

func (w packetWriter) Write(b []byte) (int, error) { return w.conn.WriteTo(b, w.to) }

// Ask connects once and returns who answered and which source address it saw.
func (s *Site) Ask(c Case, patience time.Duration) (backend string, saw netip.Addr, err error) {
	network := strings.ToLower(string(c.Transport()))
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.Source(s.World), 0))}
	if c.Transport() == lb.UDP {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.Source(s.World), 0))
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var answer [256]byte
	n := 0
	s.At[c.From].Do(s.t, func() error {
		var conn net.Conn
		deadline, _ := ctx.Deadline()
		if c.Transport() == lb.SCTP {
			conn, err = dialSCTP(netip.AddrPortFrom(c.Source(s.World), 0), c.Destination(s.World), deadline)
		} else {
			conn, err = dialer.DialContext(ctx, network, c.Destination(s.World).String())
		}
		if err != nil {
			return nil
		}
		defer conn.Close()
		if err = conn.SetDeadline(deadline); err != nil {
			return err
		}
		if c.Transport() == lb.UDP {
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

// askUDP asks again and again: a datagram can be lost, and the kernel limits how many refusals it
// sends.
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

// How long to wait for an answer.
const (
	Long  = 10 * time.Second       // enough for one
	Short = 300 * time.Millisecond // silence for as long counts as a drop
)

// Run runs cases with real packets; those of SCTP where the kernel has its sockets. program makes the
// node's rules what the case's plan asks for.
func (s *Site) Run(t *testing.T, all []Case, program func(t *testing.T, c Case)) {
	for _, c := range all {
		if c.Transport() == lb.SCTP && !hasSCTP() {
			continue // make test-vm runs them
		}
		t.Run(c.Name, func(t *testing.T) {
			program(t, c)
			if c.Own {
				vip := Host(s.World.VIP).String()
				s.Node.Run(t, "ip", "addr", "add", vip, "dev", "lo")
				defer s.Node.Run(t, "ip", "addr", "del", vip, "dev", "lo")
			}
			s.Forget(t)
			s.Check(t, c)
		})
	}
}

// Forget ends all flows: they would bypass the rules under test.
func (s *Site) Forget(t *testing.T) {
	t.Helper()
	s.Node.Run(t, "conntrack", "-F")
}

// Reach opens a connection over TCP, and closes it.
func (s *Site) Reach(t *testing.T, from string, to netip.AddrPort, patience time.Duration) (err error) {
	t.Helper()
	s.At[from].Do(t, func() error {
		var conn net.Conn
		if conn, err = net.DialTimeout("tcp", to.String(), patience); err == nil {
			conn.Close()
		}
		return nil
	})
	return err
}

// Check fails the test if the case's packets do not end where they should.
func (s *Site) Check(t *testing.T, c Case) {
	t.Helper()
	seen := s.See(t, c)
	if want := c.Wanted(s.World); seen != want {
		t.Errorf("%s, want %s", seen, want)
	}
}

// Seen is how the case's packets ended.
type Seen struct {
	// Ends are the backends that answered, sorted and joined by blanks, or one of the words below;
	// with Sticky "one of" before them.
	Ends string
	// SNAT is set when the backends saw another source than the client's; Mixed when only some did.
	SNAT, Mixed bool
}

// What Look returns where no backend answers.
const (
	Refused = "reject"
	Silence = "silence"
	Passed  = "passed" // on its way, as it was
)

// Wanted is what the case should look like.
func (c Case) Wanted(w World) Seen {
	if c.Sticky && len(c.Ends(w)) > 1 {
		return Seen{Ends: "one of " + strings.Join(c.Ends(w), " "), SNAT: c.SNAT}
	}
	return Seen{Ends: strings.Join(c.Ends(w), " "), SNAT: c.SNAT}
}

// String tells it in words.
func (s Seen) String() string {
	switch {
	case s.Mixed:
		return s.Ends + ", masqueraded at times"
	case s.SNAT:
		return s.Ends + ", masqueraded"
	}
	return s.Ends
}

// See sends the case's packets and returns how they end, in the words of the table.
func (s *Site) See(t *testing.T, c Case) Seen {
	t.Helper()
	return c.InWords(s.World, s.Look(t, c))
}

// InWords returns what Look has returned in the words of the table.
func (c Case) InWords(w World, seen Seen) Seen {
	hosts := slices.Contains(append(c.LocalAddresses(w), w.Outside), c.Destination(w).Addr())
	switch {
	case seen.Ends == Passed:
		seen.Ends = "none"
	case c.Want == "none" && !c.Invalid && (seen.Ends == Silence || seen.Ends == Refused && hosts):
		seen.Ends = "none" // no host has the address, or the one that has it refuses
	case seen.Ends == Silence:
		seen.Ends = "drop"
	}
	return seen
}

// Look sends the case's packets and returns how they end, as far as the client and the backends can
// tell. It waits longer for the end that the case expects.
func (s *Site) Look(t *testing.T, c Case) Seen {
	t.Helper()
	patience := Long
	if c.Want == "drop" || c.Want == "none" && !c.Invalid {
		patience = Short
	}
	if c.Invalid {
		return s.sendInvalid(t, c, patience)
	}
	want := c.Ends(s.World)
	seen := Seen{}
	var ends []string
	legs := c.Legs()
	for i := 0; i < 8 || i < 200 && len(ends) < len(want) && !c.Sticky; i++ {
		backend, saw, err := s.Ask(legs[i%len(legs)], patience)
		switch {
		case err != nil && len(ends) > 0:
			t.Fatalf("after answers from %v, to %s: %v", ends, legs[i%len(legs)].To, err)
		case errors.Is(err, syscall.ECONNREFUSED):
			return Seen{Ends: Refused}
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded),
			errors.Is(err, syscall.EHOSTUNREACH):
			return Seen{Ends: Silence}
		case err != nil:
			t.Fatal(err)
		}
		// Who asks at the node itself has the address that it would be masqueraded to.
		masqueraded := saw != c.Source(s.World) || c.From == "node" && c.SNAT
		seen.Mixed = seen.Mixed || i > 0 && masqueraded != seen.SNAT
		seen.SNAT = masqueraded
		if !slices.Contains(ends, backend) {
			ends = append(ends, backend)
		}
	}
	slices.Sort(ends)
	seen.Ends = strings.Join(ends, " ")
	if c.Sticky && len(ends) == 1 && slices.Contains(want, ends[0]) && len(want) > 1 {
		seen.Ends = "one of " + strings.Join(want, " ")
	}
	return seen
}
