package relay

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is a TCP connection: a socket that the runtime polls, and no more. Package net makes twice as many
// system calls for a connection, for its addresses, its keep-alives and what else may be asked of it.
type Conn struct {
	file *os.File
	raw  syscall.RawConn
}

// newConn takes over a socket that does not block.
func newConn(fd int) (*Conn, error) {
	file := os.NewFile(uintptr(fd), "tcp")
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &Conn{file, raw}, nil
}

// Close closes the connection in good order.
func (c *Conn) Close() { c.file.Close() }

// control does something with the socket.
func (c *Conn) control(do func(fd int) error) error {
	var failed error
	if err := c.raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil {
		return err
	}
	return failed
}

// closeWrite ends what this end sends.
func (c *Conn) closeWrite() error {
	return c.control(shutdown)
}

// abort resets connections, which ends what reads from them and writes to them.
func abort(conns ...*Conn) {
	for _, c := range conns {
		_ = c.control(func(fd int) error {
			return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		})
		c.Close()
	}
}

// quiet returns how long ago the other end last sent something; unknown is for how long if that cannot be
// found out.
func (c *Conn) quiet(unknown time.Duration) (ago time.Duration) {
	err := c.control(func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			ago = time.Duration(info.Last_data_recv) * time.Millisecond
		}
		return err
	})
	if err != nil {
		return unknown
	}
	return ago
}

// keepAlive has the kernel find out when the other end is gone without a word.
func (c *Conn) keepAlive() error {
	return c.control(func(fd int) error {
		for _, option := range []struct{ level, name, value int }{
			{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 60}, {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15},
			{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 5}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		} {
			if err := unix.SetsockoptInt(fd, option.level, option.name, option.value); err != nil {
				return err
			}
		}
		return nil
	})
}

// local returns the address of this end.
func (c *Conn) local() (addr netip.AddrPort, err error) {
	err = c.control(func(fd int) error {
		sockaddr, err := unix.Getsockname(fd)
		addr = addressOf(sockaddr)
		return err
	})
	return addr, err
}

// addressOf returns the address of a socket's end; the zero value for one of another family.
func addressOf(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr).Unmap(), uint16(s.Port))
	}
	return netip.AddrPort{}
}

func sockaddrOf(addr netip.AddrPort) (family int, to unix.Sockaddr) {
	if addr.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Addr: addr.Addr().As16(), Port: int(addr.Port())}
}

// Dial connects to a backend, until ctx ends. It sends with ttl, and with the kernel's own for 0.
func Dial(ctx context.Context, backend netip.AddrPort, ttl int) (*Conn, error) {
	c, err := dial(ctx, backend, ttl)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", backend, err)
	}
	return c, nil
}

func dial(ctx context.Context, backend netip.AddrPort, ttl int) (*Conn, error) {
	family := unix.AF_INET
	if backend.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(setOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1), setTTL(fd, family, ttl)); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if errno := connect(fd, backend); errno != 0 && errno != unix.EINPROGRESS {
		unix.Close(fd)
		return nil, errno
	}
	c, err := newConn(fd)
	if err != nil {
		return nil, err
	}
	if err := c.connected(ctx, backend); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// connected waits until the connection stands.
func (c *Conn) connected(ctx context.Context, to netip.AddrPort) error {
	var stop func() bool // nil unless it has to wait
	var failed unix.Errno
	err := c.raw.Write(func(fd uintptr) bool {
		failed = connect(int(fd), to) // says how far the first call has come
		stands := failed != unix.EALREADY && failed != unix.EINPROGRESS && failed != unix.EINTR
		if !stands && stop == nil {
			stop = context.AfterFunc(ctx, func() { _ = c.file.SetWriteDeadline(time.Unix(1, 0)) })
		}
		return stands
	})
	switch {
	case stop != nil && !stop():
		return context.Cause(ctx)
	case err != nil:
		return err
	case failed != 0 && failed != unix.EISCONN:
		return failed
	}
	return nil
}
