package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Sync is what one round of writing did, for metrics and logs.
type Sync struct {
	Duration time.Duration
	// Lines were handed to iptables-restore; 0 means that nothing was written.
	Lines int
	// Failures counts calls of iptables-restore that failed, Partial those among them that named only
	// what had changed.
	Failures, Partial int
	// Rules is how many rules of ours each table holds, of both families.
	Rules map[string]int
	// Verified is set when the rules were compared with the kernel's.
	Verified bool
	Err      error
}

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	// Kernels are the families that this node has, Unusable says why it lacks the others.
	Kernels  map[lb.Family]Kernel
	Unusable map[lb.Family]error
	// Batch is how many Services one call of iptables-restore writes at most; 0 for any number.
	Batch int
	// Verify is how often the rules are compared with the kernel's.
	Verify time.Duration
	// Watcher tells of changes that others make; may be nil.
	Watcher *Watcher
	// Changed is called when there are outcomes to collect; it must not block.
	Changed func()
	// Observe is told of each round; may be nil.
	Observe func(Sync)
}

// verifyShare keeps verification to one part in so many of a core, as reading a large ruleset takes
// seconds.
const verifyShare = 50

// The same when somebody goes on changing our rules: reading them over and over would leave no time
// to write.
const (
	minPause   = 200 * time.Millisecond
	pauseShare = 5
)

// Actor keeps the kernel's rules as wanted.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	// disturbed is set when others have changed our rules.
	disturbed atomic.Bool

	mu       sync.Mutex
	config   *plan.Config
	named    bool // Set has been called
	synced   bool
	pending  map[lb.Key]plan.Service
	outcomes map[lb.Key]plan.Outcome

	// The rest belongs to the goroutine that runs apply.
	families []*family
	read     time.Time     // when the kernel's rules were last read
	interval time.Duration // until they are read again
	pause    time.Duration // until they may be read again because they were changed
	said     string        // the last error that was logged
}

// New returns an Actor that writes nothing before Configure and Set are called.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, pending: map[lb.Key]plan.Service{}, outcomes: map[lb.Key]plan.Outcome{}}
	a.runner = loop.New(a.step, loop.Options{})
	for _, name := range []lb.Family{lb.IPv4, lb.IPv6} {
		f := newFamily(name, deps.Kernels[name])
		f.batch = deps.Batch
		if f.kernel == nil {
			f.unusable = deps.Unusable[name]
			if f.unusable == nil {
				f.unusable = fmt.Errorf("this node has no %s", name)
			}
		}
		a.families = append(a.families, f)
	}
	return a
}

// Configure sets what all rules depend on. It never blocks.
func (a *Actor) Configure(config plan.Config) {
	a.mu.Lock()
	a.config = &config
	a.mu.Unlock()
	a.runner.Poke()
}

// Set says what is wanted for the Services that it names; a plan without ports removes a Service.
// The first call has to name them all, as what a predecessor left for others is removed then. It
// never blocks.
func (a *Actor) Set(services map[lb.Key]plan.Service) {
	a.mu.Lock()
	a.named = true
	maps.Copy(a.pending, services)
	a.mu.Unlock()
	a.runner.Poke()
}

// Outcomes returns what has become known since the last call.
func (a *Actor) Outcomes() map[lb.Key]plan.Outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	outcomes := a.outcomes
	a.outcomes = map[lb.Key]plan.Outcome{}
	return outcomes
}

// Synced tells whether every Service of the first Set has been tried: from then on, what has no
// outcome is not in the kernel.
func (a *Actor) Synced() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.synced
}

// Run applies until ctx ends. The rules stay in the kernel then.
func (a *Actor) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.runner.Run(ctx) })
	if a.deps.Watcher != nil {
		group.Go(func() error {
			return a.deps.Watcher.run(ctx, func() {
				a.disturbed.Store(true)
				a.runner.Poke()
			})
		})
	}
	return group.Wait()
}

func (a *Actor) step(ctx context.Context) (time.Duration, error) {
	if !a.take() {
		return 0, nil
	}
	started := time.Now()
	verify, again := a.due(started)
	if verify {
		a.disturbed.Store(false)
	}
	st, err := a.apply(ctx, verify)
	if ctx.Err() != nil {
		return 0, nil
	}
	took := time.Since(started)
	if verify || a.read.IsZero() {
		a.read, a.interval, a.pause = started, max(a.deps.Verify, verifyShare*took), max(minPause, pauseShare*took)
		again = a.interval
	}
	a.report(st, err, took)
	return again, err
}

// due tells whether the kernel's rules have to be read now, or else how long to wait for that.
func (a *Actor) due(now time.Time) (bool, time.Duration) {
	if a.read.IsZero() {
		return false, 0 // they are read in any case
	}
	wait := a.interval
	if a.disturbed.Load() {
		wait = min(a.interval, a.pause)
	}
	wait -= now.Sub(a.read)
	return wait <= 0, max(wait, time.Millisecond)
}

// take hands what is pending to the families. It returns false while it is not known what is
// wanted.
func (a *Actor) take() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config == nil || !a.named {
		return false
	}
	for _, f := range a.families {
		f.configure(*a.config)
		for key, s := range a.pending {
			f.set(key, s)
		}
	}
	a.pending = map[lb.Key]plan.Service{}
	return true
}

// apply syncs both families and collects their outcomes. A family that fails does not hold back the
// other.
func (a *Actor) apply(ctx context.Context, verify bool) (stats, error) {
	var total stats
	var errs []error
	for _, f := range a.families {
		st, err := f.sync(ctx, verify)
		total.lines += st.lines
		total.failures += st.failures
		total.partial += st.partial
		total.repaired += st.repaired
		total.verified = total.verified || st.verified
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.family, err))
		}
	}
	a.collect()
	return total, errors.Join(errs...)
}

// collect publishes the outcomes of the Services for which something was reported.
func (a *Actor) collect() {
	keys := map[lb.Key]bool{}
	tried := true
	for _, f := range a.families {
		maps.Copy(keys, f.reported)
		f.reported = map[lb.Key]bool{}
		tried = tried && f.tried
	}
	a.mu.Lock()
	changed := len(keys) > 0 || tried && !a.synced
	a.synced = tried
	for key := range keys {
		a.outcomes[key] = a.outcome(key)
	}
	a.mu.Unlock()
	if changed {
		a.deps.Changed()
	}
}

func (a *Actor) outcome(key lb.Key) plan.Outcome {
	o := plan.Outcome{Applied: plan.Service{Key: key}}
	var errs []error
	for _, f := range a.families {
		if s, ok := f.held[key]; ok {
			ports := append(o.Applied.Ports, s.plan.Ports...)
			o.Applied = s.plan
			o.Applied.Ports = ports
		}
		errs = append(errs, f.failed[key])
		o.Alone = o.Alone || f.blamed[key]
	}
	o.Err = errors.Join(errs...)
	return o
}

// report tells the log of changes, and the observer of each round.
func (a *Actor) report(st stats, err error, took time.Duration) {
	saying := ""
	if err != nil {
		saying = err.Error()
	}
	switch {
	case err != nil && saying != a.said:
		a.deps.Log.Warn("iptables rules are not as they should be; trying again", "error", err)
	case err != nil:
	case a.said != "":
		a.deps.Log.Info("iptables rules are as they should be again")
	case st.repaired > 0:
		a.deps.Log.Warn("somebody had changed our iptables rules: repaired", "lines", st.repaired, "took", took)
	case st.lines > 0:
		a.deps.Log.Debug("wrote iptables rules", "lines", st.lines, "took", took)
	}
	a.said = saying
	if a.deps.Observe != nil {
		rules := map[string]int{}
		for _, f := range a.families {
			rules["nat"] += f.size.nat
			rules["filter"] += f.size.filter
		}
		a.deps.Observe(Sync{
			Duration: took, Lines: st.lines, Failures: st.failures, Partial: st.partial, Rules: rules, Verified: st.verified &&
				err == nil, Err: err,
		})
	}
}
