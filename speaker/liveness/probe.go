package liveness

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// answerTimeout bounds the wait for an answer on a network without long ways. A kernel answers at
// once, however busy its programs are.
const answerTimeout = 50 * time.Millisecond

// Answers reports whether the kernel of a node answers: it accepts or refuses a connection to the
// speaker's port, or it replies to ping in case a packet filter drops what is for the port.
//
// An answer that arrives in time counts, also if this process gets no CPU time to read it until the
// time is over. For that the sockets are looked at by poll(2): the runtime's network poller drops
// what has arrived if a deadline expires with it.
func Answers(ctx context.Context, addr netip.AddrPort) bool {
	return AnswersWithin(answerTimeout)(ctx, addr)
}

// AnswersWithin returns a function like Answers that waits for as long as is given.
func AnswersWithin(timeout time.Duration) func(ctx context.Context, addr netip.AddrPort) bool {
	return func(ctx context.Context, addr netip.AddrPort) bool {
		return ctx.Err() == nil && anyAnswered(timeout, connecting(addr), ping(addr.Addr()))
	}
}

// question is one that was asked.
type question struct {
	socket int   // -1 if it could not be asked
	events int16 // of poll(2)
	// answered is called after an event. over is set if no answer will come.
	answered func() (yes, over bool)
}

var notAsked = question{socket: -1}

// anyAnswered reports whether one of the questions is answered in time, and closes their sockets.
func anyAnswered(timeout time.Duration, questions ...question) bool {
	waits := make([]unix.PollFd, len(questions))
	asked := 0
	for i, q := range questions {
		waits[i] = unix.PollFd{Fd: int32(q.socket), Events: q.events} // poll ignores -1
		if q.socket >= 0 {
			defer unix.Close(q.socket)
			asked++
		}
	}
	for deadline := time.Now().Add(timeout); asked > 0; {
		left := max(time.Until(deadline), 0)
		_, err := unix.Poll(waits, int((left+time.Millisecond-1)/time.Millisecond))
		for i, w := range waits {
			if err != nil || w.Revents == 0 {
				continue
			}
			yes, over := questions[i].answered()
			if yes {
				return true
			}
			if over {
				waits[i].Fd = -1
				asked--
			}
		}
		if left == 0 { // and the sockets were looked at after that
			return false
		}
	}
	return false
}

// connecting begins to connect. That the port is closed is an answer, too.
func connecting(addr netip.AddrPort) question {
	family, at := sockaddr(addr)
	socket, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return notAsked
	}
	failure := unix.Connect(socket, at)
	if failure != nil && !errors.Is(failure, unix.EINPROGRESS) && !errors.Is(failure, unix.ECONNREFUSED) {
		unix.Close(socket)
		return notAsked
	}
	return question{socket: socket, events: unix.POLLOUT, answered: func() (yes, over bool) {
		errno, err := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_ERROR)
		yes = err == nil && (errno == 0 || errno == int(unix.ECONNREFUSED)) || errors.Is(failure, unix.ECONNREFUSED)
		return yes, true
	}}
}

// ping sends an echo request (RFC 792, RFC 4443 section 4.1). It is not asked where this process
// may not open a raw socket.
func ping(to netip.Addr) question {
	protocol, request, reply := unix.IPPROTO_ICMP, byte(8), byte(0)
	if to.Is6() {
		protocol, request, reply = unix.IPPROTO_ICMPV6, 128, 129
	}
	family, at := sockaddr(netip.AddrPortFrom(to, 0))
	socket, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return notAsked
	}
	// A late reply to an earlier request may still arrive; the time tells the requests apart.
	nonce := uint64(time.Now().UnixNano())
	err = unix.Connect(socket, at)
	if err == nil {
		_, err = unix.Write(socket, echoRequest(request, nonce))
	}
	if err != nil {
		unix.Close(socket)
		return notAsked
	}
	return question{socket: socket, events: unix.POLLIN, answered: func() (yes, over bool) {
		var buf [256]byte
		for {
			n, err := unix.Read(socket, buf[:])
			if err != nil {
				return false, !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
			}
			if isReply(buf[:n], to.Is4(), reply, nonce) {
				return true, true
			}
		}
	}}
}

// isReply reports whether a packet is of a kind and has a nonce. In IPv4 the kernel passes it on with its IP header.
func isReply(packet []byte, withHeader bool, kind byte, nonce uint64) bool {
	if withHeader && len(packet) > 0 {
		packet = packet[min(len(packet), int(packet[0]&0xf)*4):]
	}
	return len(packet) >= echoSize && packet[0] == kind && binary.BigEndian.Uint64(packet[8:]) == nonce
}

func sockaddr(addr netip.AddrPort) (family int, at unix.Sockaddr) {
	if ip := addr.Addr(); ip.Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Addr: ip.As4(), Port: int(addr.Port())}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Addr: addr.Addr().As16(), Port: int(addr.Port())}
}

// echoSize is the size of a header and the nonce.
const echoSize = 16

func echoRequest(kind byte, nonce uint64) []byte {
	b := binary.BigEndian.AppendUint64([]byte{kind, 0, 0, 0, 'L', 'F', 0, 1}, nonce)
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum)) // for ICMPv6 the kernel writes it
	return b
}
