package members

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

// reaches tells whether there is a node, and whether something accepts connections there. Where the
// port is met by silence, an answer to ping shows that it is only the port that is cut off: that
// node forwards, and its speaker answers as before.
func reaches(ctx context.Context, node *memberlist.Node) (there, accepts bool) {
	for {
		began := time.Now()
		there, accepts = ask(ctx, node)
		if there || ctx.Err() != nil || time.Since(began) < 2*refusalTimeout {
			return there, accepts
		}
		// It was this program that got no processor for so long: the answer may have been there all the
		// time.
	}
}

// ask tries both at once, for refusalTimeout.
func ask(ctx context.Context, node *memberlist.Node) (there, accepts bool) {
	ctx, cancel := context.WithTimeout(ctx, refusalTimeout)
	defer cancel()
	var group sync.WaitGroup
	echoed := false
	group.Go(func() { echoed = ping(ctx, node.Addr) })
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", node.Address())
	if err == nil {
		conn.Close()
	}
	there, accepts = err == nil || errors.Is(err, syscall.ECONNREFUSED), err == nil
	if there {
		cancel()
	}
	group.Wait()
	return there || echoed, accepts
}

// ping tells whether an echo request (RFC 792, RFC 4443 section 4.1) is answered before ctx ends.
// Without the right to ask, it is not.
func ping(ctx context.Context, to net.IP) bool {
	network, request, reply := "ip4:icmp", byte(8), byte(0)
	if to.To4() == nil {
		network, request, reply = "ip6:ipv6-icmp", 128, 129
	}
	dialed, err := new(net.Dialer).DialContext(ctx, network, to.String())
	if err != nil {
		return false
	}
	conn := dialed.(*net.IPConn)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	// What was asked before may still be answered; the time tells one question from another.
	nonce := uint64(time.Now().UnixNano())
	if _, err := conn.Write(echoRequest(request, nonce)); err != nil {
		return false
	}
	var buf [256]byte
	for {
		// Not Read, which leaves the header of IPv4 on.
		n, _, err := conn.ReadFromIP(buf[:])
		if err != nil {
			return false
		}
		if n >= echoSize && buf[0] == reply && binary.BigEndian.Uint64(buf[8:]) == nonce {
			return true
		}
	}
}

// echoSize is that of a header and the nonce.
const echoSize = 16

func echoRequest(kind byte, nonce uint64) []byte {
	b := binary.BigEndian.AppendUint64([]byte{kind, 0, 0, 0, 'L', 'F', 0, 1}, nonce)
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum)) // of ICMPv6 the kernel writes it
	return b
}
