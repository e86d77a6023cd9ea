package kube

import (
	"context"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/internal/loop"
)

// Fold has a program read from the API server less often while events keep coming, one after the
// other: after Burst reads there is one each Every. To wake up for an event costs more than the event
// does. Nothing waits while a request other than a watch waits for its answer; so those that go out
// all the time, such as conditions of Services, have another connection.
type Fold struct {
	Every time.Duration // the longest delay of an event; 0 reads all at once
	Burst int
}

// What comes in bulk, such as a list, is read as fast as it comes: this much within this time.
const (
	bulkBytes  = 256 << 10
	bulkWindow = 100 * time.Millisecond
	// freshFor is how long a new connection is read at once: lists of all kinds come over it.
	freshFor = 5 * time.Second
)

// folding folds what is read from connections to the API server.
type folding struct {
	fold     Fold
	requests atomic.Int32  // that wait for an answer
	hurry    chan struct{} // has something in it when there is one
}

func newFolding(f Fold) *folding { return &folding{fold: f, hurry: make(chan struct{}, 1)} }

// config returns a configuration whose connections are read as f says.
func (f *folding) config(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(f.transport)
	dial := config.Dial
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return f.conn(conn), nil
	}
	return config
}

// conn returns a connection that is read less often.
func (f *folding) conn(conn net.Conn) net.Conn {
	return &foldedConn{Conn: conn, folding: f, reads: loop.Allowance{Every: f.fold.Every, Burst: f.fold.Burst},
		closed: make(chan struct{}), free: time.Now().Add(freshFor)}
}

// transport returns one that sends as next does, and notes which requests wait for an answer.
func (f *folding) transport(next http.RoundTripper) http.RoundTripper { return hurried{f, next} }

// hurried is the transport.
type hurried struct {
	folding *folding
	next    http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (h hurried) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Query().Has("watch") {
		return h.next.RoundTrip(r)
	}
	h.folding.requests.Add(1)
	defer h.folding.requests.Add(-1)
	select {
	case h.folding.hurry <- struct{}{}:
	default:
	}
	return h.next.RoundTrip(r)
}

// WrappedRoundTripper returns the transport below, by which client-go finds what it closes.
func (h hurried) WrappedRoundTripper() http.RoundTripper { return h.next }

// foldedConn is a connection that is read as Fold says. One goroutine reads at a time.
type foldedConn struct {
	net.Conn
	folding *folding
	reads   loop.Allowance
	closed  chan struct{}
	close   sync.Once

	drained bool // the last read took all that there was
	// window is since when so many bytes were counted, and free until when nothing waits.
	window, free time.Time
	bytes        int
}

// Read reads what there is by then. After a read that left something it does not wait.
func (c *foldedConn) Read(b []byte) (int, error) {
	if now := time.Now(); c.drained && !now.Before(c.free) && c.folding.requests.Load() == 0 {
		if rest := c.reads.Wait(now); rest > 0 {
			c.rest(rest)
		}
	}
	n, err := c.Conn.Read(b)
	c.drained = n < len(b)
	now := time.Now()
	if now.Sub(c.window) > bulkWindow {
		c.window, c.bytes = now, 0
	}
	if c.bytes += n; c.bytes >= bulkBytes {
		c.free = now.Add(bulkWindow)
	}
	return n, err
}

// rest waits, unless a request is sent or the connection is closed.
func (c *foldedConn) rest(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return
		case <-c.closed:
			return
		case <-c.folding.hurry:
			if c.folding.requests.Load() > 0 {
				return
			}
		}
	}
}

// Close closes the connection.
func (c *foldedConn) Close() error {
	c.close.Do(func() { close(c.closed) })
	return c.Conn.Close()
}
