package relay

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// soOriginalDst is SO_ORIGINAL_DST of linux/netfilter_ipv4.h, and IP6T_SO_ORIGINAL_DST of
// linux/netfilter_ipv6/ip6_tables.h.
const soOriginalDst = 80

// idleTimes are for how long flows of UDP may be silent at most, and streams.
type idleTimes struct{ flow, stream time.Duration }

// conntrackTimes returns after which silence the kernel forgets flows of UDP.
func conntrackTimes() (flow, stream time.Duration) {
	read := func(name string, standard time.Duration) time.Duration {
		text, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
		if seconds, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil && seconds > 0 {
			return time.Duration(seconds) * time.Second
		}
		return standard
	}
	return read("nf_conntrack_udp_timeout", 30*time.Second), read("nf_conntrack_udp_timeout_stream", 120*time.Second)
}

// originalDestination returns what a client connected to, before the rules led it here.
func originalDestination(conn *Conn, family lb.Family) (to netip.AddrPort, err error) {
	err = conn.control(func(fd int) error {
		if family == lb.IPv4 {
			to, err = originalIPv4(uintptr(fd))
		} else {
			to, err = originalIPv6(uintptr(fd))
		}
		return err
	})
	if err != nil {
		return to, fmt.Errorf("find out what the client connected to: %w", err)
	}
	return to, nil
}

func originalIPv4(fd uintptr) (to netip.AddrPort, err error) {
	var addr unix.RawSockaddrInet4
	if err := getsockopt(fd, unix.SOL_IP, soOriginalDst, unsafe.Pointer(&addr), unsafe.Sizeof(addr)); err != nil {
		return to, err
	}
	return netip.AddrPortFrom(netip.AddrFrom4(addr.Addr), hostOrder(addr.Port)), nil
}

func originalIPv6(fd uintptr) (to netip.AddrPort, err error) {
	var addr unix.RawSockaddrInet6
	if err := getsockopt(fd, unix.SOL_IPV6, soOriginalDst, unsafe.Pointer(&addr), unsafe.Sizeof(addr)); err != nil {
		return to, err
	}
	return netip.AddrPortFrom(netip.AddrFrom16(addr.Addr), hostOrder(addr.Port)), nil
}

// hostOrder returns a port that is in the network's byte order, and the other way round.
func hostOrder(port uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&port))
	return uint16(b[0])<<8 | uint16(b[1])
}

// listener accepts connections of one family.
type listener struct {
	family lb.Family
	port   uint16
	socket *Conn
}

// sockets are those that accept connections. It is safe for concurrent use.
type sockets struct {
	mu  sync.Mutex
	all []listener
	// lacking says why a family that the node has has none.
	lacking map[lb.Family]string
	// handing is held while they are handed to a successor, end, or get a socket of UDP that was lacking. handed is closed
	// once a successor has them, and ending is set once no more are to be handed over.
	handing sync.Mutex
	handed  chan struct{}
	ending  bool
}

// end has who accepts stop in a moment, unless a successor accepts.
func (s *sockets) end() {
	s.handing.Lock()
	defer s.handing.Unlock()
	if s.ending = true; isClosed(s.handed) {
		return
	}
	for _, l := range s.listeners() {
		_ = l.socket.file.SetReadDeadline(time.Now().Add(acceptAfter))
	}
}

func (s *sockets) close() {
	for _, l := range s.listeners() {
		l.socket.Close()
	}
}

func (s *sockets) set(all []listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = all
}

// listeners returns them. What it returns does not change.
func (s *sockets) listeners() []listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all
}

// lack notes why a family has none, or with nil that it has one.
func (s *sockets) lack(family lb.Family, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil || errors.Is(err, unix.EAFNOSUPPORT) {
		delete(s.lacking, family)
		return
	}
	s.lacking[family] = err.Error()
}

// without returns why there are none, by family.
func (s *sockets) without() map[lb.Family]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.lacking)
}

// ports returns their ports, by family.
func (s *sockets) ports() map[lb.Family]uint16 {
	ports := map[lb.Family]uint16{}
	for _, l := range s.listeners() {
		ports[l.family] = l.port
	}
	return ports
}

// receivers are the sockets at which the relay receives UDP, at the ports of the same numbers as those of TCP. It
// is safe for concurrent use.
type receivers struct {
	mu   sync.Mutex
	open map[lb.Family]*Conn
	// lacking says why a family has none.
	lacking map[lb.Family]string
}

func newReceivers() *receivers {
	return &receivers{open: map[lb.Family]*Conn{}, lacking: map[lb.Family]string{}}
}

// set takes a socket over, or notes why there is none.
func (r *receivers) set(family lb.Family, socket *Conn, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.lacking[family] = err.Error()
		return
	}
	r.open[family] = socket
	delete(r.lacking, family)
}

// drop closes a socket.
func (r *receivers) drop(family lb.Family) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if socket := r.open[family]; socket != nil {
		socket.Close()
		delete(r.open, family)
	}
}

func (r *receivers) of(family lb.Family) *Conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.open[family]
}

// without returns why there are none, by family.
func (r *receivers) without() map[lb.Family]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.lacking)
}

// dropped returns how many datagrams the kernel has dropped at the sockets.
func (r *receivers) dropped() (n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, socket := range r.open {
		n += socket.dropped()
	}
	return n
}

func (r *receivers) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, socket := range r.open {
		socket.Close()
	}
}

// backlog is how many connections wait to be accepted, if the kernel has no lower limit (net.core.somaxconn).
const backlog = 4096

// families are those of which the relay opens a port.
var families = [...]lb.Family{lb.IPv4, lb.IPv6}

// maxListens is how many free ports of TCP are tried, of which that of UDP may be taken.
const maxListens = 20

var errTCPOnly = errors.New("the relay runs without --udp")

// listenAt opens the relay's port at all addresses of a family; any free port for 0. Where another program has the port
// of UDP, TCP does without.
func (r *Relay) listenAt(family lb.Family) (l listener, err error) {
	defer func() { r.sockets.lack(family, err) }()
	port, tcpOnly := r.options.Port, r.options.TCPOnly
	for range maxListens {
		if l, err = r.deps.listen(family, port); err != nil {
			return l, fmt.Errorf("listen (%s): %w", family, err)
		}
		var socket *Conn
		if err = errTCPOnly; !tcpOnly {
			socket, err = openUDP(family, l.port)
		}
		if err == nil || port != 0 || tcpOnly {
			r.receivers.set(family, socket, err)
			return l, nil
		}
		l.socket.Close()
	}
	return l, fmt.Errorf("listen (%s): UDP: %w", family, err)
}

func listenTCP(family lb.Family, port uint16) (listener, error) {
	everywhere := netip.IPv4Unspecified()
	if family == lb.IPv6 {
		everywhere = netip.IPv6Unspecified()
	}
	number, at := sockaddrOf(netip.AddrPortFrom(everywhere, port))
	fd, err := unix.Socket(number, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return listener{}, os.NewSyscallError("socket", err)
	}
	err = errors.Join(setOption(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		// The connections that it accepts inherit this.
		setOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		setOption(fd, unix.IPPROTO_TCP, unix.TCP_SAVE_SYN, 1))
	if family == lb.IPv6 {
		err = errors.Join(err, setOption(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1))
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, at))
	}
	if err == nil {
		err = os.NewSyscallError("listen", unix.Listen(fd, backlog))
	}
	if err != nil {
		unix.Close(fd)
		return listener{}, err
	}
	socket, err := newConn(fd)
	if err != nil {
		return listener{}, err
	}
	addr, err := socket.local()
	if err != nil {
		socket.Close()
		return listener{}, err
	}
	return listener{family: family, port: addr.Port(), socket: socket}, nil
}

// crowded reports whether more than a quarter of the connections that may wait to be accepted do.
func (l listener) crowded() (crowded bool) {
	_ = l.socket.control(func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil { // of a socket that listens these are how many wait, and how many may
			crowded = info.Unacked > info.Sacked/4
		}
		return err
	})
	return crowded
}

// accept waits for the next connection. It returns os.ErrDeadlineExceeded after the deadline.
func (l listener) accept() (conn *Conn, from netip.AddrPort, err error) {
	var fd int
	var failed error
	err = l.socket.raw.Read(func(at uintptr) bool {
		var peer unix.Sockaddr
		for {
			fd, peer, failed = unix.Accept4(int(at), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if failed != unix.EINTR && failed != unix.ECONNABORTED { // else there may be more behind it
				break
			}
		}
		from = addressOf(peer)
		return failed != unix.EAGAIN
	})
	if err != nil {
		return nil, from, err
	}
	if failed != nil {
		return nil, from, os.NewSyscallError("accept4", failed)
	}
	conn, err = newConn(fd)
	return conn, from, err
}
