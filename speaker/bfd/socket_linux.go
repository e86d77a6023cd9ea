package bfd

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	batch = 16 // datagrams taken from a socket by one system call
	// receiveBuffer holds what arrives while this process cannot run: a second of it, from 100 peers
	// every 10 ms.
	receiveBuffer = 8 << 20
)

// socket receives for all sessions of one family and port, and learns from the kernel when, where
// and with which TTL a packet came.
type socket struct {
	listener  listener
	fd        int
	drainedAt time.Time // all that arrived until then was taken
	overflows uint32    // lost for want of room, as the kernel counts them

	headers  [batch]unix.Mmsghdr
	vectors  [batch]unix.Iovec
	senders  [batch]unix.RawSockaddrInet6
	payloads [batch][256]byte  // the length of a packet is one byte
	controls [batch][32]uint64 // for alignment
}

func newSocket(l listener, siblings []*socket) (*socket, error) {
	fd, err := unix.Socket(family(l.v6), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	s := &socket{listener: l, fd: fd}
	if err := s.open(siblings); err != nil {
		unix.Close(fd)
		return nil, err
	}
	for i := range batch {
		s.vectors[i] = unix.Iovec{Base: &s.payloads[i][0]}
		s.vectors[i].SetLen(len(s.payloads[i]))
		h := &s.headers[i].Hdr
		h.Name = (*byte)(unsafe.Pointer(&s.senders[i]))
		h.Iov, h.Control = &s.vectors[i], (*byte)(unsafe.Pointer(&s.controls[i]))
		h.SetIovlen(1)
	}
	return s, nil
}

// open sets the options and binds.
func (s *socket) open(siblings []*socket) error {
	set := func(level, option, value int) error { return unix.SetsockoptInt(s.fd, level, option, value) }
	errs := []error{set(unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1), set(unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1)}
	if set(unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil { // without CAP_NET_ADMIN
		errs = append(errs, set(unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)) // as much as the system allows
	}
	var any unix.Sockaddr = &unix.SockaddrInet4{Port: int(s.listener.port())}
	if s.listener.v6 {
		any = &unix.SockaddrInet6{Port: int(s.listener.port())}
		errs = append(errs, set(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1), set(unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1),
			set(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1))
	} else {
		errs = append(errs, set(unix.IPPROTO_IP, unix.IP_RECVTTL, 1), set(unix.IPPROTO_IP, unix.IP_PKTINFO, 1))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("socket options: %w", err)
	}
	if s.listener.vrf != "" {
		if err := unix.BindToDevice(s.fd, s.listener.vrf); err != nil {
			return fmt.Errorf("bind to VRF %s: %w", s.listener.vrf, err)
		}
	}
	return s.bind(any, siblings)
}

// bind binds beside sockets of ours in other VRFs. To the kernel a port without a VRF and the same one in a VRF are
// at odds (UDP, unlike TCP), unless both ask for SO_REUSEADDR. It stays on no longer than this takes: another BFD
// daemon on the node must be seen, not robbed.
func (s *socket) bind(any unix.Sockaddr, siblings []*socket) error {
	if s.listener.vrf == "" && len(siblings) > 0 {
		if err := s.probe(); err != nil {
			return err
		}
	}
	if s.listener.vrf == "" && len(siblings) == 0 {
		return unix.Bind(s.fd, any)
	}
	share := func(fd, value int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, value) }
	for _, other := range append(siblings, s) {
		if err := share(other.fd, 1); err != nil {
			return fmt.Errorf("share the port with another VRF: %w", err)
		}
		defer func() { _ = share(other.fd, 0) }() // what could be set can be set back
	}
	return unix.Bind(s.fd, any)
}

// probe finds out whether another program has the port outside of VRFs: a socket on the loopback interface is at
// odds with that one, and with none in a VRF.
func (s *socket) probe() error {
	fd, err := unix.Socket(family(s.listener.v6), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.BindToDevice(fd, "lo"); err != nil {
		return fmt.Errorf("bind to interface lo: %w", err)
	}
	var local unix.Sockaddr = &unix.SockaddrInet4{Port: int(s.listener.port())}
	if s.listener.v6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return fmt.Errorf("socket options: %w", err)
		}
		local = &unix.SockaddrInet6{Port: int(s.listener.port())}
	}
	return unix.Bind(fd, local)
}

// receive appends up to batch datagrams to out.
func (s *socket) receive(out []datagram, now time.Time) []datagram {
	for i := range batch {
		h := &s.headers[i].Hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(int(unsafe.Sizeof(s.controls[i])))
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&s.headers[0])), batch,
		unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 { // nothing is there
		return out
	}
	for i := range int(n) {
		length := min(int(s.headers[i].Len), len(s.payloads[i]))
		d := datagram{payload: s.payloads[i][:length], listener: s.listener, from: address(&s.senders[i], s.listener.v6),
			ttl: -1, at: now}
		s.control(&d, i, now)
		out = append(out, d)
	}
	return out
}

// control reads the control messages of a datagram.
func (s *socket) control(d *datagram, i int, now time.Time) {
	const header = unix.SizeofCmsghdr
	buf := unsafe.Slice((*byte)(unsafe.Pointer(&s.controls[i])), int(s.headers[i].Hdr.Controllen))
	for len(buf) >= header {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&buf[0]))
		if h.Len < header || uint64(h.Len) > uint64(len(buf)) {
			return
		}
		s.heed(d, h.Level, h.Type, buf[header:h.Len], now)
		buf = buf[min(len(buf), unix.CmsgSpace(int(h.Len)-header)):]
	}
}

// heed takes one control message.
func (s *socket) heed(d *datagram, level, kind int32, data []byte, now time.Time) {
	switch {
	case level == unix.SOL_SOCKET && kind == unix.SO_TIMESTAMPNS && len(data) >= int(unsafe.Sizeof(unix.Timespec{})):
		stamp := (*unix.Timespec)(unsafe.Pointer(&data[0]))
		d.at = arrival(now, now.Sub(time.Unix(stamp.Unix())), s.drainedAt)
	case level == unix.SOL_SOCKET && kind == unix.SO_RXQ_OVFL && len(data) >= 4:
		if count := *(*uint32)(unsafe.Pointer(&data[0])); count != s.overflows {
			s.overflows, d.lost = count, true
		}
	case (level == unix.IPPROTO_IP && kind == unix.IP_TTL || level == unix.IPPROTO_IPV6 && kind == unix.IPV6_HOPLIMIT) &&
		len(data) >= 4:
		d.ttl = int(*(*int32)(unsafe.Pointer(&data[0])))
	case level == unix.IPPROTO_IP && kind == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
		info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&data[0]))
		d.to, d.device = netip.AddrFrom4(info.Addr), int(info.Ifindex)
	case level == unix.IPPROTO_IPV6 && kind == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
		info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&data[0]))
		d.to, d.device = netip.AddrFrom16(info.Addr), int(info.Ifindex)
	}
}

// arrival is when a packet came that the wall clock says has been waiting for age. Wall clocks are
// set, even while a packet waits; it cannot have come before the socket was last found empty, nor
// later than now.
func arrival(now time.Time, age time.Duration, drainedAt time.Time) time.Time {
	at := now.Add(-max(0, age))
	if at.Before(drainedAt) {
		return drainedAt
	}
	return at
}
