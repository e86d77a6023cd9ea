package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// dialer connects to the first of several backends that answers.
type dialer struct {
	// dial connects to a backend until ctx ends.
	dial func(ctx context.Context, backend netip.AddrPort) (*net.TCPConn, error)
	// tries is how many backends a connection tries at most. The next is tried once one has refused,
	// or has not answered for tryAfter; all together have timeout.
	tries             int
	tryAfter, timeout time.Duration
}

// attempt is how the connection to one backend ended.
type attempt struct {
	backend netip.AddrPort
	conn    *net.TCPConn
	err     error
}

var errNoBackend = errors.New("there is no backend")

// connect returns a connection to the first backend that answers, and all that it tried. A backend that
// is late goes on connecting while others are tried, so none is given up for one that is no better.
// failed is told each backend that failed, or had not answered when another did.
func (d dialer) connect(ctx context.Context, next func(tried []netip.AddrPort) (netip.AddrPort, bool),
	failed func(netip.AddrPort)) (conn *net.TCPConn, tried []netip.AddrPort, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, d.timeout, fmt.Errorf("no answer within %s", d.timeout))
	defer cancel()
	ends, open := make(chan attempt), map[netip.AddrPort]bool{}
	defer func() { go closeLate(ends, len(open)) }()
	var errs []error
	late := time.NewTimer(d.tryAfter)
	defer late.Stop()
	for {
		if backend, ok := next(tried); ok && len(tried) < d.tries {
			tried, open[backend] = append(tried, backend), true
			late.Reset(d.tryAfter)
			go func() {
				conn, err := d.dial(ctx, backend)
				ends <- attempt{backend, conn, err}
			}()
		}
		if len(open) == 0 {
			if len(tried) == 0 {
				return nil, nil, errNoBackend
			}
			return nil, tried, errors.Join(errs...)
		}
		select {
		case <-late.C:
		case end := <-ends:
			delete(open, end.backend)
			if end.err == nil {
				for other := range open {
					failed(other)
				}
				return end.conn, tried, nil
			}
			failed(end.backend)
			errs = append(errs, end.err)
		}
	}
}

// closeLate closes what connects after another backend has.
func closeLate(ends <-chan attempt, n int) {
	for range n {
		if end := <-ends; end.err == nil {
			end.conn.Close()
		}
	}
}
