package cases

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"
)

const clientPort = 40000

// sendInvalid sends answers (SYN and ACK) without a connection, and looks whether they arrive.
func (s *Site) sendInvalid(t *testing.T, c Case, patience time.Duration) Seen {
	t.Helper()
	network := "ip4:tcp"
	if s.World.Node.Is6() {
		network = "ip6:tcp"
	}
	from, to := netip.AddrPortFrom(c.Source(s.World), BackendPort(c.Transport())), c.Destination(s.World)
	listen := func(name string, at netip.Addr) (conn net.PacketConn) {
		s.At[name].Do(t, func() (err error) {
			conn, err = net.ListenPacket(network, at.String())
			return err
		})
		return conn
	}
	receiver, sender := listen("outside", to.Addr()), listen(c.From, from.Addr())
	defer receiver.Close()
	defer sender.Close()
	segment := synAck(from, to)
	for range 3 {
		if _, err := sender.WriteTo(segment, &net.IPAddr{IP: to.Addr().AsSlice()}); err != nil {
			t.Fatal(err)
		}
	}
	if err := receiver.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1500)
	for {
		n, _, err := receiver.ReadFrom(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return Seen{Ends: Silence}
		case err != nil:
			t.Fatal(fmt.Errorf("receive: %w", err))
		case n >= 4 && string(buf[:4]) == string(segment[:4]):
			return Seen{Ends: Passed}
		}
	}
}

// synAck returns a TCP segment (RFC 9293, section 3.1).
func synAck(from, to netip.AddrPort) []byte {
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment[0:], from.Port())
	binary.BigEndian.PutUint16(segment[2:], to.Port())
	binary.BigEndian.PutUint32(segment[4:], 1)
	binary.BigEndian.PutUint32(segment[8:], 1)
	segment[12] = 5 << 4            // words of the header
	segment[13] = 0x02 | 0x10       // SYN, ACK
	segment[14], segment[15] = 1, 0 // window
	sum := uint32(6 + len(segment))
	for _, part := range [][]byte{from.Addr().AsSlice(), to.Addr().AsSlice(), segment} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(segment[16:], ^uint16(sum))
	return segment
}
