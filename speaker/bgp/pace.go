package bgp

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
)

// readSize is how much of what a peer sends is read at once.
const readSize = 32 << 10

// pace bounds what a peer can have the speaker do, over all connections of its session. What it sends beyond that
// waits in the kernel's buffers, and then at the peer.
type pace struct {
	mu        sync.Mutex
	reads     loop.Allowance // of readSize each
	refreshes loop.Allowance // of one family's routes each
	ups       loop.Allowance // times that the session comes up: all routes are sent, and the addresses planned anew
}

// newPace lets a peer send 16 MiB at once, and then 1 MiB a second: a million routes take a minute. A session that
// flaps comes up eight times at once, and then every two seconds, as often as the speaker connects (maxFlapWait).
func newPace() pace {
	return pace{
		reads:     loop.Allowance{Every: time.Second / 32, Burst: 512},
		refreshes: loop.Allowance{Every: time.Second, Burst: 4},
		ups:       loop.Allowance{Every: maxFlapWait, Burst: 8},
	}
}

// took takes that one of these was done, and returns how long to wait before the next one.
func (p *pace) took(what *loop.Allowance) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return what.Wait(time.Now())
}

// pacedReader reads what a peer sends no faster than its pace allows.
type pacedReader struct {
	from io.Reader
	pace *pace
}

func (r pacedReader) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	if err == nil {
		time.Sleep(r.pace.took(&r.pace.reads))
	}
	return n, err
}

// rest waits until the session may come up. The peer, for which it is up already, hears that we are there: of a hold
// time of 3 s little is left then.
func (c *connection) rest(ctx context.Context) error {
	wait := c.s.pace.took(&c.s.pace.ups)
	if wait <= 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(wait):
		return c.write(keepalive())
	}
}
