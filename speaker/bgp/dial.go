package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Target says where to connect to, and with which options of TCP and IP.
type Target struct {
	Peer     netip.AddrPort
	VRF      string     // "" for the main routing table
	Source   netip.Addr // not valid when the kernel chooses
	Password string     // for TCP MD5 signatures; "" for none
	TTL      int        // of what is sent; 0 for the kernel's default
	Timeout  time.Duration
}

// Times to live: an external peer is one hop away unless multihop says otherwise; an internal one
// may be anywhere.
const (
	ttlNeighbor = 1
	ttlMultihop = 255
	// classControl is the traffic class of routing protocols, CS6 (RFC 4594), so that a congested link
	// does not take down sessions.
	classControl = 0xc0
	leastTimeout = 2 * time.Second
)

// targetOf returns where a session connects to; router is the peer's address of an unnumbered
// session.
func targetOf(d plan.BGPSession, router netip.Addr) Target {
	t := Target{VRF: d.VRF, Source: d.Source, Password: d.Password, Timeout: max(d.ConnectTime, leastTimeout)}
	addr := d.Addr
	if d.Interface != "" {
		addr = router
	}
	t.Peer = netip.AddrPortFrom(addr, d.Port)
	external := d.Dynamic == lb.ExternalASN || d.Dynamic == "" && d.PeerASN != d.LocalASN
	switch {
	case external && d.MultiHop:
		t.TTL = ttlMultihop
	case external:
		t.TTL = ttlNeighbor
	}
	return t
}

// takenError is for a peer with which another program of this node has a session from the same address. A router has
// one session with an address: it would refuse ours, or, where graceful restart is negotiated, take it for the other
// program's after a restart, and end that one's.
type takenError struct {
	local netip.Addr
	peer  netip.AddrPort
}

func (e *takenError) Error() string {
	return fmt.Sprintf("another program of this node has a connection between %s and port %d of %s, and a router has one "+
		"session with one address; give the BGPPeer another sourceAddress", e.local, e.peer.Port(), e.peer.Addr())
}

// taken returns a takenError if another program has a session between these addresses. This one has none while it
// dials. A kernel that does not tell which connections there are does not hold anything up.
func (t Target) taken() error {
	local, peer := t.Source, t.Peer.Addr()
	if t.VRF != "" || peer.Zone() != "" {
		return nil
	}
	if !local.IsValid() {
		local = links.LocalTo(peer)
	}
	if found, err := links.Connected(local, t.Peer); err != nil || !found {
		return nil
	}
	return &takenError{local, t.Peer}
}

// dial opens a TCP connection.
func dial(ctx context.Context, t Target) (net.Conn, error) {
	if err := t.taken(); err != nil {
		return nil, err
	}
	dialer := net.Dialer{
		Timeout:   t.Timeout,
		KeepAlive: -1, // BGP has its own
		Control:   func(_, _ string, c syscall.RawConn) error { return control(c, t.open) },
	}
	if t.Source.IsValid() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.Source, 0))
	}
	conn, err := dialer.DialContext(ctx, "tcp", t.Peer.String())
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() && t.Password != "" {
		err = fmt.Errorf("%w (a peer with another MD5 password does not answer either)", err)
	}
	return conn, err
}

// admits reports whether a connection that a peer has opened is in the VRF of the session, and
// between its addresses.
func (t Target) admits(conn net.Conn) bool {
	device, zone := deviceOf(conn), t.Peer.Addr().Zone()
	return (device == t.VRF || zone != "" && device == zone) && addrPort(conn.RemoteAddr()).Addr() == t.Peer.Addr() &&
		(!t.Source.IsValid() || addrPort(conn.LocalAddr()).Addr() == t.Source)
}

// adopt sets the options of a connection that the peer has opened.
func (t Target) adopt(conn net.Conn) error {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return nil // in memory
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	return control(raw, t.prepare)
}

// patience has the kernel end a connection whose peer has not taken for so long what was sent; 0 for never. A write
// alone does not tell: the kernel takes what a peer does not read into a buffer of megabytes.
func patience(conn net.Conn, limit time.Duration) error {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return nil // in memory
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	return control(raw, func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds())); err != nil {
			return fmt.Errorf("set the user timeout: %w", err)
		}
		return nil
	})
}

// control calls f with the file descriptor of a socket.
func control(c syscall.RawConn, f func(fd int) error) error {
	var failed error
	if err := c.Control(func(fd uintptr) { failed = f(int(fd)) }); err != nil {
		return err
	}
	return failed
}

// deviceOf returns the device that a connection is bound to; "" for none. The kernel binds one with a link-local
// address to its interface, and one that came in through a VRF to the VRF, even if the socket that listens is not
// in the VRF (tcp_l3mdev_accept).
func deviceOf(conn net.Conn) (device string) {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return "" // in memory
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return ""
	}
	_ = control(raw, func(fd int) (err error) { // fails only once the connection is closed
		device, err = unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		return err
	})
	return device
}

// open sets the options of a socket before it connects.
func (t Target) open(fd int) error {
	if t.VRF != "" {
		if err := unix.BindToDevice(fd, t.VRF); err != nil {
			return fmt.Errorf("bind to VRF %s: %w", t.VRF, err)
		}
	}
	return t.prepare(fd)
}

// prepare sets the options of a socket before it connects, or when it was accepted.
func (t Target) prepare(fd int) error {
	level, ttl, class := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_TOS
	if t.Peer.Addr().Is6() {
		level, ttl, class = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_TCLASS
	}
	if err := unix.SetsockoptInt(fd, level, class, classControl); err != nil {
		return fmt.Errorf("set the traffic class: %w", err)
	}
	if t.TTL > 0 {
		if err := unix.SetsockoptInt(fd, level, ttl, t.TTL); err != nil {
			return fmt.Errorf("set the time to live: %w", err)
		}
	}
	if t.Password == "" {
		return nil
	}
	return sign(fd, t.Peer.Addr(), t.Password)
}

// sign sets the password for MD5 signatures (RFC 2385) of what a socket exchanges with a peer; ""
// removes it. A link-local peer is found by its address alone.
func sign(fd int, peer netip.Addr, password string) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("set the MD5 password: %w", err)
	}
	sig := &unix.TCPMD5Sig{Keylen: uint16(len(password))}
	sig.Addr.Family = uint16(domain)
	copy(sig.Key[:], password)
	if domain == unix.AF_INET {
		v4 := peer.As4()
		copy(sig.Addr.Data[2:], v4[:]) // after the port
	} else {
		v6 := peer.As16()              // one of IPv4 in its IPv6 form, as sockets for both families want it
		copy(sig.Addr.Data[6:], v6[:]) // after the port and the flow label
	}
	if err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, sig); err != nil {
		return fmt.Errorf("set the MD5 password: %w", err)
	}
	return nil
}
