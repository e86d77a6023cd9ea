package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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
	// After so many passes that came sooner there is one in each interval: each pass that assigns addresses
	// writes the status of a pool, which every node hears of.
	interval = 100 * time.Millisecond
	passes   = 20
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
	Pool(ctx context.Context, pool lb.Pool, status lb.PoolStatus) (version string, err error)
	List(ctx context.Context, service lb.Service, listed lb.Listing) error
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
	// around has what speakers tell of the networks of their nodes, by node, under the name of the
	// ConfigMap.
	around table[string, map[string]string]
	// forgetAround removes what speakers have told of these nodes, which are gone.
	forgetAround func(ctx context.Context, nodes []string) error
	// sessions has the nodes in the status of each BGPPeer; forgetSessions removes some.
	sessions       table[string, []string]
	forgetSessions func(ctx context.Context, peer string, nodes []string) error
	// catchUp returns once services shows all that was written before the call.
	catchUp func(ctx context.Context) error
	status  statusWriter
	events  reporter
	metrics *metrics
	// trace takes spans; nil without --otlp-endpoint.
	trace func(lb.Span)
	log   *slog.Logger
	now   func() time.Time
	// parallel is how many writes are under way at a time.
	parallel int
	// identity differs from that of all other controllers.
	identity string
	// allocatedFrom has the pool of a Service written where MetalLB's users look for it.
	allocatedFrom bool
}

// controller gives addresses to Services while it leads.
type controller struct {
	deps
	runner *loop.Runner
	tidier *tidier
	lister *lister
	lanes  *loop.Lanes // of the writes of Services, by namespace
	ending loop.Pulse  // since leadership was lost, until lead has returned

	mu sync.Mutex
	// changed are the Services that the table tells of since the last step, nil for one that does not
	// lead; factsChanged is set by all that is no Service and decides who gets what.
	changed      map[lb.Key]bool
	factsChanged bool
	// ended are the writes of Services that have ended since the last step.
	ended []serviceWrite

	// What follows belongs to the goroutine that leads, and begins empty with each time of leading.

	book *plan.Book
	// known is set once the book has all that the tables hold.
	known bool
	// again are the Services to look at anew, as a write failed.
	again map[lb.Key]bool
	// writes are those that the table does not show yet, or that failed.
	writes map[lb.Key]write
	// writing are the Services that have a write under way, also of an earlier time of leading.
	writing map[lb.Key]bool
	// failing are those whose last write failed.
	failing unwritable
	// crowded are those for which a pool has no room for a reservation, and room is set once it may have.
	crowded map[lb.Key]crowded
	room    bool
	// poolWrites are the last ones, by pool, as long as the table does not show them.
	poolWrites map[string]poolWrite
	// registries are by pool; writer is this controller's name in them.
	registries map[string]*registry
	writer     string
	terms      int
	replaces   replaces
	// withdrawals are the Services that are to lose their finalizer once nobody announces them.
	withdrawals withdrawals
	unwritable  unwritable
	counted     time.Time // when counts of pools were last written
	deciding    time.Time // when the present step began
}

// write is a write of ours to a Service's status.
type write struct {
	plan.Pending
	done         bool // it took place for sure
	failures     loop.Failures
	reservations map[string]lb.PendingReservation // by pool
	adopted      bool                             // by another's reservation; this controller did not send it
	only         bool                             // no other write may have taken place to the same version
}

// poolWrite is a write of ours to a pool's status, and what the pool showed before.
type poolWrite struct {
	before, written lb.PoolStatus
}

func newController(d deps) *controller {
	c := &controller{deps: d, tidier: newTidier(d), lister: newLister(d), writes: map[lb.Key]write{},
		writing: map[lb.Key]bool{}, lanes: loop.NewLanes(d.parallel, max(d.parallel/4, 1))}
	c.runner = loop.New(c.step, loop.Options{Gap: gap, Every: interval, Burst: passes, MaxBackoff: 5 * time.Second})
	return c
}

// poke says that all of a kind are known now.
func (c *controller) poke() {
	c.runner.Poke()
	c.tidier.runner.Poke()
	c.lister.runner.Poke()
}

// serviceChanged says that a Service has changed.
func (c *controller) serviceChanged(key lb.Key) {
	c.mu.Lock()
	if c.changed != nil {
		c.changed[key] = true
	}
	c.mu.Unlock()
	c.runner.Poke()
	c.lister.serviceChanged(key)
}

// factChanged says that a pool, a namespace or a node has changed.
func (c *controller) factChanged(string) {
	c.mu.Lock()
	c.factsChanged = true
	c.mu.Unlock()
	c.poke()
}

// lead gives out addresses until ctx ends. It starts from what the API server holds now: an earlier
// leader may have written what the watches have not delivered yet, and to decide without it could
// give an address twice.
func (c *controller) lead(ctx context.Context) error {
	c.begin()
	defer c.remember(nil)
	defer c.lister.end()
	c.log.Info("leading: catching up with the API server")
	if err := c.catchUpWithOthers(ctx); err != nil {
		return ignoreEnd(ctx, err)
	}
	c.log.Info("leading: assigning addresses")
	defer c.metrics.forget()
	c.poke()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.runner.Run(ctx) })
	group.Go(func() error { return c.tidier.runner.Run(ctx) })
	group.Go(func() error { return c.lister.run(ctx) })
	err := group.Wait()
	c.lanes.Wait()
	c.heed(ctx)
	return err
}

// startOver begins anew, as one that has just become the leader: etcd was restored from a snapshot,
// so that what was written may not be there, and the versions that were to come of it never will.
func (c *controller) startOver(ctx context.Context) error {
	c.log.Warn("the API server holds an older state than before: catching up")
	c.begin()
	return c.catchUpWithOthers(ctx)
}

// begin forgets what an earlier time of leading has left.
func (c *controller) begin() {
	c.remember(map[lb.Key]bool{})
	c.lister.begin()
	c.book, c.known, c.again = plan.NewBook(c.config, 0), false, map[lb.Key]bool{}
	// A write that is under way may still take place, also where etcd was restored and the reservation for it is gone.
	maps.DeleteFunc(c.writes, func(key lb.Key, _ write) bool { return !c.writing[key] })
	c.poolWrites, c.counted = map[string]poolWrite{}, time.Time{}
	c.replaces, c.withdrawals, c.unwritable, c.failing = replaces{}, withdrawals{}, unwritable{}, unwritable{}
	c.crowded = map[lb.Key]crowded{}
	c.terms++
	c.registries, c.writer = map[string]*registry{}, fmt.Sprintf("%s/%d", c.identity, c.terms)
}

// remember has changes noted in keys, or with nil forgotten.
func (c *controller) remember(keys map[lb.Key]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed = keys
}

// leads reports whether the controller gives out addresses.
func (c *controller) leads() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed != nil
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
	if !c.services.Synced() || !c.pools.Synced() || !c.namespaces.Synced() || !c.nodes.Synced() || !c.around.Synced() {
		return 0, nil // called again when they are
	}
	started := c.now()
	c.deciding = started
	c.heed(ctx)
	pools := c.pools.All()
	c.tell(pools, started)
	p := c.book.Plan(started)
	c.metrics.planned(p.Pools, c.book.Summary(), c.now().Sub(started))
	changes, reserveErr := c.reserve(ctx, p, pools, c.changes(p))
	c.writeServices(ctx, changes)
	again, poolErr := c.writePools(ctx, p, pools)
	if err = errors.Join(reserveErr, poolErr); errors.Is(err, kube.ErrWentBack) {
		return 0, ignoreEnd(ctx, errors.Join(err, c.startOver(ctx)))
	}
	if len(c.again) > 0 || c.room && len(c.crowded) > 0 {
		again = time.Millisecond
	}
	retry := func(key lb.Key) { c.again[key] = true }
	for _, next := range []time.Duration{due(c.replaces, c.now(), retry), due(c.withdrawals, c.now(), retry),
		due(c.unwritable, c.now(), retry), due(c.failing, c.now(), retry)} {
		if next > 0 {
			again = soonest(again, next)
		}
	}
	if next := c.book.Next(); !next.IsZero() {
		again = soonest(again, max(next.Sub(c.now()), time.Millisecond))
	}
	return again, ignoreEnd(ctx, err)
}

// soonest returns the lesser of two waits, of which the first may be zero for none.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// tell tells the book of all that has changed since the last step.
func (c *controller) tell(pools map[string]lb.Pool, now time.Time) {
	c.mu.Lock()
	keys, facts := c.changed, c.factsChanged
	c.changed, c.factsChanged = map[lb.Key]bool{}, false
	c.mu.Unlock()
	maps.Copy(keys, c.again)
	c.again = map[lb.Key]bool{}
	if c.room {
		c.room = false
		c.uncrowd(keys)
	}
	if facts || !c.known {
		c.book.SetPools(pools, c.nodesAndAround())
		c.book.SetNamespaces(c.namespaces.All())
	}
	if !c.known {
		c.known = true
		for _, p := range pools {
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
			c.room = c.room || len(w.reservations) > 0
			delete(c.writes, key) // what is shown now is newer than the write
			w = write{}
		}
		if f := c.failing[key]; f != nil && (!ok || f.version != s.Version) {
			delete(c.failing, key)
		}
		delete(c.crowded, key)
		if ok {
			of := c.unwritable[key]
			refused := of != nil && of.uid == s.UID
			c.book.Refuse(key, refused, refused && !c.unwritable.allow(s))
			c.book.Set(s, w.Pending, now)
		} else {
			c.book.Delete(key, now)
			delete(c.replaces, key)
			delete(c.withdrawals, key)
			delete(c.unwritable, key)
		}
	}
}

// ready returns a check that passes once the tables have been complete.
func ready(d deps) func() error {
	return func() error {
		switch {
		case !d.services.Synced():
			return errors.New("the list of Services has not arrived yet")
		case !d.pools.Synced():
			return errors.New("the list of IPAddressPools has not arrived yet")
		case !d.namespaces.Synced():
			return errors.New("the list of Namespaces has not arrived yet")
		case !d.nodes.Synced():
			return errors.New("the list of Nodes has not arrived yet")
		case !d.around.Synced():
			return errors.New("the ConfigMap " + lb.SurroundingsConfigMap + " has not arrived yet")
		}
		return nil
	}
}
