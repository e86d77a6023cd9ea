// Package loop runs one step again and again: when poked, when the step asks for it, and after
// failures.
//
// The first poke fires at once; pokes that come while a step runs or within the minimum gap are
// folded into one. A step that fails is repeated with exponential backoff, sooner when poked.
// PokeNow is for what must not wait for a gap.
package loop

import (
	"context"
	"time"
)

// Step does all that is due. A positive again asks for another run after that time even without a
// poke. An error is retried with backoff; the step itself reports it.
type Step func(ctx context.Context) (again time.Duration, err error)

// Options are the times of a Runner; zero values take the defaults.
type Options struct {
	Gap time.Duration // least time between the starts of two runs that pokes cause; default none
	// Rest is how many times as long as a run took the runner waits before the next, up to MaxRest: so
	// runs that cost much fold more pokes. The first run after a calm begins at once.
	Rest    int
	MaxRest time.Duration
	// Every is the time between runs while pokes do not end, and Burst how many may come sooner, at least
	// one: a change and what follows from it are done at once, and changes that do not end are folded.
	// Regain is how long until one more may come sooner; 0 for a quarter of Every. See Allowance. 0 for no
	// limit.
	Every      time.Duration
	Burst      int
	Regain     time.Duration
	MinBackoff time.Duration // wait after the first failure; default 100 ms
	MaxBackoff time.Duration // longest wait after failures; default 10 s
}

// Runner calls a step from one goroutine.
type Runner struct {
	step Step
	opts Options
	poke chan struct{}
	now  chan struct{}

	pulse Pulse
}

// New returns a Runner for step. Nothing runs before Run is called; pokes until then are kept.
func New(step Step, opts Options) *Runner {
	if opts.MinBackoff == 0 {
		opts.MinBackoff = 100 * time.Millisecond
	}
	if opts.MaxBackoff == 0 {
		opts.MaxBackoff = 10 * time.Second
	}
	return &Runner{step: step, opts: opts, poke: make(chan struct{}, 1), now: make(chan struct{}, 1)}
}

// Poke asks for a run. It never blocks.
func (r *Runner) Poke() { poke(r.poke) }

// PokeNow asks for a run that waits for the present one only. It never blocks.
func (r *Runner) PokeNow() { poke(r.now) }

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// taken takes the poke that the next run will have heeded, if there is one.
func taken(c chan struct{}) {
	select {
	case <-c:
	default:
	}
}

// Busy returns how long ago the present step began, or came further; 0 between steps.
func (r *Runner) Busy() time.Duration { return r.pulse.Busy() }

// Run runs the step as asked until ctx ends, and returns nil then. It does not run the step before
// the first poke.
func (r *Runner) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	timer.Stop()
	defer timer.Stop()
	followed := context.WithValue(ctx, pulseKey{}, &r.pulse)
	backoff := Backoff{Min: r.opts.MinBackoff, Max: r.opts.MaxBackoff}
	allowance := Allowance{Every: r.opts.Every, Burst: r.opts.Burst, Regain: r.opts.Regain}
	var rested time.Time // when a run may begin that need not begin at once
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.now:
		case <-r.poke:
			r.pause(ctx, time.Until(rested))
		case <-timer.C:
			r.pause(ctx, time.Until(rested))
		}
		if ctx.Err() != nil {
			return nil
		}
		timer.Stop()
		taken(r.poke)
		taken(r.now)
		started := time.Now()
		end := r.pulse.Begin()
		again, err := r.step(followed)
		end()
		if err != nil {
			again = backoff.Next()
		} else {
			backoff.Reset()
		}
		if again > 0 {
			timer.Reset(again)
		}
		// Most pokes come after the rest, so only one that comes sooner sets a timer for it: to wake up for
		// its end costs more than many a run. An allowance is used up when pokes keep coming, and while it
		// is waited for here they do not wake the goroutine.
		rested = time.Now().Add(r.opts.rest(time.Since(started)))
		r.pause(ctx, allowance.Wait(time.Now()))
	}
}

// Bulk returns the options of a loop whose runs cost something for everything that there is. While
// much changes, one thing after the other, it rests for most of the time, and each run takes in more.
func Bulk() Options { return Options{Rest: 20, MaxRest: 25 * time.Millisecond} }

// rest returns how long to wait after a run that took so long.
func (o Options) rest(took time.Duration) time.Duration {
	return max(o.Gap-took, min(time.Duration(o.Rest)*took, o.MaxRest))
}

// pause waits, until there is something that must not.
func (r *Runner) pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-r.now:
		r.PokeNow()
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
