package cases

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// hasSCTP reports whether the kernel has sockets of SCTP; not every one has.
func hasSCTP() bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// openSCTP opens a one-to-one style socket (RFC 6458 section 4) bound to an address, in the network
// namespace of the calling thread. Such a socket is used as one of TCP is.
func openSCTP(at netip.AddrPort) (fd int, err error) {
	family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_RECVERR
	if at.Addr().Is6() {
		family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_SCTP)
	if err != nil {
		return -1, fmt.Errorf("open a socket of SCTP: %w", err)
	}
	// A refusal by ICMP then ends the attempt, as it does with TCP.
	if err := errors.Join(unix.SetsockoptInt(fd, level, option, 1), unix.Bind(fd, sockaddr(at))); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind a socket of SCTP to %s: %w", at, err)
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

// listenSCTP listens at an address.
func listenSCTP(at netip.AddrPort) (net.Listener, error) {
	fd, err := openSCTP(at)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "sctp")
	defer file.Close() // the listener has a copy
	if err := unix.Listen(fd, 16); err != nil {
		return nil, err
	}
	return net.FileListener(file)
}

// dialSCTP connects to an address. Where nothing answers in time the error is
// [os.ErrDeadlineExceeded].
func dialSCTP(from, to netip.AddrPort, deadline time.Time) (net.Conn, error) {
	fd, err := openSCTP(from)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), "sctp")
	defer file.Close() // the connection has a copy
	if err := unix.Connect(fd, sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return nil, err
	}
	for {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(poll, max(0, int(time.Until(deadline).Milliseconds())))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case n == 0:
			return nil, os.ErrDeadlineExceeded
		}
		break
	}
	if number, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || number != 0 {
		return nil, errors.Join(err, unix.Errno(number))
	}
	return net.FileConn(file)
}
