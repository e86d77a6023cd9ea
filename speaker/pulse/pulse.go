// Package pulse notices that this process did not run for a while: it was frozen, or the whole
// machine was. Whatever it knew may be wrong by then, and it has to find out before it acts on it.
package pulse

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const every = 100 * time.Millisecond

// Pulse counts how often the process has been away. Use New.
type Pulse struct {
	limit   time.Duration
	changed func()
	clock   func() time.Duration // since some moment, also while the machine sleeps

	mu    sync.Mutex
	last  time.Duration
	wakes uint64
	woke  time.Time
}

// New returns a Pulse that notices when the process is away for longer than limit. changed is
// called when the process was away; it must not block, and may be called from any goroutine that
// calls Wakes.
func New(limit time.Duration, changed func()) *Pulse {
	p := &Pulse{limit: limit, changed: changed, clock: boottime}
	p.last = p.clock()
	return p
}

// boottime goes on while the machine is suspended, as time.Now's clock does not.
func boottime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return 0 // it exists since Linux 2.6.39
	}
	return time.Duration(t.Nano())
}

// Wakes returns how often the process has gone on after it had been away, this very moment
// included, and when it last did.
func (p *Pulse) Wakes() (times uint64, woke time.Time) {
	p.mu.Lock()
	now := p.clock()
	away := now-p.last > p.limit
	p.last = now // in the same step, so that no freeze falls between
	if away {
		p.wakes, p.woke = p.wakes+1, time.Now()
	}
	times, woke = p.wakes, p.woke
	p.mu.Unlock()
	if away {
		p.changed()
	}
	return times, woke
}

// Run beats until ctx ends. What was before counts as awake.
func (p *Pulse) Run(ctx context.Context) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	p.mu.Lock()
	p.last = p.clock()
	p.mu.Unlock()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			p.Wakes()
		}
	}
}

// Busy returns 0: it is never at one thing.
func (p *Pulse) Busy() time.Duration { return 0 }
