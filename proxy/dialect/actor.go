package dialect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Sync is what one round of writing did, for metrics.
type Sync struct {
	Stats
	Duration time.Duration
	// Rules is how many rules of ours each table holds, of both families.
	Rules map[string]int
	Err   error
}

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	// Rules returns the rules of a family; nil for a family that this node lacks. The rules note in
	// the ledger which Services the kernel has, and which it refuses.
	Rules func(lb.Family, *Ledger) Rules
	// Unusable says why this node lacks a family; may be nil.
	Unusable map[lb.Family]error
	// Verify is how often the actor reads the kernel's rules without a sign of a change; 0 for never.
	// It reads large rulesets less often.
	Verify time.Duration
	// Watch calls disturbed after others have changed our rules, until ctx ends; may be nil.
	Watch func(ctx context.Context, disturbed func()) error
	// Changed is called when there are outcomes to collect; it must not block.
	Changed func()
	// Observe is told of each round; may be nil.
	Observe func(Sync)
}

// Reading a large ruleset takes seconds. Verification takes one part in verifyShare of a core; when
// somebody goes on changing our rules, one part in pauseShare, as there would be no time to write
// otherwise.
const (
	verifyShare = 50
	pauseShare  = 5
	minPause    = 200 * time.Millisecond
)

// Actor keeps the kernel's rules as wanted.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	wanted actor.Inbox[lb.Key, plan.Service]
	// disturbed is set when others have changed our rules.
	disturbed atomic.Bool

	mu       sync.Mutex
	config   *plan.Config
	loads    map[lb.Key]plan.Load // that have come since the last round
	tried    bool
	outcomes map[lb.Key]plan.Outcome

	// The rest belongs to the goroutine that runs Apply.
	families []*family
	failures loop.Failures
	read     time.Time     // when the kernel's rules were last read
	interval time.Duration // until they are read again; 0 for never
	pause    time.Duration // until they may be read again because they were changed
}

var _ actor.Updater[lb.Key, plan.Service] = (*Actor)(nil)

// New returns an Actor that writes nothing before Configure and Begin are called.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps, outcomes: map[lb.Key]plan.Outcome{}}
	a.runner = loop.New(a.step, loop.Options{})
	for _, name := range []lb.Family{lb.IPv4, lb.IPv6} {
		a.families = append(a.families, newFamily(name, deps.Rules, deps.Unusable[name], a.collect))
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

// Begin says what is wanted for all Services. The rules that a predecessor left for others are
// removed. It never blocks.
func (a *Actor) Begin(all map[lb.Key]plan.Service) {
	a.wanted.Begin(all)
	a.runner.Poke()
}

// Update says what is wanted now for the Services that it names; a plan without ports removes a
// Service. It never blocks.
func (a *Actor) Update(changes map[lb.Key]plan.Service) {
	a.wanted.Update(changes)
	a.runner.Poke()
}

// Weigh says what is known of the connections of some Services, for rules that choose by it. It never
// blocks.
func (a *Actor) Weigh(loads map[lb.Key]plan.Load) {
	a.mu.Lock()
	if a.loads == nil {
		a.loads = map[lb.Key]plan.Load{}
	}
	maps.Copy(a.loads, loads)
	a.mu.Unlock()
	a.runner.Poke()
}

// Outcomes returns what has become known since the last call. all reports whether every Service of
// Begin has been tried: from then on, a Service without an outcome is not in the kernel.
func (a *Actor) Outcomes() (outcomes map[lb.Key]plan.Outcome, all bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	outcomes = a.outcomes
	a.outcomes = map[lb.Key]plan.Outcome{}
	return outcomes, a.tried
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run applies until ctx ends. The rules stay in the kernel then.
func (a *Actor) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.runner.Run(ctx) })
	if a.deps.Watch != nil {
		group.Go(func() error { return a.deps.Watch(ctx, a.disturb) })
	}
	return group.Wait()
}

func (a *Actor) disturb() {
	a.disturbed.Store(true)
	a.runner.Poke()
}

func (a *Actor) step(ctx context.Context) (time.Duration, error) {
	started := time.Now()
	verify, again := a.due(started)
	if verify {
		a.disturbed.Store(false)
	}
	r, ok := a.apply(ctx, verify, false)
	if !ok || ctx.Err() != nil {
		return 0, nil
	}
	st, err := r.stats, r.err
	took := time.Since(started)
	if verify && err != nil {
		a.disturbed.Store(true)
	}
	if verify || st.Verified {
		a.read, a.pause = started, max(minPause, pauseShare*took)
		if a.deps.Verify > 0 {
			a.interval = max(a.deps.Verify, verifyShare*took)
		}
		again = a.interval
	}
	a.report(st, errors.Join(err, r.own), took)
	switch {
	case r.unfinished && err == nil: // else the runner waits before it tries again
		a.runner.Poke() // what has come in meanwhile goes first
	case !r.next.IsZero():
		if wait := max(time.Until(r.next), time.Millisecond); again == 0 || wait < again {
			again = wait
		}
	}
	return again, err
}

// due reports whether the kernel's rules have to be read now, or else how long to wait for that; 0
// for ever.
func (a *Actor) due(now time.Time) (verify bool, again time.Duration) {
	if a.read.IsZero() {
		return false, 0 // they are read in any case
	}
	wait := a.interval
	if a.disturbed.Load() && (wait == 0 || a.pause < wait) {
		wait = a.pause
	}
	if wait == 0 {
		return false, 0
	}
	wait -= now.Sub(a.read)
	return wait <= 0, max(wait, time.Millisecond)
}

// Apply writes what is pending without a goroutine; Run must not be called beside it. It tries all
// that has failed, and does rounds until no Service has parts left to write.
func (a *Actor) Apply(ctx context.Context, verify bool) (Stats, error) {
	var total Stats
	for {
		r, _ := a.apply(ctx, verify, true)
		total.add(r.stats)
		if !r.unfinished || r.err != nil || ctx.Err() != nil {
			return total, errors.Join(r.err, r.own)
		}
		verify = false
	}
}

// round is what one round has done.
type round struct {
	stats Stats
	// err is a failure for which no Service is to blame, own are those of Services, and next is when
	// the first of those is due again.
	err, own error
	next     time.Time
	// unfinished is set when there are Services of which only a part is written.
	unfinished bool
}

// apply hands what is pending to both families, syncs them, and collects their outcomes. A family
// that fails does not hold back the other. With all, Services that have failed do not wait for
// their next try. ok is false before Configure and Begin were called.
func (a *Actor) apply(ctx context.Context, verify, all bool) (r round, ok bool) {
	a.mu.Lock()
	config := a.config
	a.mu.Unlock()
	if config == nil {
		return r, false
	}
	changes, ok := a.wanted.Take()
	if !ok {
		return r, false
	}
	a.mu.Lock()
	loads := a.loads
	a.loads = nil
	a.mu.Unlock()
	order := slices.SortedFunc(maps.Keys(changes), func(a, b lb.Key) int {
		return cmp.Or(changes[a].Age.Compare(changes[b].Age), a.Compare(b))
	})
	var errs, own []error
	for _, f := range a.families {
		f.Stats, f.now, f.all = Stats{}, time.Now(), all
		f.configure(*config)
		for _, key := range order { // so that what they are numbered by is the same after each start
			f.want(key, changes[key])
		}
		f.weigh(loads)
		if err := f.sync(ctx, verify); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.name, err))
		}
		next, err := f.failing()
		if err != nil {
			own = append(own, fmt.Errorf("%s: %w", f.name, err))
		}
		if !next.IsZero() && (r.next.IsZero() || next.Before(r.next)) {
			r.next = next
		}
		r.unfinished = r.unfinished || len(f.unfinished) > 0
		r.stats.add(f.Stats)
	}
	a.collect()
	r.err, r.own = errors.Join(errs...), errors.Join(own...)
	return r, true
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
	changed := len(keys) > 0 || tried && !a.tried
	a.tried = tried
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
		held, failed := f.outcome(key)
		if len(held.Ports) > 0 {
			ports := o.Applied.Ports
			if o.Applied = held; len(ports) > 0 { // else they are shared with what is kept
				o.Applied.Ports = slices.Concat(ports, held.Ports)
			}
		}
		if failed.err != nil {
			errs = append(errs, failed.err)
		}
		if failed.alone {
			o.Alone = append(o.Alone, f.name)
		}
	}
	o.Err = errors.Join(errs...)
	return o
}

// report logs changes, and tells the observer of each round.
func (a *Actor) report(st Stats, err error, took time.Duration) {
	a.failures.Log(a.deps.Log, "the kernel's rules differ from the desired ones; trying again",
		"the kernel's rules are the desired ones again", err)
	switch {
	case err != nil:
	case st.Repaired > 0:
		a.deps.Log.Warn("another process had changed our rules; repaired them", "changes", st.Repaired, "took", took)
	case st.Changes > 0:
		a.deps.Log.Debug("wrote rules", "changes", st.Changes, "transactions", st.Transactions, "took", took)
	}
	if a.deps.Observe == nil {
		return
	}
	rules := map[string]int{}
	for _, f := range a.families {
		if f.rules != nil {
			for table, n := range f.rules.Size() {
				rules[table] += n
			}
		}
	}
	st.Verified = st.Verified && err == nil
	a.deps.Observe(Sync{Stats: st, Duration: took, Rules: rules, Err: err})
}
