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
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Options of an Actor.
type Options struct {
	Log *slog.Logger
	// Changed is called after Outcomes differ in more than counters. It must not block.
	Changed func()
	// Normal leaves the sessions at normal priority and their memory unlocked.
	Normal bool
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return o
}

// Actor keeps sessions in a process of its own: the same program, started again; see ProcessMain.
//
// However high the priority of a thread, it waits for the others of its process: for a place to run
// Go, and whenever the garbage collector stops the world, for the slowest normal thread of a busy
// node. docs/guide/bfd.md has what that does to sessions of 50 ms × 3. The process ends when this one
// does, whichever way, and takes the sessions down administratively then.
type Actor struct {
	pulse loop.Pulse // while the process takes an order
	// heard is when the process has said something, and that was taken in; nil without a process.
	heard atomic.Pointer[time.Time]

	opts     Options
	onThread func(start func(*exec.Cmd) error, cmd *exec.Cmd) error // on one that ends after
	poked    chan struct{}                                          // desired has changed

	mu       sync.Mutex
	desired  map[Key]Profile
	outcomes map[Key]Outcome
	health   Health
	before   map[Key]Outcome // the last of each session under earlier processes: their counters are not lost
}

const (
	processMark = "LANDFALL_BFD_PROCESS" // set in the environment of the process
	counting    = 5 * time.Second        // between reports without a change, for the counters
	stuckAfter  = counting               // how long its engine is at one thing when the process reports no more
	silence     = 2 * counting           // how long a process that runs reports nothing at most
	patience    = 3 * time.Second        // with a process that shall end
	// linger is for how long the process keeps the sessions after its program has ended, or has let go
	// of it. The BGP sessions that they watch end before, at a crash at the same moment, and a router
	// must hear of those first: one that is told by BFD, even of an administrative end, drops the
	// routes that it would keep for the program's next start (seen of FRR 8.4).
	linger = 500 * time.Millisecond
)

// restarts are the waits between attempts to start the process.
var restarts = loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}

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
	// Lost counts how often packets were lost because a socket's buffer was full.
	Lost uint64
}

var _ actor.Setter[map[Key]Profile] = (*Actor)(nil)

// New returns an Actor without sessions. The program must call ProcessMain.
func New(opts Options) *Actor {
	return &Actor{opts: opts.withDefaults(), onThread: onOwnThread, poked: make(chan struct{}, 1),
		before: map[Key]Outcome{}}
}

// Set replaces the sessions that shall be. A session whose profile differs takes the new one
// without going down; one that is not named any more is taken down administratively, so that the
// peer does not count it as a failure. The actor keeps sessions.
func (a *Actor) Set(sessions map[Key]Profile) {
	a.mu.Lock()
	same := maps.Equal(a.desired, sessions)
	a.desired = sessions
	a.mu.Unlock()
	if same {
		return
	}
	select {
	case a.poked <- struct{}{}:
	default:
	}
}

// Outcomes returns what is really so, for each session that shall be. Do not change what is
// returned. Counters may be a few seconds old.
func (a *Actor) Outcomes() map[Key]Outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.outcomes // a new map is made for each change
}

// Health returns what is true of all sessions together.
func (a *Actor) Health() Health {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.health
}

// Busy returns for how long the actor has been at one thing, or its process has reported nothing, as one does whose
// engine hangs.
func (a *Actor) Busy() time.Duration {
	busy := a.pulse.Busy()
	if at := a.heard.Load(); at != nil {
		if silent := time.Since(*at); silent > silence {
			busy = max(busy, silent)
		}
	}
	return busy
}

// Run keeps the sessions until ctx ends, then takes them down administratively, which takes a round
// trip to the peers, or a second if one does not answer. It starts the process with the first
// session, and again when it ends before ctx does.
func (a *Actor) Run(ctx context.Context) error {
	if os.Getenv(processMark) != "" {
		return errors.New(
			"bfd: this is the process for the sessions, which the program has not turned into: it must call ProcessMain")
	}
	if !a.asked(ctx) {
		return nil
	}
	return loop.Retry(ctx, restarts, func(ctx context.Context) (worked bool) {
		began := time.Now()
		err := a.serve(ctx)
		if ctx.Err() == nil {
			a.stranded(err)
		}
		return time.Since(began) > time.Minute
	})
}

// asked waits for the first session, and reports whether it came before the end of ctx.
func (a *Actor) asked(ctx context.Context) bool {
	for {
		a.mu.Lock()
		n := len(a.desired)
		a.mu.Unlock()
		if n > 0 {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-a.poked:
		}
	}
}

// serve runs the process once, and returns why it ended.
func (a *Actor) serve(ctx context.Context) error {
	cmd := processCommand()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	start := startRaised
	if a.opts.Normal {
		start = (*exec.Cmd).Start
	}
	if err := a.onThread(start, cmd); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	ended := make(chan struct{})
	var ordering sync.WaitGroup
	ordering.Go(func() { a.order(ctx, stdin, cmd.Process, ended) })
	err = a.listen(stdout)
	close(ended)
	ordering.Wait()
	return errors.Join(err, cmd.Wait())
}

// processCommand is this program, as the process that keeps the sessions.
func processCommand() *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"landfall-bfd"} // what ps shows
	// Without the setting the runtime interrupts the wait for packets every 10 ms, to see whether others want to run.
	cmd.Env = append(os.Environ(), processMark+"=1", "GODEBUG=asyncpreemptoff=1")
	cmd.Stderr = os.Stderr
	return cmd
}

// order tells the process what shall be until it has ended. At the end of ctx it lets go of it, and
// makes sure that it goes.
func (a *Actor) order(ctx context.Context, stdin io.WriteCloser, process *os.Process, ended <-chan struct{}) {
	defer stdin.Close()
	encoder := json.NewEncoder(stdin)
	for {
		a.mu.Lock()
		o := order{Normal: a.opts.Normal, Sessions: make([]ordered, 0, len(a.desired))}
		for key, profile := range a.desired {
			o.Sessions = append(o.Sessions, ordered{key, profile})
		}
		a.mu.Unlock()
		end := a.pulse.Begin()
		err := encoder.Encode(o)
		end()
		if err != nil { // it is about to end
			<-ended
			return
		}
		select {
		case <-a.poked:
		case <-ended:
			return
		case <-ctx.Done():
			stdin.Close()
			select {
			case <-ended:
			case <-time.After(patience):
				_ = process.Kill()
			}
			return
		}
	}
}

// onOwnThread starts the process on a thread that ends after, and with it what start does to the
// thread.
func onOwnThread(start func(*exec.Cmd) error, cmd *exec.Cmd) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		done <- start(cmd)
	}()
	return <-done
}

// listen takes what the process tells until it has ended.
func (a *Actor) listen(stdout io.Reader) error {
	defer a.heard.Store(nil)
	for decoder := json.NewDecoder(stdout); ; {
		now := time.Now()
		a.heard.Store(&now)
		var said answer
		switch err := decoder.Decode(&said); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("listen: %w", err)
		}
		if said.Change != nil {
			said.Change.log(a.opts.Log)
		}
		if said.Health != nil {
			a.take(said)
		}
	}
}

// take makes what the process told the outcome.
func (a *Actor) take(said answer) {
	all := make(map[Key]Outcome, len(said.Outcomes))
	a.mu.Lock()
	changed := len(said.Outcomes) != len(a.outcomes)
	for _, o := range said.Outcomes {
		all[o.Key] = o.Outcome.since(a.before[o.Key])
		changed = changed || !all[o.Key].sameAs(a.outcomes[o.Key])
	}
	problem := said.Health.Problem
	worse := problem != "" && problem != a.health.Problem
	a.outcomes, a.health = all, *said.Health
	a.mu.Unlock()
	if worse {
		a.opts.Log.Warn("BFD may see or cause false failures while the node is busy", "reason", problem)
	}
	if changed {
		a.opts.Changed()
	}
}

// stranded shows that no process keeps the sessions. That is no failure of a path, as none is
// watched now.
func (a *Actor) stranded(cause error) {
	text := "the process that keeps the sessions ended"
	if cause != nil {
		text += ": " + cause.Error()
	}
	a.opts.Log.Error("BFD sessions are not kept", "reason", text)
	a.mu.Lock()
	all := make(map[Key]Outcome, len(a.outcomes))
	for key, o := range a.outcomes {
		if o.State == Up {
			o.Since = time.Now()
			o.LastDown = &Loss{At: o.Since, Diagnostic: AdministrativelyDown, Administrative: true}
		}
		if o.Refused == nil {
			o.State, o.RemoteState, o.Problem = Down, Down, text
		}
		all[key], a.before[key] = o, o
	}
	a.outcomes, a.health = all, Health{Problem: text}
	a.mu.Unlock()
	a.opts.Changed()
}

// since adds the counters of an earlier process.
func (o Outcome) since(before Outcome) Outcome {
	o.Ups += before.Ups
	o.Failures += before.Failures
	o.Sent += before.Sent
	o.Received += before.Received
	if o.LastDown == nil {
		o.LastDown = before.LastDown
	}
	return o
}

// sameAs compares all but the counters of packets.
func (o Outcome) sameAs(other Outcome) bool {
	o.Sent, o.Received = other.Sent, other.Received
	return reflect.DeepEqual(o, other)
}
