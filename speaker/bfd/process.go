package bfd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"reflect"
	"sync"
	"syscall"
	"time"
)

// Process keeps sessions in a process of its own: the same program, started anew; see ProcessMain.
//
// However high the priority of a thread, it waits for the others of its process: for a place to run
// Go, and whenever the garbage collector stops the world, for the slowest normal thread of a busy
// node. docs/bfd.md has what that does to sessions of 50 ms × 3. The process ends when this one
// does, whichever way, and takes the sessions down administratively then.
type Process struct {
	opts  Options
	start func(*exec.Cmd) error
	poked chan struct{} // desired has changed

	mu       sync.Mutex
	desired  map[Key]Profile
	outcomes map[Key]Outcome
	health   Health
	before   map[Key]Outcome // the last of each session under earlier processes: their counters are not lost
}

// order is what the process is told: all sessions that shall be. What else it says counts in the
// first only.
type order struct {
	Normal   bool
	Sessions []ordered
}

type ordered struct {
	Key     Key
	Profile Profile
}

// answer is what it tells: something for the log, or all that is so.
type answer struct {
	Change   *change
	Outcomes []answered
	Health   *Health
}

type answered struct {
	Key     Key
	Outcome Outcome
}

const (
	processMark = "LANDFALL_BFD_PROCESS" // set in the environment of the process
	counting    = 5 * time.Second        // between reports without a change, for the counters
	patience    = 3 * time.Second        // with a process that shall end
	// linger is for how long the process keeps the sessions after its program has ended, or has let go
	// of it. The BGP sessions that they watch end before, at a crash at the same moment, and a router
	// must hear of those first: one that is told by BFD, even of an administrative end, drops the
	// routes that it would keep for the program's next start (seen of FRR 8.4).
	linger     = 500 * time.Millisecond
	minBackoff = 100 * time.Millisecond // between attempts to start it
	maxBackoff = 5 * time.Second
)

// NewProcess returns a Process without sessions. The program must call ProcessMain.
func NewProcess(opts Options) *Process {
	opts = New(opts).opts // the defaults
	return &Process{opts: opts, start: (*exec.Cmd).Start, poked: make(chan struct{}, 1), before: map[Key]Outcome{}}
}

// Set is that of Actor.
func (p *Process) Set(sessions map[Key]Profile) {
	p.mu.Lock()
	same := maps.Equal(p.desired, sessions)
	p.desired = sessions
	p.mu.Unlock()
	if same {
		return
	}
	select {
	case p.poked <- struct{}{}:
	default:
	}
}

// Outcomes is that of Actor. Do not change what is returned. Counters may be a few seconds old.
func (p *Process) Outcomes() map[Key]Outcome {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.outcomes // a new map is made for each change
}

// Health is that of Actor.
func (p *Process) Health() Health {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.health
}

// Run is that of Actor. It starts the process with the first session, and again when it ends before
// ctx does.
func (p *Process) Run(ctx context.Context) error {
	if os.Getenv(processMark) != "" {
		return errors.New(
			"bfd: this is the process for the sessions, which the program has not turned into: it must call ProcessMain")
	}
	if !p.asked(ctx) {
		return nil
	}
	backoff := minBackoff
	for ctx.Err() == nil {
		began := time.Now()
		err := p.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > time.Minute {
			backoff = minBackoff
		}
		p.bereaved(err)
		select {
		case <-ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
	return nil
}

// asked waits for the first session, and tells whether it came before the end of ctx.
func (p *Process) asked(ctx context.Context) bool {
	for {
		p.mu.Lock()
		n := len(p.desired)
		p.mu.Unlock()
		if n > 0 {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-p.poked:
		}
	}
}

// serve runs the process once, and returns why it ended.
func (p *Process) serve(ctx context.Context) error {
	cmd := processCommand()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.start(cmd); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	ended := make(chan struct{})
	var ordering sync.WaitGroup
	ordering.Go(func() { p.order(ctx, stdin, cmd.Process, ended) })
	err = p.listen(stdout)
	close(ended)
	ordering.Wait()
	return errors.Join(err, cmd.Wait())
}

// processCommand is this program, as the process that keeps the sessions.
func processCommand() *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"landfall-bfd"} // what ps shows
	cmd.Env = append(os.Environ(), processMark+"=1")
	cmd.Stderr = os.Stderr
	return cmd
}

// order tells the process what shall be until it has ended. At the end of ctx it lets go of it, and
// makes sure that it goes.
func (p *Process) order(ctx context.Context, stdin io.WriteCloser, process *os.Process, ended <-chan struct{}) {
	defer stdin.Close()
	encoder := json.NewEncoder(stdin)
	for {
		p.mu.Lock()
		o := order{Normal: p.opts.Normal, Sessions: make([]ordered, 0, len(p.desired))}
		for key, profile := range p.desired {
			o.Sessions = append(o.Sessions, ordered{key, profile})
		}
		p.mu.Unlock()
		if encoder.Encode(o) != nil { // it is about to end
			<-ended
			return
		}
		select {
		case <-p.poked:
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

// listen takes what the process tells until it has ended.
func (p *Process) listen(stdout io.Reader) error {
	for decoder := json.NewDecoder(stdout); ; {
		var a answer
		switch err := decoder.Decode(&a); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("listen: %w", err)
		}
		if a.Change != nil {
			a.Change.log(p.opts.Log)
		}
		if a.Health != nil {
			p.take(a)
		}
	}
}

// take makes what the process told the outcome.
func (p *Process) take(a answer) {
	all := make(map[Key]Outcome, len(a.Outcomes))
	p.mu.Lock()
	changed := len(a.Outcomes) != len(p.outcomes)
	for _, o := range a.Outcomes {
		all[o.Key] = o.Outcome.since(p.before[o.Key])
		changed = changed || !all[o.Key].sameAs(p.outcomes[o.Key])
	}
	problem := a.Health.Problem
	worse := problem != "" && problem != p.health.Problem
	p.outcomes, p.health = all, *a.Health
	p.mu.Unlock()
	if worse {
		p.opts.Log.Warn("BFD may see or cause false failures while the node is busy", "reason", problem)
	}
	if changed {
		p.opts.Changed()
	}
}

// bereaved shows that nobody keeps the sessions. It is no failure of a path, which nobody watches
// now.
func (p *Process) bereaved(cause error) {
	text := "the process that keeps the sessions ended"
	if cause != nil {
		text += ": " + cause.Error()
	}
	p.opts.Log.Error("BFD sessions are not kept", "reason", text)
	p.mu.Lock()
	all := make(map[Key]Outcome, len(p.outcomes))
	for key, o := range p.outcomes {
		if o.State == Up {
			o.Since = p.opts.now()
			o.LastDown = &Loss{At: o.Since, Diagnostic: AdministrativelyDown, Administrative: true}
		}
		if o.Refused == nil {
			o.State, o.RemoteState, o.Problem = Down, Down, text
		}
		all[key], p.before[key] = o, o
	}
	p.outcomes, p.health = all, Health{Problem: text}
	p.mu.Unlock()
	p.opts.Changed()
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

// ProcessMain must be the first thing that a program with a Process does. In the process that keeps
// the sessions it does not return, else it does so at once.
func ProcessMain() {
	if os.Getenv(processMark) == "" {
		return
	}
	// Whoever interrupts a group of processes means the program, which then takes the sessions down in
	// its own time.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	if err := keepFor(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// keepFor keeps the sessions that it reads of until there is no more to read.
func keepFor(in io.Reader, out io.Writer) error {
	orders := json.NewDecoder(in)
	var first order
	if orders.Decode(&first) != nil {
		return nil // nobody wants any
	}
	changed := make(chan struct{}, 1)
	teller := teller{encoder: json.NewEncoder(out)}
	a := New(Options{
		Normal: first.Normal,
		Changed: func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		},
		raise: raiseProcess,
		note:  func(c change) { teller.tell(answer{Change: &c}) },
	})
	a.Set(first.desired())
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		for {
			var next order
			if orders.Decode(&next) != nil {
				time.Sleep(linger)
				return
			}
			a.Set(next.desired())
		}
	}()
	ran := make(chan error, 1)
	go func() { ran <- a.Run(ctx) }()
	ticker := time.NewTicker(counting)
	defer ticker.Stop()
	for {
		select {
		case err := <-ran:
			return err
		case <-changed:
		case <-ticker.C:
		}
		teller.tell(all(a))
	}
}

func (o order) desired() map[Key]Profile {
	desired := make(map[Key]Profile, len(o.Sessions))
	for _, s := range o.Sessions {
		desired[s.Key] = s.Profile
	}
	return desired
}

// all returns what is so.
func all(a *Actor) answer {
	health := a.Health()
	said := answer{Health: &health}
	for key, o := range a.Outcomes() {
		said.Outcomes = append(said.Outcomes, answered{key, o})
	}
	return said
}

// teller writes answers of several goroutines.
type teller struct {
	mu      sync.Mutex
	encoder *json.Encoder
}

func (t *teller) tell(a answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.encoder.Encode(a) // if nobody listens any more, nobody orders either
}
