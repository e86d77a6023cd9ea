package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

const (
	// Passes are at least this far apart, so that a burst of new Services makes few passes.
	gap = 20 * time.Millisecond
	// Writes that are under way at a time.
	parallel = 16
	// Counts of pools are written at most this often; what a condition says is written at once.
	countEvery = 500 * time.Millisecond
	// A write that takes longer has failed.
	writeTimeout = 10 * time.Second
)

// table is what kube.Table offers.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Synced() bool
}

// statusWriter is what kube.Status offers.
type statusWriter interface {
	Hold(ctx context.Context, service lb.Service, h kube.Holding) error
	Pool(ctx context.Context, name string, status lb.PoolStatus) error
}

// reporter is what kube.Events offers.
type reporter interface {
	Normal(about kube.Reference, reason lb.Reason, message string)
	Warning(about kube.Reference, reason lb.Reason, message string)
}

// deps are what a controller works with.
type deps struct {
	config     plan.Config
	services   table[lb.Key, lb.Service]
	pools      table[string, lb.Pool]
	namespaces table[string, lb.Namespace]
	nodes      table[string, lb.Node]
	// catchUp returns once services shows all that was written before the call.
	catchUp func(ctx context.Context) error
	status  statusWriter
	events  reporter
	metrics *metrics
	log     *slog.Logger
	now     func() time.Time
}

// controller gives addresses to Services while it leads.
type controller struct {
	deps
	runner *loop.Runner

	mu sync.Mutex
	// changed are the Services that the table tells of since the last step, nil for one that does not lead; factsChanged is set by all that is no Service.
	changed      map[lb.Key]bool
	factsChanged bool

	// What follows belongs to the goroutine that leads, and begins empty with each time of leading.

	book *plan.Book
	// known is set once the book has all that the tables hold.
	known bool
	// again are the Services to look at anew, as a write failed.
	again map[lb.Key]bool
	// writes are those that the table does not show yet, or that failed.
	writes map[lb.Key]write
	// poolWrites are the last ones, by pool.
	poolWrites map[string]poolWrite
	counted    time.Time // when counts of pools were last written
}

// write is a write of ours to a Service's status.
type write struct {
	plan.Pending
	done    bool   // it took place for sure
	failure string // why it failed last
}

// poolWrite is a write of ours to a pool's status, and what the pool showed before.
type poolWrite struct {
	before, written lb.PoolStatus
}

func newController(d deps) *controller {
	c := &controller{deps: d}
	c.runner = loop.New(c.step, loop.Options{Gap: gap, MaxBackoff: 5 * time.Second})
	return c
}

// poke says that all of a kind are known now.
func (c *controller) poke() { c.runner.Poke() }

// serviceChanged says that a Service has changed.
func (c *controller) serviceChanged(key lb.Key) {
	c.mu.Lock()
	if c.changed != nil {
		c.changed[key] = true
	}
	c.mu.Unlock()
	c.runner.Poke()
}

// factChanged says that a pool, a namespace or a node has changed.
func (c *controller) factChanged(string) {
	c.mu.Lock()
	c.factsChanged = true
	c.mu.Unlock()
	c.runner.Poke()
}

// lead gives out addresses until ctx ends. It starts from what the API server holds now: an earlier leader may have written
// what the watches have not delivered yet, and to decide without it could give an address twice.
func (c *controller) lead(ctx context.Context) error {
	c.begin()
	defer c.remember(nil)
	c.log.Info("leading: catching up with the API server")
	if err := c.catchUp(ctx); err != nil {
		return ignoreEnd(ctx, err)
	}
	c.log.Info("leading: giving out addresses")
	defer c.metrics.forget()
	c.runner.Poke()
	return c.runner.Run(ctx)
}

// begin forgets what an earlier time of leading has left.
func (c *controller) begin() {
	c.remember(map[lb.Key]bool{})
	c.book, c.known, c.again = plan.NewBook(c.config), false, map[lb.Key]bool{}
	c.writes, c.poolWrites, c.counted = map[lb.Key]write{}, map[string]poolWrite{}, time.Time{}
}

// remember has changes noted in keys, or with nil forgotten.
func (c *controller) remember(keys map[lb.Key]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed = keys
}

// ignoreEnd returns nil for an error that comes from the end of ctx.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// step decides for all Services that a change concerns, and for all pools, and writes what differs.
func (c *controller) step(ctx context.Context) (again time.Duration, err error) {
	if !c.services.Synced() || !c.pools.Synced() || !c.namespaces.Synced() || !c.nodes.Synced() {
		return 0, nil // called again when they are
	}
	started := c.now()
	c.tell(started)
	p := c.book.Plan(started)
	c.metrics.planned(p.Pools, c.book.Summary(), c.now().Sub(started))
	err = c.writeServices(ctx, p)
	again, poolErr := c.writePools(ctx, p, c.pools.All())
	if next := c.book.Next(); !next.IsZero() {
		again = soonest(again, max(next.Sub(c.now()), time.Millisecond))
	}
	return again, ignoreEnd(ctx, errors.Join(err, poolErr))
}

// soonest returns the lesser of two waits, of which the first may be zero for none.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// tell tells the book of all that has changed since the last step.
func (c *controller) tell(now time.Time) {
	c.mu.Lock()
	keys, facts := c.changed, c.factsChanged
	c.changed, c.factsChanged = map[lb.Key]bool{}, false
	c.mu.Unlock()
	maps.Copy(keys, c.again)
	c.again = map[lb.Key]bool{}
	if facts || !c.known {
		c.book.SetPools(c.pools.All(), c.nodes.All())
		c.book.SetNamespaces(c.namespaces.All())
	}
	if !c.known {
		c.known = true
		for _, p := range c.pools.All() {
			c.book.Keep(p.Status.Released)
		}
		for key := range c.services.All() {
			keys[key] = true
		}
	}
	for key := range keys {
		s, ok := c.services.Get(key)
		w := c.writes[key]
		if !ok || !w.Covers(s) {
			delete(c.writes, key) // what is shown now is newer than the write
			w = write{}
		}
		if ok {
			c.book.Set(s, w.Pending, now)
		} else {
			c.book.Delete(key, now)
		}
	}
}

// change is a Service with what it shall show.
type change struct {
	service lb.Service
	holding kube.Holding
}

// changes returns what must be written, oldest Services first. A write is decided on the Service as the book knows it, also where the
// table has a newer one: it will then be refused, and decided anew.
func (c *controller) changes(p plan.Plan) []change {
	var changes []change
	for key, decision := range p.Services {
		s := c.book.Service(key)
		h := kube.Holding{Addresses: decision.Addresses, Mode: decision.Mode, Condition: decision.Condition}
		if w, ok := c.writes[key]; ok && w.done || !ok && h.Shows(s) {
			continue // a Service that was written is decided anew once the write is seen
		}
		changes = append(changes, change{s, h})
	}
	slices.SortFunc(changes, func(a, b change) int { return plan.Older(&a.service, &b.service) })
	return changes
}

// writeServices writes all changes, several at a time. All of them come from one plan, so their order does not matter for
// who holds what.
func (c *controller) writeServices(ctx context.Context, p plan.Plan) error {
	changes := c.changes(p)
	errs := make([]error, len(changes))
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, ch := range changes {
		// Noted before it is sent: whatever becomes of it, its addresses are not given to others until the Service is seen again.
		c.writes[ch.service.Key] = write{
			Pending: plan.Pending{UID: ch.service.UID, Version: ch.service.Version, Addresses: ch.holding.Addresses},
			failure: c.writes[ch.service.Key].failure,
		}
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, writeTimeout)
			defer cancel()
			errs[i] = c.status.Hold(ctx, ch.service, ch.holding)
			return nil
		})
	}
	_ = group.Wait() // no task returns an error
	var failed []error
	for i, ch := range changes {
		if err := c.wrote(ctx, ch, errs[i]); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// wrote takes note of how a write went, and tells of it if it changed something. The error is one to try again for.
func (c *controller) wrote(ctx context.Context, ch change, err error) error {
	key := ch.service.Key
	c.metrics.wrote("service", err)
	w := c.writes[key]
	defer func() {
		c.writes[key] = w
		if !w.done {
			c.again[key] = true
		}
	}()
	switch {
	case err == nil:
		w.done = true
		c.report(ch)
		return nil
	case kube.IsNotFound(err):
		w.done = true // nothing to do but wait until the watch shows it
		return nil
	case ctx.Err() != nil:
	case kube.IsConflict(err):
		c.log.Debug("the Service has changed meanwhile: deciding again", "service", key)
	case w.failure != err.Error():
		w.failure = err.Error()
		c.log.Warn("cannot write a Service's status, trying again", "service", key, "error", err)
	}
	return err
}

// report logs a change of decision and sends the Event.
func (c *controller) report(ch change) {
	about := kube.ServiceReference(ch.service)
	condition := ch.holding.Condition
	switch {
	case condition == nil:
		c.log.Info("the Service holds nothing of ours any more", "service", ch.service.Key)
	case condition.Status:
		c.log.Info("the Service has its address", "service", ch.service.Key, "address", condition.Message)
		c.events.Normal(about, condition.Reason, condition.Message)
	default:
		c.log.Warn("the Service lacks an address", "service", ch.service.Key, "reason", condition.Reason, "message", condition.Message)
		c.events.Warning(about, condition.Reason, condition.Message)
	}
}

// writePools writes the status of each pool that differs from what it shows. Counts that it is too early for are due again later.
func (c *controller) writePools(ctx context.Context, p plan.Plan, pools map[string]lb.Pool) (again time.Duration, err error) {
	maps.DeleteFunc(c.poolWrites, func(name string, w poolWrite) bool {
		// Once the pool shows something else than before the write, it shows the write or what came after.
		shown, ok := pools[name]
		return !ok || !reflect.DeepEqual(shown.Status, w.before)
	})
	early := countEvery - c.now().Sub(c.counted)
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(p.Pools)) {
		pool, status := pools[name], p.Pools[name].Status
		if shows(pool.Status, status) || reflect.DeepEqual(c.poolWrites[name].written, status) {
			continue
		}
		if early > 0 && showsConditions(pool.Status, status) {
			again = early
			continue
		}
		c.counted = c.now()
		err := c.writePool(ctx, name, status)
		c.metrics.wrote("pool", err)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		c.poolWrites[name] = poolWrite{before: pool.Status, written: status}
		c.reportPool(pool, status)
	}
	return again, errors.Join(failed...)
}

func (c *controller) writePool(ctx context.Context, name string, status lb.PoolStatus) error {
	writeCtx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	err := c.status.Pool(writeCtx, name, status)
	switch {
	case err == nil, kube.IsNotFound(err):
		return nil
	case ctx.Err() != nil, kube.IsConflict(err):
	default:
		c.log.Warn("cannot write a pool's status", "pool", name, "error", err)
	}
	return err
}

// reportPool tells when a pool begins or ceases to hand out addresses or to have any; counts are no news.
func (c *controller) reportPool(pool lb.Pool, status lb.PoolStatus) {
	about := kube.PoolReference(pool)
	for _, condition := range status.Conditions {
		i := slices.IndexFunc(pool.Status.Conditions, func(have lb.Condition) bool { return have.Type == condition.Type })
		before := i >= 0 && pool.Status.Conditions[i].Status
		switch ready := condition.Type == lb.ConditionReady; {
		case i >= 0 && before == condition.Status && pool.Status.Conditions[i].Message == condition.Message:
		case condition.Status != ready && ready, condition.Status && condition.Type == lb.ConditionExhausted:
			c.log.Warn("the pool hands out nothing new", "pool", pool.Name, "reason", condition.Reason, "message", condition.Message)
			c.events.Warning(about, condition.Reason, condition.Message)
		case ready, condition.Type == lb.ConditionExhausted && before:
			c.log.Info("the pool hands out addresses", "pool", pool.Name)
			c.events.Normal(about, condition.Reason, condition.Message)
		}
	}
}

// shows tells whether have is what want says.
func shows(have, want lb.PoolStatus) bool {
	return showsConditions(have, want) && have.AssignedIPv4 == want.AssignedIPv4 && have.AvailableIPv4 == want.AvailableIPv4 &&
		have.AssignedIPv6 == want.AssignedIPv6 && have.AvailableIPv6 == want.AvailableIPv6 &&
		slices.Equal(have.Released, want.Released)
}

// showsConditions does not look at conditions that want does not have: they are others'.
func showsConditions(have, want lb.PoolStatus) bool {
	return !slices.ContainsFunc(want.Conditions, func(c lb.Condition) bool { return !slices.Contains(have.Conditions, c) })
}

// ready returns a check that passes once the tables have been complete.
func ready(d deps) func() error {
	return func() error {
		switch {
		case !d.services.Synced():
			return errors.New("the Services are not known yet")
		case !d.pools.Synced():
			return errors.New("the IPAddressPools are not known yet")
		case !d.namespaces.Synced():
			return errors.New("the Namespaces are not known yet")
		case !d.nodes.Synced():
			return errors.New("the Nodes are not known yet")
		}
		return nil
	}
}
