package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// run runs an actor that keeps a few Services until the test ends.
func run(t *testing.T, ns *nstest.NS, services map[lb.Key]plan.Service) (
	repairs *atomic.Int64, changed chan struct{}, a *testActor) {
	repairs, changed = new(atomic.Int64), make(chan struct{}, 1)
	n := dial(t, ns)
	a = newActor(dialect.Deps{
		Watch: Watch(n, slog.New(slog.DiscardHandler)),
		Changed: func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		},
		Observe: func(s dialect.Sync) { repairs.Add(int64(s.Repaired)) },
	}, inKernel(n))
	a.Configure(bothAddresses(seedConfig))
	a.Set(services)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	for a.Outcomes(); !a.Tried; a.Outcomes() {
		<-changed
	}
	return repairs, changed, a
}

// Contract clause 6: what others do to our tables is noticed and undone, also without a look at
// regular times.
func TestContract6DriftIsRepaired(t *testing.T) {
	ns := nstest.New(t)
	run(t, ns, variety())
	n := dial(t, ns)
	held := func() (all [2]state) {
		for i, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			var err error
			if all[i], err = (netlinkKernel{family, n.commands}).load(); err != nil {
				t.Fatal(err)
			}
		}
		return all
	}
	want := held()
	for _, damage := range [][]string{
		{"delete", "table", "ip", TableName},
		{"delete", "table", "ip6", TableName},
		{"flush", "ruleset"},
		{"flush", "table", "ip", TableName},
		{"flush", "chain", "ip", TableName, "services"},
		{"flush", "map", "ip", TableName, "backends"},
		{"flush", "set", "ip6", TableName, "hairpin"},
		{"insert", "rule", "ip", TableName, "services", "accept"},
		{"add", "rule", "ip", TableName, "tcp-draw", "drop"},
		{"add", "chain", "ip", TableName, "theirs"},
		{"add", "set", "ip", TableName, "theirs", "{ type ipv4_addr ; }"},
		{"delete", "element", "ip", TableName, "cluster-ips", "{ 10.96.0.40 }"},
		{"add", "element", "ip", TableName, "cluster-ips", "{ 192.0.2.77 }"},
		{"delete", "element", "ip", TableName, "vips", "{ 198.51.100.60 }"},
		{"add", "element", "ip6", TableName, "vips", "{ 2001:db8:77::1 }"},
		{"flush", "chain", "ip6", TableName, "unserved-vip"},
		{"add", "element", "ip", TableName, "hairpin", "{ 192.0.2.77 . 192.0.2.78 }"},
		{"add", "element", "ip", TableName, "external", "{ 192.0.2.77 . tcp . 80 }"},
		{"add", "element", "ip", TableName, "source-ranges-32", "{ 7:7 . 192.0.2.77 }"},
		{"flush", "set", "ip", TableName, "restricted"},
		{"flush", "set", "ip6", TableName, "source-ranges-128"},
		{"add", "element", "ip", TableName, "tcp-backends", "{ 7:7 . 10000 : 192.0.2.77 . 8080 }"},
		{"flush", "map", "ip", TableName, "affinity-ports"},
		{"add", "element", "ip6", TableName, "affinity-ports", "{ 7:7 . 2001:db8::77 : 8080 }"},
	} {
		t.Run(strings.Join(damage, " "), func(t *testing.T) {
			ns.Run(t, "nft", damage...)
			// Reading is paced by how long it takes, which is long on a busy machine.
			deadline := time.Now().Add(time.Minute)
			for !reflect.DeepEqual(held(), want) {
				if time.Now().After(deadline) {
					t.Fatal("not repaired")
				}
				time.Sleep(100 * time.Millisecond)
			}
		})
	}
}

// The watcher ignores changes of other tables, and what packets write into ours.
func TestOnlyOurTablesDisturb(t *testing.T) {
	ns := nstest.New(t)
	n := dial(t, ns)
	var disturbed atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- n.watch(ctx, slog.New(slog.DiscardHandler), func() { disturbed.Add(1) })
	}()
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: netlinkKernel{lb.IPv4, n.commands}})
	a.Configure(seedConfig)
	a.settle(t, variety())
	a.settle(t, map[lb.Key]plan.Service{})
	ns.Run(t, "nft", "add", "table", "ip", "theirs")
	ns.Run(t, "nft", "add", "chain", "ip", "theirs", "landfall")
	ns.Run(t, "nft", "add", "table", "inet", TableName)
	ns.Run(t, "nft", "add", "element", "ip", TableName, stickyMap, "{ 7:7 . 77 : 192.0.2.7 }")
	ns.Run(t, "nft", "delete", "element", "ip", TableName, stickyMap, "{ 7:7 . 77 }")
	time.Sleep(2 * settle)
	if n := disturbed.Load(); n != 0 {
		t.Errorf("disturbed %d times", n)
	}
	for deadline := time.Now().Add(time.Minute); disturbed.Load() == 0; time.Sleep(10 * time.Millisecond) {
		ns.Run(t, "nft", "add", "table", "ip", TableName) // again, in case the watcher has only begun
		ns.Run(t, "nft", "delete", "table", "ip", TableName)
		if time.Now().After(deadline) {
			t.Fatal("the watcher did not report the removal of our table")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Contract clause 6: a start over a table that holds the right elements changes nothing, not even
// for a moment.
func TestContract6RestartChangesNothing(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.Configure(bothAddresses(seedConfig))
	a.settle(t, variety())
	before := ns.Run(t, "nft", "-a", "list", "ruleset")
	b := newTestActor(t, ns)
	b.Configure(bothAddresses(seedConfig))
	if st := b.settle(t, variety()); st.Transactions != 0 {
		t.Errorf("%+v", st)
	}
	if ns.Run(t, "nft", "-a", "list", "ruleset") != before {
		t.Error("the ruleset, with its handles, is another one")
	}
	for key, o := range b.Outcomes() {
		if o.Err != nil || len(o.Applied.Ports) == 0 {
			t.Errorf("%s: %+v", key, o)
		}
	}
}

// A successor with other rules, or another configuration, replaces rules and keeps elements.
func TestOtherRulesKeepElements(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.Configure(bothAddresses(seedConfig))
	a.settle(t, variety())
	elements := func() string { return ns.Run(t, "nft", "-a", "list", "map", "ip", TableName, "backends") }
	before := elements()
	other := bothAddresses(seedConfig)
	other.MasqueradeBit, other.DropInvalid, other.Pods = 15, false, plan.Detector{Interface: "cni0"}
	a.Configure(other)
	if st := a.settle(t, nil); st.Changes != 0 || st.Transactions != 2 {
		t.Errorf("%+v", st)
	}
	if elements() != before {
		t.Error("elements were written anew")
	}
	if out := ns.Run(t, "nft", "list", "ruleset"); !strings.Contains(out, `iifname != "cni0" goto masqueraded`) ||
		!strings.Contains(out, "0x00008000") || strings.Contains(out, "ct state invalid drop") {
		t.Error("the rules are not those of the new configuration")
	}
}

// An affinity timeout that is new leaves the chains as they are that it does not concern, and the
// clients that are remembered.
func TestAnotherTimeoutKeepsChains(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	s := affineTo("10.1.0.1:8080", "10.1.0.2:8080")
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	ns.Run(t, "nft", "add", "element", "ip", TableName, stickyMap, fmt.Sprintf("{ %s . 77 timeout 1h : 10.1.0.1 }",
		class(a.table(lb.IPv4), s.Key)))
	held := func() string {
		return ns.Run(t, "nft", "-a", "list", "chain", "ip", TableName, "tcp-draw") +
			ns.Run(t, "nft", "-a", "list", "chain", "ip", TableName, "prerouting")
	}
	before := held()
	for _, timeout := range []time.Duration{time.Minute, time.Hour} {
		s.AffinityTimeout = timeout
		a.settle(t, map[lb.Key]plan.Service{s.Key: s})
		if held() != before {
			t.Errorf("timeout %s: rules that have nothing to do with it, with their handles, are others", timeout)
		}
		want := fmt.Sprintf(
			"update @%s { meta priority . jhash ct original ip saddr mod %d seed 0x4c46 offset %d timeout %s", stickyMap,
			stickyPlaces, stickyPlaces, strings.TrimSuffix(strings.TrimSuffix(timeout.String(), "0s"), "0m"))
		if out := ns.Run(t, "nft", "list", "chain", "ip", TableName, chainRemember); !strings.Contains(out, want) {
			t.Errorf("timeout %s: the rules are %s, want %s", timeout, out, want)
		}
		if known := a.clients(t, lb.IPv4); len(known) != 1 {
			t.Errorf("timeout %s: remembered are %v", timeout, known)
		}
	}
}

// class returns the group of a Service's first frontend in nft's form.
func class(t *table, key lb.Key) string {
	group := groupOf(t, key)
	return fmt.Sprintf("%x:%x", group>>16, group&0xffff)
}

// A set of another type under a name of ours, as no release of ours makes it, does not stop the
// actor.
func TestForeignSetIsReplaced(t *testing.T) {
	ns := nstest.New(t)
	ns.Run(t, "nft", "add", "table", "ip", TableName)
	ns.Run(t, "nft", "add", "set", "ip", TableName, "external", "{ type ipv4_addr ; }")
	ns.Run(t, "nft", "add", "element", "ip", TableName, "external", "{ 192.0.2.1 }")
	a := newTestActor(t, ns)
	a.settle(t, variety())
	other := nstest.New(t)
	b := newTestActor(t, other)
	b.settle(t, variety())
	same(t, b, a)
}

func TestCleanupRemovesOnlyOurs(t *testing.T) {
	ns := nstest.New(t)
	ns.Run(t, "nft", "add", "table", "ip", "theirs")
	ns.Run(t, "nft", "add", "table", "inet", TableName)
	a := newTestActor(t, ns)
	a.settle(t, variety())
	for range 2 {
		if err := Cleanup(a.netlink); err != nil {
			t.Error(err)
		}
		if got := strings.Fields(ns.Run(t, "nft", "list", "tables")); strings.Join(got,
			" ") != "table ip theirs table inet landfall" {
			t.Errorf("left are %v", got)
		}
	}
}

func TestProbeChangesNothing(t *testing.T) {
	ns := nstest.New(t)
	n := dial(t, ns)
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, probe := range []func(*Netlink, lb.Family) error{Probe, ProbeDirect, ProbeRelayRate} {
			if err := probe(n, family); err != nil {
				t.Error(err)
			}
		}
	}
	if out := ns.Run(t, "nft", "list", "ruleset"); out != "" {
		t.Errorf("left is %s", out)
	}
}

// TestTrialsAreApart looks for what only some rules need in the trials: a kernel without it shall not lose all others.
func TestTrialsAreApart(t *testing.T) {
	has := func(rules ruleset) (limit, dup bool) {
		for _, c := range rules.chains {
			for _, r := range c.rules {
				for _, e := range r.Exprs {
					switch e := e.(type) {
					case *expr.Limit:
						limit = true
					case *expr.Dynset:
						limit = limit || e.Each != nil
					case *expr.Dup:
						dup = true
					}
				}
			}
		}
		return limit, dup
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if limit, dup := has(trial(family)); limit || dup {
			t.Errorf("%s: of all rules, the trial has limits: %v, dup: %v", family, limit, dup)
		}
		if limit, dup := has(trialDirect(family)); limit || !dup {
			t.Errorf("%s: of direct forwarding, the trial has limits: %v, dup: %v", family, limit, dup)
		}
		if limit, dup := has(trialRelayRate(family)); !limit || dup {
			t.Errorf("%s: of the relay's UDP, the trial has limits: %v, dup: %v", family, limit, dup)
		}
	}
}

// What the kernel refuses is reported with what was asked, and has not happened.
func TestRefusalIsReported(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	s := simpleService(1, 2)
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	k := a.tables[0].kernel
	before, err := k.load()
	if err != nil {
		t.Fatal(err)
	}
	at := frontend{addr: addressOf(addr("10.96.0.9")), port: 80, protocol: tcp}
	gone := entry{element: element{set: setBackends, frontend: at, number: 10000}}
	for name, test := range map[string]struct {
		change change
		errno  error
		about  string
	}{
		"remove what is not there": {change{add: []entry{{element: element{set: setExternal, frontend: at}}},
			remove: []entry{gone}}, unix.ENOENT, "remove from backends"},
		"add what is there": {
			change{add: []entry{{element: element{set: setClusterIPs, frontend: frontend{addr: addressOf(addr("10.96.0.1"))}}}}},
			nil, ""},
		"add to no set": {change{add: []entry{{element: element{set: setRemember, frontend: at, number: 5}}}}, unix.ENOENT,
			"add to remember-5"},
	} {
		err := k.commit(test.change)
		if name == "add what is there" {
			test.errno, test.about = unix.EEXIST, "add to cluster-ips"
		}
		if !errors.Is(err, test.errno) || !strings.Contains(fmt.Sprint(err), test.about) {
			t.Errorf("%s: error %v, want %v about %q", name, err, test.errno, test.about)
		}
	}
	after, err := k.load()
	if err != nil || len(after.elements) != len(before.elements) {
		t.Errorf("%d elements, then %d; %v", len(before.elements), len(after.elements), err)
	}
}

// Asking whether the kernel takes elements leaves none.
func TestRecoverLeavesNothing(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.settle(t, variety())
	before := ns.Run(t, "nft", "list", "ruleset")
	for _, table := range a.tables {
		if err := table.Recover(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if ns.Run(t, "nft", "list", "ruleset") != before {
		t.Error("the ruleset is another one")
	}
}
