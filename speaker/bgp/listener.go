package bgp

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/loop"
)

// Connections are taken acceptBurst at once, and then one in acceptEvery: anybody can open them.
const (
	acceptEvery = time.Millisecond
	acceptBurst = 256
)

// unexpectedEvery is how often a connection from an unknown address is logged at most.
const unexpectedEvery = time.Minute

// listens are the waits between attempts to listen.
var listens = loop.Backoff{Min: 250 * time.Millisecond, Max: 10 * time.Second}

// listener takes the connections that peers open. One goroutine owns it.
type listener struct {
	address string
	vrf     string // "" for the main routing table
	log     *slog.Logger
	// offer gives a connection to the session that it is for, if there is one; passwords are those of
	// the peers, by address.
	offer     func(net.Conn) bool
	passwords func() map[netip.Addr]string
	changed   chan struct{} // poked when passwords may return others
	listening atomic.Bool
	refused   atomic.Uint64 // connections that no session expects
	quiet     time.Time     // until when another one of these is not logged
	opening   loop.Failures
	signing   map[netip.Addr]*loop.Failures // by peer with a password
	pulses    *loop.Pulses                  // while it takes a connection, or looks at the passwords
}

// CheckListen tells what is wrong with an address for Options.Listen.
func CheckListen(address string) error {
	host, port, err := net.SplitHostPort(address)
	if n, wrong := strconv.ParseUint(port, 10, 16); err == nil && (wrong != nil || n == 0) {
		err = fmt.Errorf("%q is not a port from 1 to 65535", port)
	}
	if addr, wrong := netip.ParseAddr(host); err == nil && host != "" && (wrong != nil || addr.IsMulticast()) {
		err = fmt.Errorf("%q is not an address of a node", host)
	}
	if err != nil {
		return fmt.Errorf("%q is not an address and a port such as :179, 10.0.0.1:179 or [::]:1179: %w", address, err)
	}
	return nil
}

// newListener returns a listener; in a VRF, which need not have the address, for all addresses.
func newListener(a *Actor, vrf string) *listener {
	address, log := a.opts.Listen, a.opts.Log
	if vrf != "" {
		if host, port, err := net.SplitHostPort(address); err == nil && host != "0.0.0.0" {
			address = net.JoinHostPort("", port)
		}
		log = log.With("vrf", vrf)
	}
	return &listener{
		address: address, vrf: vrf, log: log.With("address", address), offer: a.offer,
		passwords: func() map[netip.Addr]string { return a.passwords(vrf) },
		changed:   make(chan struct{}, 1), signing: map[netip.Addr]*loop.Failures{}, pulses: a.opts.pulses,
	}
}

// refresh makes the listener look at the passwords again, if there is a listener.
func (l *listener) refresh() {
	if l != nil {
		poke(l.changed)
	}
}

// run listens until ctx ends. It retries while the address is in use, or is not one of the node's.
func (l *listener) run(ctx context.Context) {
	_ = loop.Retry(ctx, listens, func(ctx context.Context) (worked bool) {
		socket, err := l.open(ctx)
		if err == nil {
			l.log.Info("listening for BGP peers")
			l.opening, worked = loop.Failures{}, true
			l.listening.Store(true)
			err = l.serve(ctx, socket)
			l.listening.Store(false)
		}
		if ctx.Err() == nil {
			l.opening.Log(l.log, "cannot listen for BGP peers, so that only this speaker opens sessions; retrying", "", err)
		}
		return worked
	})
}

func (l *listener) open(ctx context.Context) (*net.TCPListener, error) {
	config := net.ListenConfig{
		KeepAlive: -1, // BGP has its own
		Control:   func(network, _ string, c syscall.RawConn) error { return control(c, l.prepare(network)) },
	}
	config.SetMultipathTCP(false) // it knows no MD5 signatures
	socket, err := config.Listen(ctx, l.network(), l.address)
	if err != nil {
		return nil, err
	}
	return socket.(*net.TCPListener), nil
}

// network keeps 0.0.0.0 to IPv4; :: and no address are for both families.
func (l *listener) network() string {
	if at, err := netip.ParseAddrPort(l.address); err == nil && at.Addr().Is4() {
		return "tcp4"
	}
	return "tcp"
}

// prepare puts the socket into the VRF, and gives answers to peers that connect the traffic class of what
// follows.
func (l *listener) prepare(network string) func(fd int) error {
	return func(fd int) error {
		if l.vrf != "" {
			if err := unix.BindToDevice(fd, l.vrf); err != nil {
				return fmt.Errorf("bind to VRF %s: %w", l.vrf, err)
			}
		}
		err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, classControl)
		if err == nil && network == "tcp6" {
			err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, classControl)
		}
		if err != nil {
			return fmt.Errorf("set the traffic class: %w", err)
		}
		return nil
	}
}

// serve takes connections until the socket fails or ctx ends.
func (l *listener) serve(ctx context.Context, socket *net.TCPListener) error {
	accepted, failed := make(chan net.Conn), make(chan error, 1)
	var accepting sync.WaitGroup
	defer accepting.Wait()
	defer socket.Close()
	accepting.Go(func() { failed <- accept(ctx, socket, accepted) })
	signed := map[netip.Addr]string{}
	l.sign(socket, signed)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return plain(err)
		case <-l.changed:
			l.sign(socket, signed)
		case conn := <-accepted:
			l.take(conn)
		}
	}
}

// accept takes connections until the socket fails.
func accept(ctx context.Context, socket net.Listener, accepted chan<- net.Conn) error {
	pace := loop.Allowance{Every: acceptEvery, Burst: acceptBurst}
	for {
		conn, err := socket.Accept()
		if err != nil {
			return err
		}
		select {
		case accepted <- conn:
		case <-ctx.Done():
			conn.Close()
		}
		time.Sleep(pace.Wait(time.Now()))
	}
}

// sign makes the kernel demand the signatures of exactly those peers that have a password; signed
// are those of which it does already. A peer of which it cannot is not let in for that: the session
// sets the password of its connection as well.
func (l *listener) sign(socket *net.TCPListener, signed map[netip.Addr]string) {
	defer l.pulses.Begin()()
	want := l.passwords()
	failed := map[netip.Addr]error{}
	set := func(descriptor uintptr) {
		fd := int(descriptor)
		for peer := range signed {
			if _, ok := want[peer]; !ok {
				_ = sign(fd, peer, "") // it was set, so that it can be removed
				delete(signed, peer)
			}
		}
		for peer, password := range want {
			if signed[peer] == password || peer.Is6() && l.network() == "tcp4" {
				continue
			}
			if err := sign(fd, peer, password); err != nil {
				failed[peer] = err
				continue
			}
			signed[peer] = password
		}
	}
	raw, err := socket.SyscallConn()
	if err == nil {
		err = raw.Control(set)
	}
	maps.DeleteFunc(l.signing, func(peer netip.Addr, _ *loop.Failures) bool { _, ok := want[peer]; return !ok })
	for peer := range want {
		if l.signing[peer] == nil {
			l.signing[peer] = &loop.Failures{}
		}
		l.signing[peer].Log(l.log, "a BGP peer with a password cannot connect",
			"a BGP peer with a password can connect again",
			cmp.Or(failed[peer], err), "peer", peer)
	}
}

// take hands a connection on, or closes it.
func (l *listener) take(conn net.Conn) {
	defer l.pulses.Begin()()
	if l.offer(conn) {
		return
	}
	conn.Close()
	total := l.refused.Add(1)
	if now := time.Now(); now.After(l.quiet) {
		l.quiet = now.Add(unexpectedEvery)
		l.log.Warn("closed a connection to the BGP port: no session expects it", "from", conn.RemoteAddr(), "to",
			conn.LocalAddr(), "soFar", total)
	}
}

// offer gives a connection to the session that it is for, and returns false if there is none. Of
// several with one router, it is the first by name.
func (a *Actor) offer(conn net.Conn) bool {
	for _, s := range a.byName() {
		if s.target().admits(conn) {
			return s.offer(conn)
		}
	}
	return false
}

// passwords returns the passwords of all peers in a VRF that have one, by address.
func (a *Actor) passwords(vrf string) map[netip.Addr]string {
	all := map[netip.Addr]string{}
	for _, s := range a.byName() {
		if t := s.target(); t.VRF == vrf && t.Password != "" && t.Peer.Addr().IsValid() {
			all[t.Peer.Addr().WithZone("")] = t.Password
		}
	}
	return all
}

func (a *Actor) byName() []*session {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*session
	for _, name := range slices.Sorted(maps.Keys(a.sessions)) {
		all = append(all, a.sessions[name])
	}
	return all
}
