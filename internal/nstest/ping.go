package nstest

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"
)

// Ping sends an echo request (RFC 792, RFC 4443 section 4.1) to an address every 200 ms, and
// reports whether one is answered in time.
func (ns *NS) Ping(t testing.TB, to netip.Addr, patience time.Duration) (answered bool) {
	t.Helper()
	ns.Do(t, func() (err error) {
		answered, err = Ping(to, patience)
		return err
	})
	return answered
}

// Ping reports whether an address answers within some time, in the network namespace of the calling
// thread.
func Ping(to netip.Addr, patience time.Duration) (answered bool, err error) {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	conn, err := net.Dial(network, to.String())
	if err != nil {
		return false, err
	}
	defer conn.Close()
	for end := time.Now().Add(patience); time.Now().Before(end) && !answered; {
		_, _ = conn.Write(echoRequest(request)) // a request that cannot be sent gets no answer
		if err := conn.SetReadDeadline(time.Now().Add(min(patience, 200*time.Millisecond))); err != nil {
			return false, err
		}
		if answered, err = readReply(conn.(*net.IPConn), reply); err != nil {
			return false, err
		}
	}
	return answered, nil
}

const echoIdentifier = 0x4c46

func echoRequest(kind byte) []byte {
	b := []byte{kind, 0, 0, 0}
	b = binary.BigEndian.AppendUint16(b, echoIdentifier)
	b = append(b, 0, 1)
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum)) // the kernel writes the checksum of ICMPv6
	return b
}

// readReply reports whether the answer arrives before the deadline.
func readReply(conn *net.IPConn, kind byte) (bool, error) {
	var buf [256]byte
	for {
		n, _, err := conn.ReadFromIP(buf[:])
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return false, nil
		case err != nil:
			var refused *net.OpError
			if errors.As(err, &refused) && !refused.Timeout() {
				continue // an ICMP error is not an answer
			}
			return false, err
		case n >= 6 && buf[0] == kind && binary.BigEndian.Uint16(buf[4:]) == echoIdentifier:
			return true, nil
		}
	}
}
