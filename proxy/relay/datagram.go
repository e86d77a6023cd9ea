package relay

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxDatagram is how many bytes a datagram of UDP has at most.
const maxDatagram = 1 << 16

// openUDP opens a port of UDP at all addresses of a family, whose datagrams tell to which of them they came, and with
// which TTL.
func openUDP(family lb.Family, port uint16) (*Conn, error) {
	everywhere := netip.IPv4Unspecified()
	if family == lb.IPv6 {
		everywhere = netip.IPv6Unspecified()
	}
	return openDatagrams(netip.AddrPortFrom(everywhere, port), func(fd int, at unix.Sockaddr) error {
		var err error
		if family == lb.IPv6 {
			err = errors.Join(setOption(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1),
				setOption(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1),
				setOption(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, 1))
		} else {
			err = errors.Join(setOption(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1),
				setOption(fd, unix.IPPROTO_IP, unix.IP_RECVTTL, 1))
		}
		// All that is relayed comes through it. The kernel gives as much as net.core.rmem_max allows.
		err = errors.Join(err, setOption(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 4<<20))
		return errors.Join(err, os.NewSyscallError("bind", unix.Bind(fd, at)))
	})
}

// DialUDP returns a socket of UDP whose other end is a backend. It hears of all errors that ICMP tells of. It sends
// with ttl, and with the kernel's own for 0.
func DialUDP(backend netip.AddrPort, ttl int) (*Conn, error) {
	family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_RECVERR
	if backend.Addr().Is6() {
		family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	return openDatagrams(backend, func(fd int, to unix.Sockaddr) error {
		err := unix.Connect(fd, to)
		if err == unix.EAGAIN {
			return errNoPort
		}
		return errors.Join(setOption(fd, level, option, 1), setTTL(fd, family, ttl), os.NewSyscallError("connect", err))
	})
}

// errNoPort is the error of a socket for which the node has no free port (net.ipv4.ip_local_port_range).
var errNoPort = fmt.Errorf("the node has no free port of UDP: %w", unix.EAGAIN)

// dropped returns how many datagrams the kernel has dropped at the socket: those for which it had no room, and those
// with a wrong checksum. The kernel has one counter for both, also in SO_RXQ_OVFL and /proc/net/udp.
func (c *Conn) dropped() (n uint64) {
	const soMeminfo, drops = 55, 8 // SO_MEMINFO of asm-generic/socket.h, SK_MEMINFO_DROPS of linux/sock_diag.h
	_ = c.control(func(fd int) error {
		var info [drops + 1]uint32
		err := getsockopt(uintptr(fd), unix.SOL_SOCKET, soMeminfo, unsafe.Pointer(&info), unsafe.Sizeof(info))
		n = uint64(info[drops]) // 0 if that failed
		return err
	})
	return n
}

func openDatagrams(addr netip.AddrPort, prepare func(fd int, addr unix.Sockaddr) error) (*Conn, error) {
	family, sockaddr := sockaddrOf(addr)
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := prepare(fd, sockaddr); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return newConn(fd)
}

func setOption(fd, level, option, value int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, level, option, value))
}

// datagram is a datagram that came in.
type datagram struct {
	n    int
	from netip.AddrPort
	to   netip.Addr // the address of the node at which it came
	ttl  int        // 0 if it is not known
}

// receiveFrom waits for a datagram, and reads it.
func (c *Conn) receiveFrom(into, control []byte) (d datagram, err error) {
	var failed error
	err = c.raw.Read(func(fd uintptr) bool {
		for {
			n, size, _, from, err := unix.Recvmsg(int(fd), into, control, unix.MSG_DONTWAIT)
			if failed = err; err == unix.EINTR {
				continue
			}
			if err == nil {
				d = datagram{n: n, from: addressOf(from)}
				d.to, d.ttl, failed = arrivedAt(control[:size])
			}
			return err != unix.EAGAIN
		}
	})
	return d, cmp.Or(asClosed(err), failed)
}

// asClosed returns the error of waiting for a socket, which is os.ErrClosed unless it is that of a deadline.
func asClosed(err error) error {
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return os.ErrClosed
	}
	return err
}

// controlSize is enough for the messages of IP_PKTINFO and IP_TTL, or IPV6_PKTINFO and IPV6_HOPLIMIT.
const controlSize = 128

// Offsets in these messages: struct in_pktinfo has the interface, the address to answer from and the one that
// the packet was for; struct in6_pktinfo has the address, and the interface.
const (
	infoAnswerFrom, infoFor = 4, 8
	infoSize, infoSize6     = 12, 20
)

// arrivedAt returns the address that a datagram was for, and its TTL, from what the kernel says of it.
func arrivedAt(control []byte) (to netip.Addr, ttl int, err error) {
	for len(control) > 0 {
		if len(control) < unix.SizeofCmsghdr { // else the parser reads beyond it
			return netip.Addr{}, ttl, unix.EINVAL
		}
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		switch {
		case err != nil:
			return netip.Addr{}, ttl, err
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= infoSize:
			to = netip.AddrFrom4([4]byte(data[infoFor:infoSize]))
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= infoSize6:
			to = netip.AddrFrom16([16]byte(data[:16]))
		case (h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TTL ||
			h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_HOPLIMIT) && len(data) >= 4:
			ttl = int(binary.NativeEndian.Uint32(data))
		}
		control = rest
	}
	if !to.IsValid() {
		err = errors.New("the kernel does not say to which address a datagram came")
	}
	return to, ttl, err
}

// answerFrom returns what has the kernel send a datagram from an address of the node.
func answerFrom(addr netip.Addr) []byte {
	level, kind, data := uint32(unix.IPPROTO_IP), uint32(unix.IP_PKTINFO), make([]byte, infoSize)
	if addr.Is4() {
		copy(data[infoAnswerFrom:], addr.AsSlice())
	} else {
		level, kind, data = unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, make([]byte, infoSize6)
		copy(data, addr.AsSlice())
	}
	control := make([]byte, unix.CmsgSpace(len(data)))
	const word = unix.SizeofCmsghdr - 8 // the length takes a word of the machine, and level and kind 4 bytes each
	if word == 8 {
		binary.NativeEndian.PutUint64(control, uint64(unix.CmsgLen(len(data))))
	} else {
		binary.NativeEndian.PutUint32(control, uint32(unix.CmsgLen(len(data))))
	}
	binary.NativeEndian.PutUint32(control[word:], level)
	binary.NativeEndian.PutUint32(control[word+4:], kind)
	copy(control[unix.CmsgLen(0):], data)
	return control
}

// sendTo sends a datagram, from an address that control has. It does not wait: UDP may lose datagrams.
func (c *Conn) sendTo(p, control []byte, to unix.Sockaddr) error {
	return c.control(func(fd int) error {
		for {
			_, err := unix.SendmsgN(fd, p, control, to, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if err != unix.EINTR {
				return err
			}
		}
	})
}

// sendParts sends a datagram of several parts to the other end, as sendTo does.
func (c *Conn) sendParts(parts ...[]byte) error {
	return c.control(func(fd int) error {
		for {
			_, err := unix.SendmsgBuffers(fd, parts, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if err != unix.EINTR {
				return err
			}
		}
	})
}

// receiveDatagram reads a datagram of the other end. It returns false if there is none.
func receiveDatagram(fd uintptr, into []byte) (n int, done bool, err error) {
	n, err = receive(int(fd), into, 0)
	return n, !errors.Is(err, unix.EAGAIN), err
}

// dropErrors takes the errors that a socket still has to tell of.
func (c *Conn) dropErrors() {
	_ = c.control(func(fd int) error {
		var p [1]byte
		for {
			if _, _, _, _, err := unix.Recvmsg(fd, p[:], nil, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT); err != nil {
				return err
			}
		}
	})
}
