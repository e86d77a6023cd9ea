package relay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ended is what became of a connection.
type ended struct {
	// sent is how many bytes the client sent, received how many it got.
	sent, received uint64
	// backend is the last that had the connection or flow; not valid if there was none, or the flow has lost it.
	backend netip.AddrPort
	// err is why the connection was reset; nil if both ends closed it.
	err error
	// handedOn is set if the successor of the relay has the connection, which goes on.
	handedOn bool
}

// passage passes on the bytes of one connection. Another goroutine than that of run may pause it: then no byte moves,
// and what is between the ends is in the pipes of its movers, until that resumes or releases it.
type passage struct {
	client, backend *Conn
	out, back       *mover // of what the client sends, and of what the backend does
	// start runs a function in another goroutine.
	start func(func())
	// outEnded and backEnded are set once an end has ended what it sends. They belong to run, and to who has paused it.
	outEnded, backEnded bool

	mu   sync.Mutex
	done bool  // no byte moves here any more: both ends have ended what they send, it was reset, or it is another's
	gone bool  // no reset concerns the sockets any more
	why  error // it was reset; nil if it was not
	// pausing is told once nothing moves any more, and whether the connection has ended; nil without a pause. While it
	// is paused a reset waits.
	pausing chan bool
	paused  bool
	verdict chan bool // whether the connection goes on here
}

func newPassage(pipes *share, client, backend *Conn) *passage {
	return &passage{client: client, backend: backend, out: newMover(backend, client, pipes),
		back: newMover(client, backend, pipes), verdict: make(chan bool), start: func(f func()) { go f() }}
}

// run passes on what either end sends until both have ended what they send and taken what the other has sent, one of
// them fails, neither has sent anything for idle, ctx ends, or the connection is released. An end that ends what it
// sends can still receive.
func (p *passage) run(ctx context.Context, idle time.Duration) ended {
	stop := context.AfterFunc(ctx, func() { p.end(context.Cause(ctx)) })
	defer stop()
	timer := watch(idle, p.client, p.backend, p.abandon)
	defer timer.Stop()
	for p.both(); p.pauses(); p.both() {
		if !<-p.verdict {
			return ended{handedOn: true}
		}
		p.goOn()
	}
	timer.Stop()
	p.outlast(ctx, idle)
	return ended{sent: p.out.moved.Load(), received: p.back.moved.Load(), err: p.quit()}
}

// abort resets the connection, unless it has ended. What is paused is reset once it goes on.
func (p *passage) abort(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.gone {
		p.fail(why)
	}
}

// abandon resets the connection unless no byte moves any more: then outlast judges it.
func (p *passage) abandon(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.done && !p.gone {
		p.fail(why)
	}
}

func (p *passage) fail(why error) {
	if p.why != nil {
		return
	}
	if p.why = why; !p.paused {
		abort(p.client, p.backend)
	}
}

// end resets the connection as the relay ends, unless it only outlasts what its ends have sent: that is left to the
// kernel.
func (p *passage) end(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.done {
		p.fail(why)
		return
	}
	past := time.Unix(1, 0)
	_, _ = p.client.file.SetReadDeadline(past), p.backend.file.SetReadDeadline(past)
}

// quit has later resets do nothing, and returns why the connection was reset before.
func (p *passage) quit() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone = true
	return p.why
}

// both moves bytes both ways until both ends have ended what they send, it fails, or is paused.
func (p *passage) both() {
	var halves atomic.Int32
	if p.outEnded || p.backEnded {
		halves.Store(1)
	}
	half := func(m, other *mover, to, from *Conn) (ended bool) {
		err := m.run()
		if errors.Is(err, errPaused) {
			return false
		}
		if err == nil && halves.Add(1) == 1 { // when both have, closing says so
			if other.giving.Load() { // which may have been told of a reset in place of m
				err = from.wasReset()
			}
			if err == nil {
				err = to.closeWrite()
			}
		}
		if err != nil && !errors.Is(err, unix.ENOTCONN) { // the other end closed meanwhile
			p.abort(err)
		}
		return true
	}
	var back chan struct{}
	if !p.backEnded {
		back = make(chan struct{})
		p.start(func() {
			defer close(back)
			p.backEnded = half(p.back, p.out, p.client, p.backend)
		})
	}
	if !p.outEnded {
		p.outEnded = half(p.out, p.back, p.backend, p.client)
	}
	if back != nil {
		<-back
	}
}

// pauses reports whether the connection is paused; else it has ended. One that only outlasts its ends is not handed to
// a successor: nothing is left to pass on, and what it holds would still count for this process.
func (p *passage) pauses() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = p.pausing != nil && p.why == nil && (!p.outEnded || !p.backEnded)
	if p.pausing != nil {
		p.pausing <- p.paused
		p.pausing = nil
	}
	if p.done = !p.paused; p.done {
		p.out.drop()
		p.back.drop()
	}
	return p.paused
}

// pause stops the bytes. The channel tells once that is done: false if the connection has ended, and true if it has to
// be resumed or released.
func (p *passage) pause() <-chan bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	paused := make(chan bool, 1)
	if p.done || p.why != nil {
		paused <- false
		return paused
	}
	p.pausing = paused
	past := time.Unix(1, 0)
	_, _ = p.client.file.SetDeadline(past), p.backend.file.SetDeadline(past)
	return paused
}

// resume has a paused connection go on.
func (p *passage) resume() { p.verdict <- true }

// release leaves a paused connection to another process, which has its sockets and pipes.
func (p *passage) release() {
	p.out.drop()
	p.back.drop()
	p.mu.Lock()
	p.done, p.gone = true, true
	p.mu.Unlock()
	p.verdict <- false
}

// goOn has the sockets of a paused connection wait for their other ends again.
func (p *passage) goOn() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.paused = false; p.why != nil {
		abort(p.client, p.backend)
		return
	}
	if p.pausing != nil { // again
		return
	}
	_, _ = p.client.file.SetDeadline(time.Time{}), p.backend.file.SetDeadline(time.Time{})
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
// of the read, which then sees an end. That costs a system call.
func (c *Conn) wasReset() error {
	return c.control(func(fd int) error {
		const closed = 7 // TCP_CLOSE; after the other's FIN it is CLOSE_WAIT
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil && info.State == closed {
			return unix.ECONNRESET
		}
		return nil
	})
}
