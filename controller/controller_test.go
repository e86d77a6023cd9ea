package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
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
		"Normal p Ready", "Warning p PoolExhausted", "Normal a Assigned", "Warning b PoolExhausted",
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

// TestNothingIsWrittenInAnIdleHour leads for an hour in which watches tell of everything again each
// minute, and of nothing new.
func TestNothingIsWrittenInAnIdleHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		p := newProcess(c)
		p.now = time.Now
		c.addPool("p", "10.0.0.0/30")
		for i := range 6 { // two of them wait
			c.put(service(fmt.Sprint(i)))
		}
		p.deliver()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.lead(ctx) }()
		for range 5 {
			time.Sleep(time.Second)
			p.deliver()
			p.poke()
		}
		synctest.Wait()
		if got := c.written(); len(got) < 6 {
			t.Errorf("written at first: %v", got)
		}
		events := len(p.events)
		for range 60 {
			time.Sleep(time.Minute)
			p.deliver()
			for key := range c.services {
				p.serviceChanged(key)
			}
			p.factChanged("")
		}
		synctest.Wait()
		if got := c.written(); len(got) > 0 || len(p.events) > events {
			t.Errorf("written in the hour: %v, and Events %v", got, p.events[events:])
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
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

// TestContract8FailedWrites fails each of the first writes in each way, while watches are up to
// date, late, or late with other changes.
func TestContract8FailedWrites(t *testing.T) {
	for name, f := range map[string]failure{"conflict": conflict, "forbidden": forbidden, "connection refused": refused,
		"answer lost": lost} {
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
					p.takeOver(t)
					c.fail(append(make([]failure, position), f)...)
					again, err := p.step(t.Context())
					if position < 3 && err == nil && again == 0 { // the pool and two Services
						t.Error("the failure is not tried again")
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

// TestContract8WriteNotSeenBack has an older Service ask for an address just when a younger one was
// given the first, which the watch does not show yet: what is on its way counts as held.
func TestContract8WriteNotSeenBack(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.1-10.0.0.2")
	old := service("old")
	old.Type = lb.ClusterIP
	c.put(old)
	c.put(service("young"))
	p.takeOver(t)
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
		old.takeOver(t)
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

// TestContract8Restored has etcd restored from a snapshot while a controller leads. All versions
// are lower than before, also than that of the pool on which reservations were to be made next.
func TestContract8Restored(t *testing.T) {
	for name, seen := range map[string]bool{"writes were seen": true, "a write was not seen": false} {
		t.Run(name, func(t *testing.T) {
			c := newCluster()
			p := newProcess(c)
			c.addPool("p", "10.0.0.0/24")
			c.put(service("a"))
			p.settle(t)
			first := c.holds("a")
			c.put(service("b"))
			p.deliver()
			restore := c.snapshot()
			if seen {
				p.settle(t)
				for range 5 { // so that the versions are far ahead
					c.put(service("later"))
					p.settle(t)
					c.remove("later")
					p.settle(t)
				}
			} else {
				step(t, p)
			}
			if got := c.holds("b"); got != "10.0.0.1 Assigned" {
				t.Fatalf("b holds %q", got)
			}
			restore()
			// First it acts on what was there before.
			_, _ = p.step(t.Context())
			c.check(t)
			c.put(service("new"))
			for range 10 {
				p.deliver()
				_, _ = p.step(t.Context()) // errors are tried again for
				c.check(t)
			}
			p.settle(t)
			if got := c.holds("a"); got != first {
				t.Errorf("a holds %q, before %q", got, first)
			}
			for _, name := range []string{"b", "new"} {
				if got := c.holds(name); !strings.HasSuffix(got, " Assigned") {
					t.Errorf("%s holds %q", name, got)
				}
			}
		})
	}
}

// TestContract8RestoredWhileAWriteIsUnderWay has etcd restored while an admission webhook keeps a write. The write
// takes place in the end, as the Service has the version that it was decided on.
func TestContract8RestoredWhileAWriteIsUnderWay(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/24")
	p.takeOver(t)
	c.put(service("back"))
	c.put(service("late"))
	restore := c.snapshot()
	c.remove("back")
	sent, answer := make(chan bool, 9), make(chan bool)
	c.holding = func(_ context.Context, key lb.Key) error {
		if key.Name == "late" {
			sent <- true
			<-answer
		}
		return nil
	}
	p.deliver()
	_, _ = p.controller.step(t.Context())
	<-sent
	restore()
	p.lanes = loop.NewLanes(1, 1)
	for range 5 {
		p.deliver()
		_, _ = p.controller.step(t.Context()) // errors are tried again for
		p.lanes.Wait()
	}
	if got := c.holds("back"); !strings.HasSuffix(got, " Assigned") {
		t.Errorf("back holds %q", got)
	}
	c.holding = nil
	close(answer)
	for range 100 {
		if time.Sleep(10 * time.Millisecond); c.holds("late") != "" {
			break
		}
	}
	p.settle(t)
	if got := c.holds("late"); !strings.HasSuffix(got, " Assigned") {
		t.Errorf("late holds %q", got)
	}
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

// TestCountsArePaced has Services go faster than counts are worth a write each.
func TestCountsArePaced(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/24")
	for i := range 40 {
		c.put(service(fmt.Sprint(i)))
	}
	p.settle(t)
	p.ticks = time.Millisecond
	pools := 0
	for i := range 20 {
		c.remove(fmt.Sprint(i))
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
	if got := []string{c.holds("a"), c.holds("c"),
		c.holds("d")}; cmp.Diff([]string{"", "10.0.0.1 Assigned", "10.0.0.0 Assigned"}, got) != "" {
		t.Errorf("a, c, d hold %q", got)
	}
}

// TestGatewaysAreNotHandedOut has a speaker tell of its gateway when a Service holds that already,
// and when the node has gone.
func TestGatewaysAreNotHandedOut(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	c.addPool("p", "10.0.0.0/29")
	c.put(service("early"))
	p.settle(t)
	p.nodes.Replace(map[string]lb.Node{"n": {Name: "n", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.2")}}})
	told := map[string]string{"n": "10.0.0.0 the network address\n10.0.0.1 the gateway\n",
		"gone": "10.0.0.3 the gateway\n"}
	p.around.Replace(map[string]map[string]string{lb.SurroundingsConfigMap: told})
	p.factChanged("")
	c.put(service("late"))
	asking := service("asking")
	asking.Request.Addresses = []string{"10.0.0.1"}
	c.put(asking)
	p.settle(t)
	if got := []string{c.holds("early"), c.holds("late"),
		c.holds("asking")}; cmp.Diff([]string{"10.0.0.0 AddressExcluded", "10.0.0.3 Assigned", "AddressExcluded"},
		got) != "" {
		t.Errorf("early, late and asking hold %q", got)
	}
	want := "asks for 10.0.0.1, which is the gateway of node n"
	if got := c.services[key("asking")].Conditions[0].Message; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	want = "hands out addresses, but not 10.0.0.0 (the network address of node n), 10.0.0.1 (the gateway of node n), " +
		"10.0.0.2 (an address of node n)"
	if got := c.pools["p"].Status.Conditions[0].Message; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if left, _ := p.around.Get(lb.SurroundingsConfigMap); len(left) != 1 || left["n"] != told["n"] {
		t.Errorf("what was told of networks is %q", left)
	}
}

// TestSessionsOfNodesThatAreGone are removed from the status of BGPPeers, and no others.
func TestSessionsOfNodesThatAreGone(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	shown := func(want map[string][]string) {
		t.Helper()
		p.settle(t)
		if diff := cmp.Diff(want, p.sessions.All()); diff != "" {
			t.Errorf("sessions (-want +got):\n%s", diff)
		}
	}
	p.nodes.Replace(map[string]lb.Node{"n": {Name: "n"}, "m": {Name: "m"}})
	p.sessions.Replace(map[string][]string{"tor": {"gone", "m", "n"}, "far": {"n"}})
	p.factChanged("")
	shown(map[string][]string{"tor": {"m", "n"}, "far": {"n"}})

	p.sessions.Set("far", []string{"late", "n"}) // a speaker whose Node was deleted before
	shown(map[string][]string{"tor": {"m", "n"}, "far": {"n"}})

	// A write that fails is tried again, and does not keep Services from their addresses.
	forget := p.tidier.forgetSessions
	p.tidier.forgetSessions = func(context.Context, string, []string) error { return errors.New("the API server is busy") }
	p.nodes.Replace(map[string]lb.Node{"n": {Name: "n"}})
	p.factChanged("")
	c.addPool("p", "10.0.0.1/32")
	c.put(service("a"))
	for range 5 {
		p.deliver()
		if _, err := p.step(t.Context()); err != nil {
			t.Error(err)
		}
	}
	_, err := p.tidier.step(t.Context())
	if err == nil || c.holds("a") != "10.0.0.1 Assigned" {
		t.Errorf("%v; a holds %q", err, c.holds("a"))
	}
	p.tidier.forgetSessions = forget
	shown(map[string][]string{"tor": {"n"}, "far": {"n"}})
}

// TestTidyingHoldsUpNothing has Services get addresses while the removal of what is left hangs.
func TestTidyingHoldsUpNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		p := newProcess(c)
		p.services.SetSynced(true)
		p.pools.SetSynced(true)
		p.sessions.Replace(map[string][]string{"tor": {"gone"}})
		hangs := make(chan struct{})
		p.tidier.forgetSessions = func(ctx context.Context, _ string, _ []string) error {
			close(hangs)
			<-ctx.Done()
			return ctx.Err()
		}
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.lead(ctx) }()
		<-hangs
		p.mu.Lock()
		p.changed[key("a")] = true
		p.mu.Unlock()
		p.runner.Poke()
		time.Sleep(time.Second) // the runner may be inside its gap
		synctest.Wait()
		p.mu.Lock()
		left := len(p.changed)
		p.mu.Unlock()
		if left > 0 {
			t.Error("the controller does not look at a Service while the removal hangs")
		}
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
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
	good := options{outside: keep, duplicates: keep, leaderElect: true, leaseDuration: 15 * time.Second,
		renewDeadline: 10 * time.Second, retryPeriod: 2 * time.Second}
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
