package nftables

import (
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

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Sync is what one round of writing did, for metrics and logs.
type Sync struct {
	Duration time.Duration
	// Transactions and Operations (elements added and removed) are what was sent; 0 means that nothing
	// was.
	Transactions, Operations int
	// Failures counts transactions that the kernel refused.
	Failures int
	// Verified is set when what the kernel holds was read, Repaired counts what others had changed.
	Verified bool
	Repaired int
	Err      error
}

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	// Kernel is where the tables are.
	Kernel *Netlink
	// Unusable says why this node lacks a family; none if nil.
	Unusable map[lb.Family]error
	// Verify is how often what the kernel holds is read even if nobody is seen to change it; never if
	// 0.
	Verify time.Duration
	// Changed is called when there are outcomes to collect; it must not block.
	Changed func()
	// Observe is told of each round; may be nil.
	Observe func(Sync)
}

// Actor keeps the kernel's tables as wanted.
type Actor struct {
	deps   Deps
	runner *loop.Runner
	// disturbed is set when somebody else has changed our tables.
	disturbed atomic.Bool

	mu       sync.Mutex
	config   *plan.Config
	named    bool // Set has been called
	synced   bool
	pending  map[lb.Key]Service
	outcomes map[lb.Key]plan.Outcome

	// The rest belongs to the goroutine that runs apply.
	tables []*table
	read   time.Time // when the tables were last read
	said   string    // the last error that was logged
}

// New returns an Actor that writes nothing before Configure and Set are called.
func New(deps Deps) *Actor {
	kernels := map[lb.Family]kernel{}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if deps.Unusable[family] == nil {
			kernels[family] = netlinkKernel{family: family, socket: deps.Kernel.commands}
		}
	}
	return newActor(deps, kernels)
}

func newActor(deps Deps, kernels map[lb.Family]kernel) *Actor {
	a := &Actor{deps: deps, pending: map[lb.Key]Service{}, outcomes: map[lb.Key]plan.Outcome{}}
	a.runner = loop.New(a.step, loop.Options{})
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t := newTable(family, kernels[family])
		if t.kernel == nil {
			if t.unusable = deps.Unusable[family]; t.unusable == nil {
				t.unusable = fmt.Errorf("this node has no %s", family)
			}
		}
		a.tables = append(a.tables, t)
	}
	return a
}

// Configure sets what all rules depend on. It never blocks. Node ports are served at config's
// NodePortAddresses only: a family without an entry has none, see WithAddresses.
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
	all := make(map[lb.Key]Service, len(services))
	for key, s := range services {
		all[key] = Service{Service: s, AffinityTimeout: s.AffinityTimeout}
	}
	a.SetServices(all)
}

// SetServices is Set for Services of which more is known than their plans say.
func (a *Actor) SetServices(services map[lb.Key]Service) {
	a.mu.Lock()
	a.named = true
	if len(a.pending) == 0 && len(services) > 0 {
		a.pending = maps.Clone(services)
	} else {
		maps.Copy(a.pending, services)
	}
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

// Run applies until ctx ends. The tables stay in the kernel then.
func (a *Actor) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.runner.Run(ctx) })
	group.Go(func() error {
		return a.deps.Kernel.watch(ctx, a.deps.Log, func() {
			a.disturbed.Store(true)
			a.runner.Poke()
		})
	})
	return group.Wait()
}

func (a *Actor) step(ctx context.Context) (time.Duration, error) {
	if !a.take() {
		return 0, nil
	}
	started := time.Now()
	verify := a.disturbed.Swap(false) || a.deps.Verify > 0 && !a.read.IsZero() && started.Sub(a.read) >= a.deps.Verify
	st, err := a.apply(ctx, verify)
	if ctx.Err() != nil {
		return 0, nil
	}
	if verify && err != nil {
		a.disturbed.Store(true)
	}
	if st.verified {
		a.read = started
	}
	a.report(st, err, time.Since(started))
	return a.deps.Verify, err
}

// take hands what is pending to the tables. It returns false while it is not known what is wanted.
func (a *Actor) take() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config == nil || !a.named {
		return false
	}
	for _, t := range a.tables {
		t.configure(*a.config)
		for key, s := range a.pending {
			t.set(key, s)
		}
	}
	a.pending = map[lb.Key]Service{} // clearing a map costs what it once held, also later
	return true
}

// apply syncs both families and collects their outcomes. A family that fails does not hold back the
// other.
func (a *Actor) apply(ctx context.Context, verify bool) (stats, error) {
	var total stats
	var errs []error
	for _, t := range a.tables {
		st, err := t.sync(ctx, verify)
		total.transactions += st.transactions
		total.operations += st.operations
		total.failures += st.failures
		total.repaired += st.repaired
		total.verified = total.verified || st.verified
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", t.family, err))
		}
	}
	a.collect()
	return total, errors.Join(errs...)
}

// collect publishes the outcomes of the Services for which something was reported.
func (a *Actor) collect() {
	keys := map[lb.Key]bool{}
	tried := true
	for _, t := range a.tables {
		maps.Copy(keys, t.reported)
		t.reported = map[lb.Key]bool{}
		tried = tried && t.tried
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
	var failing, alone int
	for _, t := range a.tables {
		applied, f := t.outcome(key)
		if applied != nil {
			ports := o.Applied.Ports
			if o.Applied = *applied; len(ports) > 0 { // else they are shared with what is kept
				o.Applied.Ports = slices.Concat(ports, applied.Ports)
			}
		}
		if f.err != nil {
			errs = append(errs, f.err)
			failing++
		}
		if f.alone {
			alone++
		}
	}
	o.Err = errors.Join(errs...)
	o.Alone = failing > 0 && failing == alone
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
		a.deps.Log.Warn("nftables are not as they should be; trying again", "error", err)
	case err != nil:
	case a.said != "":
		a.deps.Log.Info("nftables are as they should be again")
	case st.repaired > 0:
		a.deps.Log.Warn("somebody had changed our nftables: repaired", "changes", st.repaired, "took", took)
	case st.operations > 0:
		a.deps.Log.Debug("wrote to nftables", "elements", st.operations, "transactions", st.transactions, "took", took)
	}
	a.said = saying
	if a.deps.Observe != nil {
		a.deps.Observe(Sync{
			Duration: took, Transactions: st.transactions, Operations: st.operations, Failures: st.failures,
			Repaired: st.repaired,
			Verified: st.verified && err == nil, Err: err,
		})
	}
}
