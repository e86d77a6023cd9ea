package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
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

// pass passes on what either end sends until both have ended what they send, one of them fails, neither
// has sent anything for idle, or ctx ends. An end that ends what it sends can still receive.
func pass(ctx context.Context, pipes *share, client, backend *Conn, idle time.Duration) (end ended) {
	var once sync.Once
	reset := func(why error) {
		once.Do(func() {
			end.err = why
			abort(client, backend)
		})
	}
	stop := context.AfterFunc(ctx, func() { reset(context.Cause(ctx)) })
	defer stop()
	timer := watch(idle, client, backend, reset)
	defer timer.Stop()
	var ended atomic.Int32
	half := func(to, from *Conn) uint64 {
		n, err := move(to, from, pipes)
		if err == nil && ended.Add(1) == 1 { // when both have, closing says so
			if err = from.wasReset(); err == nil {
				err = to.closeWrite()
			}
		}
		if err != nil && !errors.Is(err, unix.ENOTCONN) { // the other end closed meanwhile
			reset(err)
		}
		return n
	}
	back := make(chan uint64)
	go func() { back <- half(client, backend) }()
	end.sent = half(backend, client)
	end.received = <-back
	once.Do(func() {}) // whatever still runs changes nothing
	return end
}

// keepAliveAfter is how old a connection is when keep-alives are switched on: most end before, and do
// without the system calls. The kernel would not send any earlier.
const keepAliveAfter = 30 * time.Second

// watch has dead ends found, and calls reset once neither end has sent anything for idle.
func watch(idle time.Duration, client, backend *Conn, reset func(error)) *time.Timer {
	var timer *time.Timer
	ready, young := make(chan struct{}), true
	timer = time.AfterFunc(min(idle, keepAliveAfter), func() {
		<-ready
		if young {
			_, _ = client.keepAlive(), backend.keepAlive()
			young = false
		}
		quiet := min(client.quiet(idle), backend.quiet(idle))
		if quiet < idle {
			timer.Reset(idle - quiet)
			return
		}
		reset(fmt.Errorf("neither end has sent anything for %s", idle))
	})
	close(ready)
	return timer
}

// wasReset returns an error if the other end has reset the connection: a write may have been told so in place
// of the read, which then sees an end.
func (c *Conn) wasReset() error {
	return c.control(func(fd int) error {
		const closed = 7 // TCP_CLOSE; after the other's FIN it is CLOSE_WAIT
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && info.State == closed {
			return unix.ECONNRESET
		}
		return nil
	})
}
