package bfd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"
)

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

// processors is how many threads of the process run Go at once: that of the sessions, which keeps its own, and one for
// all else.
const processors = 2

// ProcessMain must be the first thing that a program with a Process does. In the process that keeps
// the sessions it does not return, else it does so at once.
func ProcessMain() {
	if os.Getenv(processMark) == "" {
		return
	}
	// A signal to the whole group of processes is for the program, which then takes the sessions down
	// in its own time.
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	runtime.GOMAXPROCS(processors)
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
		return nil // no sessions are wanted
	}
	changed := make(chan struct{}, 1)
	teller := teller{encoder: json.NewEncoder(out)}
	w := newWorker(workerOptions{
		Options: Options{
			Normal: first.Normal,
			Changed: func() {
				select {
				case changed <- struct{}{}:
				default:
				}
			},
		},
		open: func() (wire, error) {
			k, err := newKernel()
			if err == nil {
				k.keepsProcessor = true
			}
			return k, err
		},
		note: func(c change) { teller.tell(answer{Change: &c}) },
	})
	w.Set(first.desired())
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		for {
			var next order
			if orders.Decode(&next) != nil {
				time.Sleep(linger)
				return
			}
			w.Set(next.desired())
		}
	}()
	ran := make(chan error, 1)
	go func() { ran <- w.Run(ctx) }()
	return report(w, changed, ran, teller.tell)
}

// report tells what is so, each time that it has changed and for the counters, until the worker has ended. While its
// engine hangs it tells nothing, by which the program knows.
func report(w *worker, changed <-chan struct{}, ran <-chan error, tell func(answer)) error {
	ticker := time.NewTicker(counting)
	defer ticker.Stop()
	for {
		select {
		case err := <-ran:
			return err
		case <-changed:
		case <-ticker.C:
		}
		if w.busy() < stuckAfter {
			tell(all(w))
		}
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
func all(w *worker) answer {
	health := w.Health()
	said := answer{Health: &health}
	for key, o := range w.Outcomes() {
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
	_ = t.encoder.Encode(a) // without a reader there are no orders either
}
