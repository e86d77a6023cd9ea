// Package bfd is the actor that watches the path to each peer with Bidirectional Forwarding
// Detection: asynchronous mode (RFC 5880) over UDP on one hop (RFC 5881) and over several (RFC
// 5883), for IPv4 and IPv6.
//
// All sessions live in one goroutine on a thread of its own, with real-time priority where that is
// allowed, and allocate nothing per packet. A peer's silence is judged by when the kernel received
// its packets, not by when this process came to look.
package bfd

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Options of an Actor.
type Options struct {
	Log *slog.Logger
	// Changed is called after Outcomes differ in more than counters, from the thread that keeps the
	// sessions up: it must not block.
	Changed func()
	// Normal leaves the thread at normal priority and the memory of the process unlocked.
	Normal bool

	// What tests replace: where time and chance come from, and the network.
	now    func() time.Time
	random func() uint32
	open   func() (wire, error)
	// What Process replaces.
	raise func() error
	note  func(change)
}

// Actor keeps BFD sessions in this process. A busy one is better served by Process.
type Actor struct {
	opts    Options
	desired atomic.Pointer[map[Key]Profile]
	shown   atomic.Pointer[[]shown]
	health  atomic.Pointer[Health]
	stats   stats
	changes chan change // to be noted, by another thread: a log may block

	mu   sync.Mutex // guards wake
	wake func()     // nil while Run does not run
}

// Health is what is true of all sessions together.
type Health struct {
	// RealTime and MemoryLocked tell what the system granted. Without, a busy node may report peers
	// down that are not, or be reported so by them.
	RealTime, MemoryLocked bool
	// Problem says what was not granted, or why there are no sockets at all.
	Problem string
	// Dropped counts the packets that were not heeded, by reason.
	Dropped map[Drop]uint64
	// LatestWake is the longest that the thread was late for anything so far.
	LatestWake time.Duration
	// Lost counts how often packets were lost for want of room in a socket's buffer.
	Lost uint64
}

// stats are counters that the engine writes and others read.
type stats struct {
	dropped    [dropCount]atomic.Uint64
	latestWake atomic.Int64
	lost       atomic.Uint64
}

// change is what the log tells of a session: that its state changed, or what its problem is.
type change struct {
	Key              Key
	From, To         State
	Diagnostic       Diagnostic
	RemoteDiagnostic Diagnostic
	Problem          string
}

// New returns an Actor without sessions.
func New(opts Options) *Actor {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Changed == nil {
		opts.Changed = func() {}
	}
	if opts.now == nil {
		opts.now = time.Now
	}
	if opts.random == nil {
		opts.random = rand.Uint32
	}
	if opts.open == nil {
		opts.open = func() (wire, error) { return newKernel() }
	}
	if opts.raise == nil {
		opts.raise = raiseThread
	}
	if opts.note == nil {
		opts.note = func(c change) { c.log(opts.Log) }
	}
	a := &Actor{opts: opts, changes: make(chan change, 64)}
	a.desired.Store(&map[Key]Profile{})
	a.shown.Store(&[]shown{})
	a.health.Store(&Health{})
	return a
}

// Set replaces the sessions that shall be. A session whose profile differs takes the new one
// without going down; one that is not named any more is taken down administratively, so that the
// peer does not count it as a failure. The actor keeps sessions.
func (a *Actor) Set(sessions map[Key]Profile) {
	a.desired.Store(&sessions)
	a.poke()
}

func (a *Actor) poke() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wake != nil {
		a.wake()
	}
}

// Outcomes returns what is really so, for each session that shall be.
func (a *Actor) Outcomes() map[Key]Outcome {
	all := *a.shown.Load()
	outcomes := make(map[Key]Outcome, len(all))
	for _, s := range all {
		s.outcome.Sent, s.outcome.Received = s.counters.sent.Load(), s.counters.received.Load()
		outcomes[s.key] = s.outcome
	}
	return outcomes
}

// Health returns what is true of all sessions together.
func (a *Actor) Health() Health {
	h := *a.health.Load()
	h.Dropped = map[Drop]uint64{}
	for d := range a.stats.dropped {
		if n := a.stats.dropped[d].Load(); n > 0 {
			h.Dropped[Drop(d)] = n
		}
	}
	h.LatestWake, h.Lost = time.Duration(a.stats.latestWake.Load()), a.stats.lost.Load()
	return h
}

// Run keeps the sessions until ctx ends, then takes them down administratively, which takes a round
// trip to the peers, or a second if one does not answer.
func (a *Actor) Run(ctx context.Context) error {
	var logging sync.WaitGroup
	logging.Go(func() {
		for c := range a.changes {
			a.opts.note(c)
		}
	})
	defer logging.Wait()
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine, and its priority with it
		ended <- a.keep(ctx)
		close(a.changes)
	}()
	return <-ended
}

// keep runs the engine on the calling thread.
func (a *Actor) keep(ctx context.Context) error {
	w, err := a.opts.open()
	if err != nil {
		a.health.Store(&Health{Problem: err.Error()})
		return fmt.Errorf("bfd: %w", err)
	}
	defer w.close()
	a.harden()
	a.setWake(w.wake)
	defer a.setWake(nil)
	defer context.AfterFunc(ctx, w.wake)()
	newEngine(a, w).run(ctx)
	return nil
}

func (a *Actor) setWake(wake func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wake = wake
}

// harden asks for what keeps the thread punctual on a busy node, and goes on without where it is
// not granted.
func (a *Actor) harden() {
	if a.opts.Normal {
		return
	}
	h := Health{}
	for _, step := range []struct {
		do   func() error
		done *bool
	}{{a.opts.raise, &h.RealTime}, {lockMemory, &h.MemoryLocked}} {
		err := step.do()
		*step.done = err == nil
		if err == nil {
			continue
		}
		if h.Problem != "" {
			h.Problem += "; "
		}
		h.Problem += err.Error()
	}
	if h.Problem != "" {
		a.opts.Log.Warn("BFD may see or cause false failures while the node is busy", "reason", h.Problem)
	}
	a.health.Store(&h)
}

// report hands a change to the log, and forgets it if the log is far behind.
func (a *Actor) report(c change) {
	select {
	case a.changes <- c:
	default:
	}
}

func (c change) log(log *slog.Logger) {
	log = log.With("peer", c.Key.String())
	if c.Problem != "" {
		log.Warn("BFD session cannot be kept", "reason", c.Problem)
		return
	}
	log.Info("BFD session changed", "from", c.From.String(), "to", c.To.String(),
		"diagnostic", c.Diagnostic.String(), "remoteDiagnostic", c.RemoteDiagnostic.String())
}
