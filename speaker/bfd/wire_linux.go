package bfd

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/links"
)

// kernel is the real network. Sending and receiving make system calls directly and on memory that
// is kept, so that nothing is allocated per packet; they never wait.
type kernel struct {
	mu    sync.Mutex // guards event against wake after close
	event int        // eventfd; -1 once closed
	// keepsProcessor has wait keep the thread's processor of the Go runtime. If the runtime knew of each wait, it would
	// have another thread look for work, and its monitor look every 20 µs whether there is some, which costs several
	// times what the sessions do. There must be a second processor for all else.
	keepsProcessor bool

	sockets []*socket
	fds     []unix.PollFd
	timeout unix.Timespec
	arrived []datagram
}

func newKernel() (*kernel, error) {
	event, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	k := &kernel{event: event}
	k.watch()
	return k, nil
}

// watch rebuilds what wait waits for.
func (k *kernel) watch() {
	k.fds = append(k.fds[:0], unix.PollFd{Fd: int32(k.event), Events: unix.POLLIN})
	for _, s := range k.sockets {
		k.fds = append(k.fds, unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN})
	}
	k.arrived = make([]datagram, 0, len(k.sockets)*batch)
}

// longestWait bounds how long the Go runtime waits for a thread in wait that keeps its processor, as before it collects
// garbage.
const longestWait = 100 * time.Millisecond

func (k *kernel) wait(until time.Time) {
	wait := longestWait
	if !until.IsZero() {
		wait = min(wait, max(0, time.Until(until)))
	}
	k.timeout = unix.NsecToTimespec(int64(wait))
	// An error can only be an interruption by a signal: the caller looks at what is due either way.
	if n, err := k.poll(); err != nil || n == 0 || k.fds[0].Revents == 0 {
		return
	}
	var count [8]byte
	_, _ = unix.Read(k.event, count[:]) // empties it; fails only if it is empty
}

func (k *kernel) poll() (int, error) {
	if !k.keepsProcessor {
		return unix.Ppoll(k.fds, &k.timeout, nil)
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(k.fds))),
		uintptr(len(k.fds)), uintptr(unsafe.Pointer(&k.timeout)), 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

func (k *kernel) wake() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.event >= 0 {
		one := [8]byte{1}
		_, _ = unix.Write(k.event, one[:]) // fails only if it is full, and then wakes all the same
	}
}

func (k *kernel) close() {
	for _, s := range k.sockets {
		unix.Close(s.fd)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	unix.Close(k.event)
	k.event = -1
}

func (k *kernel) receive(now time.Time) ([]datagram, time.Time) {
	k.arrived = k.arrived[:0]
	horizon := now
	for _, s := range k.sockets {
		before := len(k.arrived)
		if k.arrived = s.receive(k.arrived, now); len(k.arrived)-before < batch {
			s.drainedAt = now
		} else if last := k.arrived[len(k.arrived)-1].at; last.Before(horizon) {
			horizon = last
		}
	}
	return k.arrived, horizon
}

func (k *kernel) listen(l listener) error {
	s, err := newSocket(l, k.siblings(l))
	if err != nil {
		return fmt.Errorf("listen on UDP port %d: %w", l.port(), err)
	}
	k.sockets = append(k.sockets, s)
	k.watch()
	return nil
}

// siblings are the sockets on the listener's port, for other VRFs.
func (k *kernel) siblings(l listener) (all []*socket) {
	for _, s := range k.sockets {
		if s.listener.v6 == l.v6 && s.listener.multihop == l.multihop {
			all = append(all, s)
		}
	}
	return all
}

func (k *kernel) unlisten(l listener) {
	k.sockets = slices.DeleteFunc(k.sockets, func(s *socket) bool {
		if s.listener != l {
			return false
		}
		unix.Close(s.fd)
		return true
	})
	k.watch()
}

func (k *kernel) dial(key Key, sourcePort uint16, random func() uint32) (link, error) {
	index := 0
	if name := key.device(); name != "" {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return nil, fmt.Errorf("interface %s: %w", name, err)
		}
		index = i.Index
	}
	fd, err := unix.Socket(family(key.Peer.Is6()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	u := &udpLink{fd: fd, index: index}
	if index == 0 && !key.Multihop {
		u.near = links.Toward(key.Peer, key.Local, key.VRF)
	}
	if err := u.open(key, sourcePort, random); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return u, nil
}

// udpLink sends from a port of its own (RFC 5881 section 4). It is not connected: that would make
// an ICMP error eat a packet.
type udpLink struct {
	fd, index int
	near      []int // see link.toward
	port      uint16
	to        unix.RawSockaddrInet6 // holds a RawSockaddrInet4 for IPv4
	toLen     uintptr
}

func (u *udpLink) open(k Key, sourcePort uint16, random func() uint32) error {
	const internetworkControl = 6 << 5 // CS6, as routers mark their own protocols (RFC 4594)
	set := func(level, option, value int) error { return unix.SetsockoptInt(u.fd, level, option, value) }
	// TC_PRIO_INTERACTIVE: more takes a capability
	errs := []error{set(unix.SOL_SOCKET, unix.SO_RCVBUF, 0), set(unix.SOL_SOCKET, unix.SO_PRIORITY, 6)}
	if k.Peer.Is6() {
		errs = append(errs, set(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1), set(unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 255),
			set(unix.IPPROTO_IPV6, unix.IPV6_TCLASS, internetworkControl))
	} else {
		errs = append(errs, set(unix.IPPROTO_IP, unix.IP_TTL, 255), set(unix.IPPROTO_IP, unix.IP_TOS, internetworkControl))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("socket options: %w", err)
	}
	if name := cmp.Or(k.device(), k.VRF); name != "" {
		if err := unix.BindToDevice(u.fd, name); err != nil {
			return fmt.Errorf("bind to interface %s: %w", name, err)
		}
	}
	if err := u.bind(k, sourcePort, random); err != nil {
		return fmt.Errorf("bind to %s: %w", k.Local, err)
	}
	if k.Peer.Is6() {
		u.to = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: bigEndian(k.listener().port()), Addr: k.Peer.As16()}
		u.toLen = unix.SizeofSockaddrInet6
		if k.Peer.IsLinkLocalUnicast() {
			u.to.Scope_id = uint32(u.index)
		}
		return nil
	}
	*(*unix.RawSockaddrInet4)(unsafe.Pointer(&u.to)) = unix.RawSockaddrInet4{Family: unix.AF_INET,
		Port: bigEndian(k.listener().port()), Addr: k.Peer.As4()}
	u.toLen = unix.SizeofSockaddrInet4
	return nil
}

// bind takes the wanted source port if it is free, else some other of those that are allowed.
func (u *udpLink) bind(k Key, sourcePort uint16, random func() uint32) error {
	if sourcePort == 0 {
		sourcePort = anySourcePort(random)
	}
	var err error
	for range 64 {
		var local unix.Sockaddr
		if k.Peer.Is6() {
			in6 := &unix.SockaddrInet6{Port: int(sourcePort)}
			if k.Local.IsValid() {
				in6.Addr = k.Local.As16()
			}
			if k.Local.IsLinkLocalUnicast() {
				in6.ZoneId = uint32(u.index)
			}
			local = in6
		} else {
			in4 := &unix.SockaddrInet4{Port: int(sourcePort)}
			if k.Local.IsValid() {
				in4.Addr = k.Local.As4()
			}
			local = in4
		}
		if err = unix.Bind(u.fd, local); !errors.Is(err, unix.EADDRINUSE) {
			u.port = sourcePort
			return err
		}
		sourcePort = anySourcePort(random)
	}
	return err
}

func anySourcePort(random func() uint32) uint16 {
	return minSourcePort + uint16(random()%(1<<16-minSourcePort))
}

func (u *udpLink) send(b []byte) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(u.fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))),
		uintptr(len(b)),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, uintptr(unsafe.Pointer(&u.to)), u.toLen)
	if errno != 0 {
		return errno
	}
	return nil
}

func (u *udpLink) sourcePort() uint16 { return u.port }
func (u *udpLink) device() int        { return u.index }
func (u *udpLink) toward() []int      { return u.near }
func (u *udpLink) close()             { unix.Close(u.fd) }

func family(v6 bool) int {
	if v6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// bigEndian turns a port into the order that socket addresses have it in.
func bigEndian(port uint16) uint16 {
	var b [2]byte
	b[0], b[1] = byte(port>>8), byte(port)
	return *(*uint16)(unsafe.Pointer(&b))
}

// address returns the address in a socket address.
func address(a *unix.RawSockaddrInet6, v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16(a.Addr)
	}
	return netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(a)).Addr)
}
