package relay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// dialer connects to the first of several backends that answers.
type dialer struct {
	// dial connects to a backend until ctx ends.
	dial func(ctx context.Context, backend netip.AddrPort) (*Conn, error)
	// tries is how many backends a connection tries at most. The next is tried once one has refused,
	// or has not answered for tryAfter; all together have timeout.
	tries             int
	tryAfter, timeout time.Duration
}

// attempt is how the connection to one backend ended.
type attempt struct {
	backend netip.AddrPort
	conn    *Conn
	err     error
}

// connection is what became of all tries.
type connection struct {
	conn    *Conn
	backend netip.AddrPort
	tried   []netip.AddrPort
	// failedHere is how many tries failed on the node itself, which says nothing about their backends.
	failedHere int
}

// noAnswer is the error of connections that nobody answered in time. Its text is made only when somebody
// asks, as each connection has one.
type noAnswer time.Duration

func (e noAnswer) Error() string { return fmt.Sprintf("no answer within %s", time.Duration(e)) }

var errNoBackend = errors.New("there is no backend")

// connect returns a connection to the first backend that answers, and all that it tried. A backend that
// is late goes on connecting while others are tried, so none is given up for one that is no better.
// failed is told each backend that failed, or was late when another answered.
func (d dialer) connect(ctx context.Context, next func(tried []netip.AddrPort) (netip.AddrPort, bool),
	failed func(netip.AddrPort)) (connection, error) {
	first, ok := next(nil)
	if !ok {
		return connection{}, errNoBackend
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := race{dialer: d, next: next, failed: failed, ends: make(chan attempt), until: time.Now().Add(d.timeout),
		cancel: cancel}
	r.tried = append(r.tried, first)
	// Most connections stand at once: for these, no goroutine is begun.
	type result struct {
		connection
		err error
	}
	results := make(chan result, 1)
	late := time.AfterFunc(d.tryAfter, func() {
		defer cancel(nil)
		r.open = map[netip.AddrPort]bool{first: true}
		c, err := r.run(ctx)
		results <- result{c, err}
	})
	conn, err := d.dial(ctx, first)
	if !late.Stop() { // the others are being tried
		r.ends <- attempt{first, conn, err}
		won := <-results
		return won.connection, won.err
	}
	if err == nil {
		r.conn, r.backend = conn, first
		return r.connection, nil
	}
	r.open = map[netip.AddrPort]bool{}
	r.lost(attempt{first, nil, err})
	return r.run(ctx)
}

// race is the connections to several backends for one client.
type race struct {
	dialer
	connection
	next   func(tried []netip.AddrPort) (netip.AddrPort, bool)
	failed func(netip.AddrPort)
	ends   chan attempt
	open   map[netip.AddrPort]bool // those that are late are true
	errs   []error
	until  time.Time // when all have had enough time
	cancel context.CancelCauseFunc
}

// run tries backends until one answers, all have failed or ctx ends.
func (r *race) run(ctx context.Context) (connection, error) {
	defer func() {
		if len(r.open) > 0 {
			go closeLate(r.ends, len(r.open))
		}
	}()
	late, over := time.NewTimer(r.tryAfter), time.AfterFunc(time.Until(r.until), func() { r.cancel(noAnswer(r.timeout)) })
	defer late.Stop()
	defer over.Stop()
	for {
		var backend netip.AddrPort
		ok := len(r.tried) < r.tries
		if ok {
			backend, ok = r.next(r.tried) // which counts it
		}
		if ok {
			r.tried, r.open[backend] = append(r.tried, backend), false
			late.Reset(r.tryAfter)
			go func() {
				conn, err := r.dial(ctx, backend)
				r.ends <- attempt{backend, conn, err}
			}()
		}
		if len(r.open) == 0 {
			return r.connection, errors.Join(r.errs...)
		}
		select {
		case <-late.C:
			for backend := range r.open {
				r.open[backend] = true
			}
		case end := <-r.ends:
			delete(r.open, end.backend)
			if end.err == nil {
				r.won(end)
				return r.connection, nil
			}
			r.lost(end)
		}
	}
}

// won takes the connection that stands. Those that are late by now count as failed.
func (r *race) won(end attempt) {
	r.conn, r.backend = end.conn, end.backend
	for other, isLate := range r.open {
		if isLate {
			r.failed(other)
		}
	}
}

// lost notes that a backend failed, unless the node itself did.
func (r *race) lost(end attempt) {
	r.errs = append(r.errs, end.err)
	if failedHere(end.err) {
		r.failedHere++
	} else {
		r.failed(end.backend)
	}
}

// failedHere reports whether a connection failed as this node had run out of something, before its
// backend was asked.
func failedHere(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && slices.Contains(nodeErrors, errno)
}

// nodeErrors are those of a connection that a node makes when it lacks something.
var nodeErrors = []unix.Errno{unix.EADDRNOTAVAIL, unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EAGAIN}

// closeLate closes what connects after another backend has.
func closeLate(ends <-chan attempt, n int) {
	for range n {
		if end := <-ends; end.err == nil {
			end.conn.Close()
		}
	}
}
