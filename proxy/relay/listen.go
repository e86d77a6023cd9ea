package relay

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// soOriginalDst is SO_ORIGINAL_DST of linux/netfilter_ipv4.h, and IP6T_SO_ORIGINAL_DST of
// linux/netfilter_ipv6/ip6_tables.h.
const soOriginalDst = 80

// originalDestination returns what a client connected to, before the rules led it here.
func originalDestination(conn *net.TCPConn) (to netip.AddrPort, err error) {
	local := conn.LocalAddr().(*net.TCPAddr).AddrPort()
	raw, err := conn.SyscallConn()
	if err != nil {
		return to, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		if local.Addr().Unmap().Is4() {
			to, failed = originalIPv4(fd)
		} else {
			to, failed = originalIPv6(fd)
		}
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return to, fmt.Errorf("find out what the client connected to: %w", err)
	}
	return to, nil
}

func originalIPv4(fd uintptr) (to netip.AddrPort, err error) {
	var addr unix.RawSockaddrInet4
	if err := getsockopt(fd, unix.SOL_IP, unsafe.Pointer(&addr), unsafe.Sizeof(addr)); err != nil {
		return to, err
	}
	return netip.AddrPortFrom(netip.AddrFrom4(addr.Addr), hostOrder(addr.Port)), nil
}

func originalIPv6(fd uintptr) (to netip.AddrPort, err error) {
	var addr unix.RawSockaddrInet6
	if err := getsockopt(fd, unix.SOL_IPV6, unsafe.Pointer(&addr), unsafe.Sizeof(addr)); err != nil {
		return to, err
	}
	return netip.AddrPortFrom(netip.AddrFrom16(addr.Addr), hostOrder(addr.Port)), nil
}

// hostOrder returns a port that is in the network's byte order.
func hostOrder(port uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&port))
	return uint16(b[0])<<8 | uint16(b[1])
}

func getsockopt(fd uintptr, level int, to unsafe.Pointer, length uintptr) error {
	size := uint32(length)
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, uintptr(level), soOriginalDst, uintptr(to),
		uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// listen opens a port at all addresses of each family that the node has; any free port for 0.
func listen(ctx context.Context, port uint16) (map[lb.Family]*net.TCPListener, error) {
	config := net.ListenConfig{KeepAliveConfig: keepAlive}
	listeners := map[lb.Family]*net.TCPListener{}
	var failed error
	for family, network := range map[lb.Family]string{lb.IPv4: "tcp4", lb.IPv6: "tcp6"} {
		l, err := config.Listen(ctx, network, fmt.Sprint(":", port))
		if err != nil {
			failed = fmt.Errorf("listen (%s): %w", family, err)
			continue
		}
		listeners[family] = l.(*net.TCPListener)
	}
	if len(listeners) == 0 {
		return nil, failed
	}
	return listeners, nil
}

// keepAlive finds ends that are gone without a word.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 5}
