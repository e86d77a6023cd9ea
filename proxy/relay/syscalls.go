package relay

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls that each connection makes several times do not block, as its sockets do not. So the scheduler of Go
// is not told of them: it would take the processor away from those that send packets, which take longer than others.

func getsockopt(fd uintptr, level, option int, to unsafe.Pointer, length uintptr) error {
	size := uint32(length)
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, fd, uintptr(level), uintptr(option), uintptr(to),
		uintptr(unsafe.Pointer(&size)), 0)
	return asError(errno)
}

// receive and send return 0 with an error.
func receive(fd int, into []byte, flags int) (n int, err error) {
	return transfer(unix.SYS_RECVFROM, fd, into, flags|unix.MSG_DONTWAIT)
}

func send(fd int, p []byte) (n int, err error) {
	return transfer(unix.SYS_SENDTO, fd, p, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

func transfer(call uintptr, fd int, p []byte, flags int) (n int, err error) {
	for {
		n, _, errno := unix.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// connect begins to connect a socket, or says how far that has come; 0 if it stands.
func connect(fd int, to netip.AddrPort) unix.Errno {
	addr := to.Addr()
	if addr.Is4() {
		at := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: hostOrder(to.Port()), Addr: addr.As4()}
		return connectTo(fd, unsafe.Pointer(&at), unix.SizeofSockaddrInet4)
	}
	at := unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: hostOrder(to.Port()), Addr: addr.As16()}
	return connectTo(fd, unsafe.Pointer(&at), unix.SizeofSockaddrInet6)
}

func connectTo(fd int, at unsafe.Pointer, size uintptr) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(at), size)
	return errno
}

// shutdown ends what a socket sends.
func shutdown(fd int) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)
	return asError(errno)
}

func asError(errno unix.Errno) error {
	if errno != 0 {
		return errno
	}
	return nil
}
