package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestServicesGetAddressesAndEventsOnce(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.put(service("a"))
	c.put(service("b"))
	p.settle(t)
	c.addPool("p", "10.0.0.1/32")
	p.settle(t)
	p.settle(t)
	if got := c.holds("a") + ", " + c.holds("b"); got != "10.0.0.1 Assigned, PoolExhausted" {
		t.Errorf("a and b hold %s", got)
	}
	want := []string{
		"Warning a NoPool", "Warning b NoPool",
		"Normal a Assigned", "Warning b PoolExhausted", "Normal p Ready", "Warning p PoolExhausted",
	}
	if diff := cmp.Diff(want, p.events); diff != "" {
		t.Errorf("Events (-want +got):\n%s", diff)
	}
	if got := c.pools["p"].Status; got.AssignedIPv4 != "1" || got.AvailableIPv4 != "0" {
		t.Errorf("the pool shows %+v", got)
	}
}

func TestNothingIsWrittenWhenNothingChanges(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/24")
	c.put(service("a"))
	c.put(service("b"))
	p.settle(t)
	p.events = nil
	for range 3 {
		p.deliver()
		if again, err := p.step(t.Context()); again != 0 || err != nil {
			t.Errorf("step: %v, %v", again, err)
		}
	}
	restarted := newProcess(c)
	restarted.settle(t)
	if got := c.written(); len(got) > 0 || len(p.events) > 0 || len(restarted.events) > 0 {
		t.Errorf("written %v, Events %v, after a restart %v", got, p.events, restarted.events)
	}
}

func TestNothingIsDecidedBeforeAllIsKnown(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.put(service("a"))
	p.deliverServices(1) // pools are not known
	step(t, p)
	if got := c.written(); len(got) > 0 {
		t.Errorf("written %v", got)
	}
	if err := ready(p.deps)(); err == nil {
		t.Error("ready although pools are not known")
	}
	p.deliver()
	if err := ready(p.deps)(); err != nil {
		t.Errorf("not ready: %v", err)
	}
}

// TestContract8FailedWrites fails each of the first writes in each way, while watches are up to date, late, or late with other changes.
func TestContract8FailedWrites(t *testing.T) {
	for name, f := range map[string]failure{"conflict": conflict, "forbidden": forbidden, "connection refused": refused, "answer lost": lost} {
		for position := range 4 {
			for _, late := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/write=%d/late=%v", name, position, late), func(t *testing.T) {
					c := newCluster()
					p := newProcess(c)
					c.addPool("p", "10.0.0.0/24")
					internal := service("older")
					internal.Type = lb.ClusterIP
					c.put(internal)
					c.put(service("a"))
					c.put(service("b"))
					p.deliver()
					c.fail(append(make([]failure, position), f)...)
					_, err := p.step(t.Context())
					if position < 3 && err == nil { // two Services and the pool
						t.Error("the failure is not reported, and so not tried again")
					}
					c.check(t)
					if late {
						// An older Service, which comes only now, is seen before the writes to the others are.
						becomesLoadBalancer(c, "older")
						_, _ = p.step(t.Context())
						c.check(t)
						p.deliverServices(1)
						_, _ = p.step(t.Context())
						c.check(t)
					}
					c.touch("a")
					p.settle(t)
					if got := c.holds("a") + c.holds("b"); strings.Count(got, "Assigned") != 2 {
						t.Errorf("held: %s", got)
					}
				})
			}
		}
	}
}

// becomesLoadBalancer changes the type of a Service, which makes it an old newcomer.
func becomesLoadBalancer(c *cluster, name string) {
	s := c.services[key(name)]
	s.Type = lb.LoadBalancer
	c.put(s)
}

// TestContract8WriteNotSeenBack has an older Service ask for an address just when a younger one was given the first, which the
// watch does not show yet: what is on its way counts as held.
func TestContract8WriteNotSeenBack(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.1-10.0.0.2")
	old := service("old")
	old.Type = lb.ClusterIP
	c.put(old)
	c.put(service("young"))
	p.deliver()
	becomesLoadBalancer(c, "old") // before the write, so that the watch tells of it before that
	step(t, p)
	if got := c.holds("young"); got != "10.0.0.1 Assigned" {
		t.Fatalf("the young one holds %q", got)
	}
	c.written()
	p.deliverServices(1)
	step(t, p)
	c.check(t)
	if got := c.holds("old"); got != "10.0.0.2 Assigned" {
		t.Errorf("the old one holds %q", got)
	}
	// The pool changes meanwhile: still nothing is decided for Services whose picture is old.
	delete(c.pools, "p")
	p.deliverPools()
	c.written()
	step(t, p)
	if got := c.written(); len(got) > 0 {
		t.Errorf("written on an old picture: %v", got)
	}
	p.settle(t)
	if got := c.holds("young") + ", " + c.holds("old"); got != "10.0.0.1 HeldOutside, 10.0.0.2 HeldOutside" {
		t.Errorf("held: %s", got)
	}
}

func step(t *testing.T, p *process) {
	t.Helper()
	if _, err := p.step(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestContract8LeaderChange has a new leader whose watches lag behind what the old one wrote last.
func TestContract8LeaderChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		old, young := newProcess(c), newProcess(c)
		c.addPool("p", "10.0.0.0/24")
		c.put(service("a"))
		c.put(service("b"))
		old.deliver()
		young.deliver()
		step(t, old)
		first := c.holds("a") + c.holds("b")
		c.written()

		caughtUp := make(chan struct{})
		young.catchUp = func(ctx context.Context) error {
			select {
			case <-caughtUp:
				young.deliver()
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- young.lead(ctx) }()
		c.put(service("c"))
		young.poke()
		synctest.Wait()
		if got := c.written(); len(got) > 0 {
			t.Fatalf("written before the new leader knew what the old one wrote: %v", got)
		}
		close(caughtUp)
		time.Sleep(time.Second)
		c.check(t)
		if got := c.holds("a") + c.holds("b"); got != first {
			t.Errorf("a and b hold %s, before %s", got, first)
		}
		if got := c.holds("c"); got != "10.0.0.2 Assigned" {
			t.Errorf("c holds %q", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestLeadingEndsWhileCatchingUp must not be an error: the process may be asked to end at any time.
func TestLeadingEndsWhileCatchingUp(t *testing.T) {
	p := newProcess(newCluster())
	p.catchUp = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.lead(ctx); err != nil {
		t.Error(err)
	}
	p.catchUp = func(context.Context) error { return errors.New("broken") }
	if err := p.lead(t.Context()); err == nil {
		t.Error("a failure to catch up is hidden")
	}
}

// TestContract8RandomRestarts drives processes that lead in turn, with watches that are late and writes that fail.
func TestContract8RandomRestarts(t *testing.T) {
	failures := []failure{conflict, refused, lost, forbidden, nil}
	for seed := range uint64(200) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			c := newCluster()
			c.addPool("p", "10.0.0.0/28")
			p := newProcess(c)
			p.deliver()
			var internal []string
			for i := range 60 {
				switch r.IntN(10) {
				case 0, 1, 2:
					s := service(fmt.Sprintf("s%d", i))
					if r.IntN(2) == 0 {
						s.Type = lb.ClusterIP
						internal = append(internal, s.Key.Name)
					}
					c.put(s)
				case 8, 9:
					if len(internal) > 0 {
						becomesLoadBalancer(c, internal[0])
						internal = internal[1:]
					}
				case 3:
					c.fail(failures[r.IntN(len(failures))], failures[r.IntN(len(failures))])
				case 4, 5:
					p.deliverServices(1 + r.IntN(4))
				case 6: // crash, and another takes over: from what is there now
					p = newProcess(c)
					p.deliver()
				case 7:
					p.deliver()
				}
				_, _ = p.step(t.Context())
				c.check(t)
				if t.Failed() {
					t.FailNow()
				}
			}
			c.fail()
			p.settle(t)
		})
	}
}

// TestCountsArePaced has Services come faster than counts are worth a write each.
func TestCountsArePaced(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	p.ticks = time.Millisecond
	c.addPool("p", "10.0.0.0/24")
	pools := 0
	for i := range 20 {
		c.put(service(fmt.Sprint(i)))
		p.deliver()
		again, err := p.step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		written := strings.Count(strings.Join(c.written(), " "), "pool")
		if pools += written; written == 0 && (again <= 0 || again > countEvery) {
			t.Errorf("step %d: the count that is due is tried again after %v", i, again)
		}
	}
	if pools != 1 {
		t.Errorf("%d writes of counts within a moment, want 1", pools)
	}
	p.clock = p.clock.Add(countEvery)
	p.settle(t)
	if got := c.pools["p"].Status.AssignedIPv4; got != "20" {
		t.Errorf("the pool shows %s held", got)
	}
}

func TestTypeChangeAndDeletionFreeTheAddress(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/31")
	for _, name := range []string{"a", "b", "c", "d"} {
		c.put(service(name))
	}
	p.settle(t)
	a := c.services[key("a")]
	a.Type = lb.ClusterIP
	c.put(a)
	c.remove("b")
	p.settle(t)
	if got := []string{c.holds("a"), c.holds("c"), c.holds("d")}; cmp.Diff([]string{"", "10.0.0.1 Assigned", "10.0.0.0 Assigned"}, got) != "" {
		t.Errorf("a, c, d hold %q", got)
	}
}

func TestMetrics(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.1/32")
	c.put(service("a"))
	c.put(service("b"))
	p.deliver()
	c.fail(conflict)
	_, _ = p.step(t.Context())
	p.settle(t)
	want := `
# HELP landfall_controller_addresses Addresses in a pool.
# TYPE landfall_controller_addresses gauge
landfall_controller_addresses{family="IPv4",pool="p"} 1
# HELP landfall_controller_addresses_assigned Addresses of a pool that Services hold.
# TYPE landfall_controller_addresses_assigned gauge
landfall_controller_addresses_assigned{family="IPv4",pool="p"} 1
# HELP landfall_controller_pool_ready 1 if the pool hands out addresses.
# TYPE landfall_controller_pool_ready gauge
landfall_controller_pool_ready{pool="p",reason="Ready"} 1
# HELP landfall_controller_services Services that have the addresses that they ask for.
# TYPE landfall_controller_services gauge
landfall_controller_services 1
# HELP landfall_controller_services_pending Services that do not have the addresses that they ask for.
# TYPE landfall_controller_services_pending gauge
landfall_controller_services_pending{reason="PoolExhausted"} 1
`
	if err := testutil.CollectAndCompare(&p.metrics.last, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if got := testutil.ToFloat64(p.metrics.conflicts); got != 1 {
		t.Errorf("%v conflicts, want 1", got)
	}
	if got := testutil.ToFloat64(p.metrics.writes.WithLabelValues("service", "ok")); got != 2 {
		t.Errorf("%v writes, want 2", got)
	}
	p.metrics.forget()
	if n := testutil.CollectAndCount(&p.metrics.last); n != 0 {
		t.Errorf("%d metrics of one that does not lead", n)
	}
}

func TestFlags(t *testing.T) {
	good := options{outside: keep, duplicates: keep, leaderElect: true, leaseDuration: 15 * time.Second, renewDeadline: 10 * time.Second, retryPeriod: 2 * time.Second}
	for name, test := range map[string]struct {
		tweak func(*options)
		want  string
	}{
		"defaults":         {func(*options) {}, ""},
		"no election":      {func(o *options) { *o = options{outside: keep, duplicates: keep} }, ""},
		"outside":          {func(o *options) { o.outside = "drop" }, "--when-outside"},
		"duplicate":        {func(o *options) { o.duplicates = "" }, "--when-duplicate"},
		"no retry period":  {func(o *options) { o.retryPeriod = 0 }, "--leader-elect-retry-period"},
		"deadline too low": {func(o *options) { o.renewDeadline = 2 * time.Second }, "--leader-elect-renew-deadline"},
		"lease too short":  {func(o *options) { o.leaseDuration = 10 * time.Second }, "--leader-elect-lease-duration"},
	} {
		o := good
		test.tweak(&o)
		if err := o.check(); (err == nil) != (test.want == "") || err != nil && !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
