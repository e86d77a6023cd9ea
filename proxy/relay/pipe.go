package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// ended is what became of a connection.
type ended struct {
	// sent is how many bytes the client sent, received how many it got.
	sent, received uint64
	// err is why the connection was reset; nil if both ends closed it.
	err error
}

// pipe passes on what either end sends until both have ended what they send, one of them fails, neither
// has sent anything for idle, or ctx ends. An end that ends what it sends can still receive. The kernel
// moves the bytes (splice), and its buffers hold back an end that sends faster than the other reads.
func pipe(ctx context.Context, client, backend *net.TCPConn, idle time.Duration) (end ended) {
	type copied struct {
		toBackend bool
		n         int64
		err       error
	}
	done := make(chan copied, 2)
	pass := func(to, from *net.TCPConn) {
		n, err := to.ReadFrom(from)
		if err == nil {
			err = to.CloseWrite()
		}
		done <- copied{to == backend, n, err}
	}
	go pass(backend, client)
	go pass(client, backend)
	check := time.NewTimer(idle)
	defer check.Stop()
	stop := ctx.Done()
	for open := 2; open > 0; {
		select {
		case <-stop:
			stop = nil
			end.err = context.Cause(ctx)
			abort(client, backend)
		case <-check.C:
			if quiet := min(quiet(client, idle), quiet(backend, idle)); quiet < idle {
				check.Reset(idle - quiet)
				continue
			}
			end.err = fmt.Errorf("neither end has sent anything for %s", idle)
			abort(client, backend)
		case c := <-done:
			open--
			if c.toBackend {
				end.sent = uint64(c.n)
			} else {
				end.received = uint64(c.n)
			}
			if c.err != nil && !errors.Is(c.err, unix.ENOTCONN) { // the other end closed meanwhile
				if end.err == nil {
					end.err = c.err
				}
				abort(client, backend)
			}
		}
	}
	return end
}

// abort resets connections, which ends what reads from them and writes to them.
func abort(conns ...*net.TCPConn) {
	for _, c := range conns {
		_ = c.SetLinger(0)
		c.Close()
	}
}

// quiet returns how long ago an end last sent something; unknown is for how long if that cannot be
// found out.
func quiet(conn *net.TCPConn, unknown time.Duration) time.Duration {
	raw, err := conn.SyscallConn()
	if err != nil {
		return unknown
	}
	ago := unknown
	err = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			ago = time.Duration(info.Last_data_recv) * time.Millisecond
		}
	})
	if err != nil {
		return unknown
	}
	return ago
}
