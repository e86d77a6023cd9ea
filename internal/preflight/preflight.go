// Package preflight looks now and then at what keeps a node from delivering, and tells of it. What
// to look for is decided by those who use it.
package preflight

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

const (
	// every is how often to look: an administrator who mends something waits no longer for an answer.
	every = 10 * time.Second
	// Repeat is how often to tell of what stays: Events are gone after an hour.
	Repeat = 30 * time.Minute
	// lookTimeout bounds one look, whatever commands it runs.
	lookTimeout = 20 * time.Second
)

var errTooLong = errors.New("looking at the node took longer than " + lookTimeout.String())

// Options are what a Preflight works with.
type Options struct {
	Log *slog.Logger
	Now func() time.Time
	// Look returns what it finds; known is false while it cannot tell, and what was found stays. Its
	// context ends after a while, or when the actor does.
	Look func(context.Context) (found []lb.Finding, known bool)
	// Tell says that something was found, or still is, or with gone that it is no longer. It must not
	// block.
	Tell func(f lb.Finding, gone bool)
	// Brief are the reasons that come and go within seconds: what has one is told, and logged, once two looks in
	// a row have found it.
	Brief []lb.Reason
}

// Preflight is an actor that looks and tells.
type Preflight struct {
	opts   Options
	runner *loop.Runner

	mu    sync.Mutex
	found []lb.Finding

	told map[key]told // belongs to the step
}

// key is what stays of a finding while its message changes, as pods and nodes come and go.
type key struct {
	reason  lb.Reason
	subject string
	note    bool
}

func keyOf(f lb.Finding) key { return key{f.Reason, f.Subject, f.Note} }

// told is a finding as it was told, and when.
type told struct {
	finding lb.Finding
	at      time.Time
}

// New returns an actor that looks at nothing before Run.
func New(opts Options) *Preflight {
	p := &Preflight{opts: opts, told: map[key]told{}}
	p.runner = loop.New(p.step, loop.Options{})
	return p
}

// Run looks until ctx ends.
func (p *Preflight) Run(ctx context.Context) error {
	p.runner.Poke()
	return p.runner.Run(ctx)
}

// Busy returns for how long a look has been under way.
func (p *Preflight) Busy() time.Duration { return p.runner.Busy() }

// Found returns what the last look has found.
func (p *Preflight) Found() []lb.Finding {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.found)
}

func (p *Preflight) step(ctx context.Context) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lookTimeout, errTooLong)
	defer cancel()
	found, known := p.opts.Look(ctx)
	if !known {
		return time.Second, nil
	}
	now := p.opts.Now()
	for k, t := range p.told {
		if f := t.finding; !slices.ContainsFunc(found, func(f lb.Finding) bool { return keyOf(f) == k }) {
			p.opts.Log.Info("no longer found on this node", "reason", f.Reason, "message", f.Message)
			p.opts.Tell(f, true)
			delete(p.told, k)
		}
	}
	for _, f := range found {
		last, before := p.told[keyOf(f)]
		if before && now.Sub(last.at) < Repeat {
			continue
		}
		if !before && slices.Contains(p.opts.Brief, f.Reason) &&
			!slices.ContainsFunc(p.found, func(last lb.Finding) bool { return keyOf(last) == keyOf(f) }) {
			continue
		}
		if !before {
			p.opts.Log.Warn("found on this node", "reason", f.Reason, "message", f.Message)
		} else if last.finding.Message != f.Message {
			p.opts.Tell(last.finding, true) // who reads the Events takes each message for a finding of its own
		}
		p.told[keyOf(f)] = told{f, now}
		p.opts.Tell(f, false)
	}
	p.mu.Lock()
	p.found = found
	p.mu.Unlock()
	return every, nil
}
