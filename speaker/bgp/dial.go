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
)

// Target says where to connect to, and with which options of TCP and IP.
type Target struct {
	Peer     netip.AddrPort
	Source   netip.Addr // not valid when the kernel chooses
	Password string     // for TCP MD5 signatures; "" for none
	TTL      int        // of what is sent; 0 for the kernel's default
	Timeout  time.Duration
}

// Times to live: an external peer is one hop away unless multihop says otherwise; an internal one may be anywhere.
const (
	ttlNeighbor = 1
	ttlMultihop = 255
	// classControl is the traffic class of routing protocols, CS6 (RFC 4594), so that a congested link does not take down sessions.
	classControl = 0xc0
	leastTimeout = 2 * time.Second
)

// targetOf returns where a session connects to; router is the peer's address of an unnumbered session.
func targetOf(d lb.BGPSession, router netip.Addr) Target {
	t := Target{Source: d.Source, Password: d.Password, Timeout: max(d.ConnectTime, leastTimeout)}
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

// dial opens a TCP connection.
func dial(ctx context.Context, t Target) (net.Conn, error) {
	dialer := net.Dialer{
		Timeout:   t.Timeout,
		KeepAlive: -1, // BGP has its own
		Control: func(_, _ string, c syscall.RawConn) error {
			var failed error
			if err := c.Control(func(fd uintptr) { failed = t.prepare(int(fd)) }); err != nil {
				return err
			}
			return failed
		},
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

// prepare sets the options of a socket before it connects.
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
	if err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, t.signature()); err != nil {
		return fmt.Errorf("set the MD5 password: %w", err)
	}
	return nil
}

// signature is the key of RFC 2385 for the peer. A link-local peer is found by its address alone.
func (t Target) signature() *unix.TCPMD5Sig {
	sig := &unix.TCPMD5Sig{Keylen: uint16(len(t.Password))}
	copy(sig.Key[:], t.Password)
	addr := t.Peer.Addr()
	if addr.Is4() {
		sig.Addr.Family = unix.AF_INET
		v4 := addr.As4()
		copy(sig.Addr.Data[2:], v4[:]) // after the port
		return sig
	}
	sig.Addr.Family = unix.AF_INET6
	v6 := addr.As16()
	copy(sig.Addr.Data[6:], v6[:]) // after the port and the flow label
	return sig
}
