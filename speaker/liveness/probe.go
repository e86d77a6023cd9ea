package liveness

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// answerTimeout bounds the wait for an answer on a network without long ways. A kernel answers at
// once, however busy its programs are.
const answerTimeout = 50 * time.Millisecond

// Answers reports whether the kernel of a node answers: it accepts or refuses a connection to the
// speaker's port, or it replies to ping in case a packet filter drops what is for the port.
func Answers(ctx context.Context, addr netip.AddrPort) bool {
	return AnswersWithin(answerTimeout)(ctx, addr)
}

// AnswersWithin returns a function like Answers that waits for as long as is given.
func AnswersWithin(timeout time.Duration) func(ctx context.Context, addr netip.AddrPort) bool {
	return func(ctx context.Context, addr netip.AddrPort) bool {
		for {
			began := time.Now()
			answered := ask(ctx, addr, timeout)
			if answered || ctx.Err() != nil || time.Since(began) < 2*timeout {
				return answered
			}
			// This program got no CPU time for so long: the answer may have been there all the time.
		}
	}
}

// ask tries both at once.
func ask(ctx context.Context, addr netip.AddrPort, timeout time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var group sync.WaitGroup
	echoed := false
	group.Go(func() { echoed = ping(ctx, addr.Addr()) })
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String())
	if err == nil {
		conn.Close()
	}
	there := err == nil || errors.Is(err, syscall.ECONNREFUSED)
	if there {
		cancel()
	}
	group.Wait()
	return there || echoed
}

// ping reports whether an echo request (RFC 792, RFC 4443 section 4.1) is answered before ctx ends.
// It is false where this process may not open a raw socket.
func ping(ctx context.Context, to netip.Addr) bool {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	dialed, err := new(net.Dialer).DialContext(ctx, network, to.String())
	if err != nil {
		return false
	}
	conn := dialed.(*net.IPConn)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	// A late reply to an earlier request may still arrive; the time tells the requests apart.
	nonce := uint64(time.Now().UnixNano())
	if _, err := conn.Write(echoRequest(request, nonce)); err != nil {
		return false
	}
	var buf [256]byte
	for {
		// Not Read, which keeps the IPv4 header.
		n, _, err := conn.ReadFromIP(buf[:])
		if err != nil {
			return false
		}
		if n >= echoSize && buf[0] == reply && binary.BigEndian.Uint64(buf[8:]) == nonce {
			return true
		}
	}
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
