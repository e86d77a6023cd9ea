package relay

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The relay sends on with the client's TTL (IPv6: hop limit) less one, as a router does. So connections and flows end
// that relays pass to each other in a circle. A TTL of 0 is one that is not known.

// errExpired is the error of connections and flows that came with a TTL of 1.
var errExpired = errors.New("the TTL (hop limit) is used up: relays may pass this to each other")

// enoughHops is a TTL with which every backend can be reached. What was sent with less says nothing about a backend
// that did not answer: clients choose their TTL.
const enoughHops = 16

// reaches reports whether a backend is at fault that did not answer a client with a TTL.
func reaches(ttl int) bool { return ttl == 0 || ttl > enoughHops }

// onward returns the TTL to send on with.
func onward(ttl int) int { return max(ttl-1, 0) }

// ttl returns the TTL of the SYN that began an accepted connection or, if a SYN cookie did, of the packet that
// completed its handshake.
func (c *Conn) ttl(family lb.Family) (ttl int) {
	_ = c.control(func(fd int) error {
		var syn [512]byte // stays empty if the kernel has not saved it
		err := getsockopt(uintptr(fd), unix.IPPROTO_TCP, unix.TCP_SAVED_SYN, unsafe.Pointer(&syn), unsafe.Sizeof(syn))
		var saved bool
		if ttl, saved = ttlOf(syn[:]); !saved {
			ttl = ttlOfHandshake(fd, family)
		}
		return err
	})
	return ttl
}

// ttlOf returns the TTL in the IP header of a packet; ok is false without one.
func ttlOf(packet []byte) (ttl int, ok bool) {
	const at4, at6 = 8, 7
	switch {
	case len(packet) > at4 && packet[0]>>4 == 4:
		return int(packet[at4]), true
	case len(packet) > at6 && packet[0]>>4 == 6:
		return int(packet[at6]), true
	}
	return 0, false
}

// ttlOfHandshake asks the kernel for what it remembers in the new socket: the TTL of the last packet of the handshake
// (tcp_v4_syn_recv_sock and tcp_v6_syn_recv_sock). It does not leave the option set: with IPv6 the kernel would
// then keep a copy of each packet.
func ttlOfHandshake(fd int, family lb.Family) (ttl int) {
	level, option, asked := unix.IPPROTO_IP, unix.IP_RECVTTL, unix.IP_PKTOPTIONS
	if family == lb.IPv6 {
		level, option, asked = unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT, unix.IPV6_2292PKTOPTIONS
	}
	if err := setOption(fd, level, option, 1); err != nil {
		return 0
	}
	var message [controlSize]byte
	if err := getsockopt(uintptr(fd), level, asked, unsafe.Pointer(&message), unsafe.Sizeof(message)); err == nil {
		_, ttl, _ = arrivedAt(message[:]) // which has no address
	}
	_ = setOption(fd, level, option, 0)
	return ttl
}

// setTTL has a socket send with a TTL, unless that is 0.
func setTTL(fd, family, ttl int) error {
	switch {
	case ttl == 0:
		return nil
	case family == unix.AF_INET6:
		return setOption(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, ttl)
	}
	return setOption(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl)
}
