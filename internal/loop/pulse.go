package loop

import (
	"context"
	"sync"
	"time"
)

// Pulse tells for how long a loop has been at one thing without an end: what takes too long hangs.
// The zero value is the pulse of a loop at rest. It is safe for concurrent use.
type Pulse struct {
	mu    sync.Mutex
	since time.Time // zero at rest
}

// Begin says that the loop has begun something. It returns what says that it has ended.
func (p *Pulse) Begin() (end func()) {
	p.set(time.Now())
	return func() { p.set(time.Time{}) }
}

func (p *Pulse) set(since time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.since = since
}

// progress says that the loop has come further.
func (p *Pulse) progress() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.since.IsZero() {
		p.since = time.Now()
	}
}

// Busy returns how long ago the loop began what it does, or came further in it; 0 at rest.
func (p *Pulse) Busy() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		return 0
	}
	return max(time.Since(p.since), time.Nanosecond)
}

// Pulses is the pulse of several goroutines that share one answer to how they are. The zero value
// is at rest. It is safe for concurrent use.
type Pulses struct {
	mu   sync.Mutex
	last uint64
	all  map[uint64]time.Time // since when, for each thing that was begun
}

// Begin says that one of the goroutines has begun something. It returns what says that it has
// ended.
func (p *Pulses) Begin() (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == nil {
		p.all = map[uint64]time.Time{}
	}
	p.last++
	id := p.last
	p.all[id] = time.Now()
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.all, id)
	}
}

// Busy returns how long ago the thing was begun that takes longest; 0 at rest.
func (p *Pulses) Busy() (longest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, since := range p.all {
		longest = max(longest, time.Since(since), time.Nanosecond)
	}
	return longest
}

type pulseKey struct{}

// Progress says that the step that was called with ctx has come further. A step of many parts, each
// of which has an end of its own, says so after each: it may take as long as it takes.
func Progress(ctx context.Context) {
	if p, ok := ctx.Value(pulseKey{}).(*Pulse); ok {
		p.progress()
	}
}
