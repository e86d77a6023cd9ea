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

	"github.com/landfall-lb/landfall/internal/loop"
)

// workerOptions are Options, and what tests and the process of the sessions replace.
type workerOptions struct {
	Options
	random func() uint32
	open   func() (wire, error)
	note   func(change) // logs
}

// worker keeps sessions in the process that Actor has started for them. It has the methods of
// Actor.
type worker struct {
	opts    workerOptions
	desired atomic.Pointer[map[Key]Profile]
	shown   atomic.Pointer[[]shown]
	health  atomic.Pointer[Health]
	stats   stats
	changes chan change // to be noted, by another thread: a log may block
	// turn is when the engine began what it does, in nanoseconds of Unix time; 0 while it waits. A loop.Pulse would
	// allocate with each packet.
	turn atomic.Int64

	mu   sync.Mutex // guards wake
	wake func()     // nil while Run does not run
}

// stats are counters that the engine writes and others read.
type stats struct {
	dropped    [dropCount]atomic.Uint64
	latestWake atomic.Int64
	lost       atomic.Uint64
}

// change is what is logged of a session: that its state changed, or what its problem is.
type change struct {
	Key              Key
	From, To         State
	Diagnostic       Diagnostic
	RemoteDiagnostic Diagnostic
	Problem          string
	LeftOut          int // changes that were not noted since the one before
}

func newWorker(opts workerOptions) *worker {
	opts.Options = opts.withDefaults()
	if opts.random == nil {
		opts.random = rand.Uint32
	}
	if opts.open == nil {
		opts.open = func() (wire, error) { return newKernel() }
	}
	if opts.note == nil {
		opts.note = func(c change) { c.log(opts.Log) }
	}
	a := &worker{opts: opts, changes: make(chan change, 64)}
	a.desired.Store(&map[Key]Profile{})
	a.shown.Store(&[]shown{})
	a.health.Store(&Health{})
	return a
}

func (a *worker) Set(sessions map[Key]Profile) {
	a.desired.Store(&sessions)
	a.poke()
}

func (a *worker) poke() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wake != nil {
		a.wake()
	}
}

func (a *worker) Outcomes() map[Key]Outcome {
	all := *a.shown.Load()
	outcomes := make(map[Key]Outcome, len(all))
	for _, s := range all {
		s.outcome.Sent, s.outcome.Received = s.counters.sent.Load(), s.counters.received.Load()
		outcomes[s.key] = s.outcome
	}
	return outcomes
}

func (a *worker) Health() Health {
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

// busy returns for how long the engine has been at one thing; 0 while it waits.
func (a *worker) busy() time.Duration {
	began := a.turn.Load()
	if began == 0 {
		return 0
	}
	return max(time.Since(time.Unix(0, began)), time.Nanosecond)
}

func (a *worker) Run(ctx context.Context) error {
	var logging sync.WaitGroup
	logging.Go(a.log)
	defer logging.Wait()
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine, and its priority with it
		ended <- a.keep(ctx)
		close(a.changes)
	}()
	return <-ended
}

// maxLines is how many changes of one second are logged: whoever can send packets can have a session that is not up go
// from Down to Init and back with each two.
const maxLines = 50

// log has changes noted until there are no more.
func (a *worker) log() {
	var lines loop.Lines
	for c := range a.changes {
		var ok bool
		if c.LeftOut, ok = lines.Admit(time.Now(), maxLines); ok {
			a.opts.note(c)
		}
	}
}

// keep runs the engine on the calling thread.
func (a *worker) keep(ctx context.Context) error {
	a.turn.Store(time.Now().UnixNano())
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

func (a *worker) setWake(wake func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wake = wake
}

// harden asks for what keeps the thread punctual on a busy node, and goes on without where it is
// not granted.
func (a *worker) harden() {
	if a.opts.Normal {
		return
	}
	h := Health{}
	for _, step := range []struct {
		do   func() error
		done *bool
	}{{raiseThread, &h.RealTime}, {lockMemory, &h.MemoryLocked}} {
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
func (a *worker) report(c change) {
	select {
	case a.changes <- c:
	default:
	}
}

func (c change) log(log *slog.Logger) {
	log = log.With("peer", c.Key.String())
	if c.LeftOut > 0 {
		log = log.With("leftOut", c.LeftOut)
	}
	if c.Problem != "" {
		log.Warn("BFD session cannot be kept", "reason", c.Problem)
		return
	}
	log.Info("BFD session changed", "from", c.From.String(), "to", c.To.String(),
		"diagnostic", c.Diagnostic.String(), "remoteDiagnostic", c.RemoteDiagnostic.String())
}
