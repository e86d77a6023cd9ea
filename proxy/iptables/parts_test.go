package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// large is a Service with session affinity, many ports and many endpoints, the first of which each
// version replaces.
func large(ports, endpoints, version int) plan.Service {
	return largeNumber(0, ports, endpoints, version)
}

// largeNumber returns one of several such Services.
func largeNumber(n, ports, endpoints, version int) plan.Service {
	key := lb.Key{Namespace: "bench", Name: "large"}
	if n > 0 {
		key.Name = fmt.Sprint("large-", n)
	}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Local, InternalPolicy: lb.Cluster, AffinityTimeout: time.Hour,
		ClusterIPs:          []netip.Addr{netip.AddrFrom4([4]byte{10, 111, 0, byte(1 + n)})},
		Ingress:             []lb.Ingress{{Addr: netip.AddrFrom4([4]byte{172, 21, 0, byte(1 + n)})}},
		HealthCheckNodePort: uint16(30999 + n),
	}
	s := lb.Slice{Key: key, Service: key, Family: lb.IPv4}
	for i := range ports {
		name := fmt.Sprint("p", i)
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: name, Protocol: lb.TCP, Port: uint16(1000 + i)})
		s.Ports = append(s.Ports, lb.SlicePort{Name: name, Protocol: lb.TCP, Port: uint16(2000 + i)})
	}
	for i := range endpoints {
		if i == 0 {
			i = 5000 + version
		}
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}),
			Node: "here", Ready: true, Serving: true})
	}
	return plan.New(svc, []lb.Slice{s}, plan.Node{Name: "here"})
}

// Contract clauses 1 and 11: a Service with many rules is written in several calls, is not said to
// be applied before the last of them, and ends as if it had been written at once.
func TestContract11LargeServicesAreWrittenInParts(t *testing.T) {
	kernel := newFakeKernel()
	watched := &spy{Kernel: kernel}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
	a.families[0].batch = 500
	watched.after = func() { checkDelivers(t, kernel.tables["nat"]) }
	step := func(name string, s plan.Service, before int) {
		t.Helper()
		watched.writes = nil
		kernel.fail = func(string) error {
			if o, ok := a.Outcomes()[s.Key]; ok && len(o.Applied.Ports) != before {
				t.Errorf("%s: after %d calls %d ports are applied, want %d", name, len(watched.writes), len(o.Applied.Ports),
					before)
			}
			return nil
		}
		a.Set(plans(s))
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
		kernel.fail = nil
		if len(watched.writes) < 3 {
			t.Errorf("%s: %d calls", name, len(watched.writes))
		}
		checkCalls(t, name, watched.writes, maxRules)
		if o := a.Outcomes()[s.Key]; o.Err != nil || len(o.Applied.Ports) != len(s.Ports) {
			t.Errorf("%s: in the end %d ports are applied, error %v", name, len(o.Applied.Ports), o.Err)
		}
		if input, err := repair(a, lb.IPv4); err != nil || input != "" {
			t.Errorf("%s: the kernel lacks, %v:\n%.2000s", name, err, input)
		}
	}
	a.Set(many(5, 2))
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	before := fmt.Sprint(kernel.tables)
	step("new", large(60, 60, 0), 0)
	step("other endpoints", large(60, 61, 1), 60)
	step("fewer ports", large(31, 62, 1), 31)
	step("a port with many endpoints", large(1, 900, 1), 1)
	step("many ports", large(31, 62, 1), 1)
	gone := large(31, 62, 1)
	watched.writes = nil
	a.Set(map[lb.Key]plan.Service{gone.Key: {}})
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, fmt.Sprint(kernel.tables)); d != "" {
		t.Errorf("after its end (-before +now):\n%.2000s", d)
	}
	checkCalls(t, "its end", watched.writes, maxRules)
}

// checkCalls fails the test if one call names many more rules than it may.
func checkCalls(t *testing.T, when string, writes []string, most int) {
	t.Helper()
	for _, input := range writes {
		if lines := strings.Count(input, "\n"); lines > most+most/2 {
			t.Errorf("%s: a call of %d lines", when, lines)
		}
	}
}

// checkDelivers fails the test if rules lead to a chain of a Service that does nothing.
func checkDelivers(t *testing.T, nat chains) {
	t.Helper()
	reached := map[string]bool{}
	for chain, rules := range nat {
		for _, r := range rules {
			if to := target(r); ofOne(to) && !reached[to] {
				if reached[to] = true; len(nat[to]) == 0 {
					t.Errorf("%s leads to %s, which is empty", chain, to)
				}
			}
		}
	}
}

// Contract clauses 3, 6 and 11: what a predecessor has written for a Service that is to be written in
// parts delivers until those parts are there.
func TestContract6PartsAfterAStart(t *testing.T) {
	for name, next := range map[string]plan.Service{"other endpoints": large(8, 9, 1), "more ports": large(12, 7, 2)} {
		t.Run(name, func(t *testing.T) {
			kernel := newFakeKernel()
			predecessor := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
			predecessor.Set(plans(large(8, 7, 0)))
			if err := settle(predecessor, false); err != nil {
				t.Fatal(err)
			}
			watched, calls := &spy{Kernel: kernel}, 0
			watched.after = func() {
				calls++
				checkDelivers(t, kernel.tables["nat"])
				text := fmt.Sprint(kernel.tables["nat"])
				for port := range 8 {
					if !strings.Contains(text, fmt.Sprintf("--dport %d ", 1000+port)) {
						t.Errorf("after %d calls port %d is not served", calls, 1000+port)
					}
				}
			}
			a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
			f := a.families[0]
			f.batch, f.once, f.portion, f.least = 500, 10, 10, 10
			a.Set(plans(next))
			for range 2 {
				if err := settle(a, true); err != nil {
					t.Fatal(err)
				}
			}
			if calls < 5 {
				t.Errorf("%d calls", calls)
			}
			if input, err := repair(a, lb.IPv4); err != nil || input != "" {
				t.Errorf("in the end the kernel lacks, %v:\n%.2000s", err, input)
			}
			fresh := newFakeKernel()
			b := newActor(map[lb.Family]Kernel{lb.IPv4: fresh}, seedConfig)
			b.Set(plans(next))
			if err := settle(b, false); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(listing(t, fresh), listing(t, kernel)); d != "" {
				t.Errorf("not as after a fresh start (-fresh +got):\n%.2000s", d)
			}
		})
	}
}

// Contract clause 11: many Services that are just not large do not make one large call together.
func TestContract11ACallHasABound(t *testing.T) {
	watched := &spy{Kernel: newFakeKernel()}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
	a.families[0].batch = 500
	a.Set(nil)
	all := map[lb.Key]plan.Service{}
	for i := range 60 {
		s := largeNumber(i, 2, 60, 0)
		all[s.Key] = s
	}
	for _, version := range []map[lb.Key]plan.Service{all, {}} {
		for key := range all {
			a.Set(map[lb.Key]plan.Service{key: version[key]})
		}
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(watched.writes); n < 8 {
		t.Errorf("%d calls", n)
	}
	checkCalls(t, "60 Services", watched.writes, maxBatchRules)
}

func TestNextPortion(t *testing.T) {
	for name, test := range map[string]struct {
		size, used int
		took       time.Duration
		want       int
	}{
		"as long as it may":       {1000, 1000, partTime, 1000},
		"too long":                {1000, 1000, 4 * partTime, 250},
		"one long chain":          {1000, 3000, 2 * partTime, 1000},
		"a few rules, too long":   {1000, 10, 2 * partTime, 5},
		"fast":                    {1000, 900, partTime / 3, 2000},
		"fast, and the largest":   {maxRules, maxRules, partTime / 3, maxRules},
		"fast, as there was less": {1000, 10, partTime / 3, 1000},
	} {
		if got := nextPortion(test.size, test.used, test.took); got != test.want {
			t.Errorf("%s: %d, want %d", name, got, test.want)
		}
	}
}

// What is counted for the bound of a namespace is at least what is written, and not much more.
func TestNeedsAreWhatIsWritten(t *testing.T) {
	for _, s := range []plan.Service{simple(1, 2), simple(1, 200), largeNumber(0, 20, 10, 0), wide(0, 100, 100, 0)} {
		c := (renderer{family: lb.IPv4, config: seedConfig}).service(s)
		written := len(c.entries)
		for _, rules := range c.chains {
			written += len(rules)
		}
		if n := Needs(s); n < written || n > 4*written {
			t.Errorf("%s: %d rules are written, %d counted", s.Key, written, n)
		}
	}
	if n := Needs(plan.Service{}); n != 0 {
		t.Errorf("%d rules are counted of nothing", n)
	}
}

// TestContract11TooLarge checks that a Service that is too large says so, keeps what it has, and
// concerns no other. It is not tried in the kernel.
func TestContract11TooLarge(t *testing.T) {
	kernel := newFakeKernel()
	watched := &spy{Kernel: kernel}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
	set := func(s plan.Service, version int) error {
		all := many(3, version)
		all[s.Key] = s
		a.Set(all)
		return settle(a, false)
	}
	small := large(2, 3, 0)
	if err := set(small, 1); err != nil {
		t.Fatal(err)
	}
	a.Outcomes()
	s := large(20, 1000, 1)
	for version := range 3 {
		watched.writes = nil
		if err := set(s, 2+version); !errors.As(err, new(plan.TooLarge)) {
			t.Errorf("error %v", err)
		}
		for _, input := range watched.writes {
			if lines := strings.Count(input, "\n"); lines > 100 {
				t.Errorf("a call of %d lines", lines)
			}
		}
		for key, o := range a.Outcomes() {
			switch {
			case key != s.Key && o.Err != nil:
				t.Errorf("%s: %v", key, o.Err)
			case key == s.Key && (!strings.Contains(fmt.Sprint(o.Err), "65536 that one Service") || len(o.Applied.Ports) != 2):
				t.Errorf("%d ports applied, error %v", len(o.Applied.Ports), o.Err)
			}
		}
	}
	if err := set(small, 5); err != nil {
		t.Error(err)
	}
	if input, err := repair(a, lb.IPv4); err != nil || input != "" {
		t.Errorf("in the end the kernel lacks, %v:\n%.2000s", err, input)
	}
	if n := a.families[0].count(s); n > MaxServiceRules {
		t.Errorf("iptables-nft, which writes port by port, refuses %d rules too", n)
	}
	// No Service has more rules than are counted.
	for _, s := range []plan.Service{small, large(7, 50, 3)} {
		c, n := a.families[0].service(s), 0
		for _, rules := range c.chains {
			n += len(rules)
		}
		if n += len(c.entries); n > a.families[0].count(s) {
			t.Errorf("%d rules, counted %d", n, a.families[0].count(s))
		}
	}
}

// TestContract11TooLargeYields checks that a Service that is too large does not keep what it gave
// up: another Service may have got it. What it still asks for stays, whether it was written at once
// or is written in parts.
func TestContract11TooLargeYields(t *testing.T) {
	const vip, other, clusterIP = "172.21.0.1", "172.21.0.2", "10.111.0.1"
	for name, batch := range map[string]int{"at once": 0, "in parts": 100} {
		t.Run(name, func(t *testing.T) {
			kernel := newFakeKernel()
			a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
			a.families[0].batch, a.families[0].most = batch, 1000
			set := func(s plan.Service) error {
				a.Set(plans(s))
				return settle(a, false)
			}
			small, moved := large(2, 3, 0), large(30, 100, 1)
			moved.HealthPort++
			for _, p := range moved.Ports {
				for i, f := range p.Frontends {
					if f.Kind == plan.LoadBalancer {
						p.Frontends[i].Addr = addr(other)
					}
				}
			}
			if err := set(small); err != nil {
				t.Fatal(err)
			}
			if err := set(moved); !errors.As(err, new(plan.TooLarge)) {
				t.Fatal(err)
			}
			tables := fmt.Sprint(kernel.tables)
			if strings.Contains(tables, vip) || strings.Contains(tables, other) || strings.Contains(tables, "30999") ||
				!strings.Contains(tables, clusterIP) {
				t.Errorf("the kernel has\n%.4000s", tables)
			}
			if o := a.Outcomes()[small.Key]; o.Err == nil || len(o.Applied.Ports) != 2 || len(o.Applied.Ports[0].Frontends) != 1 {
				t.Errorf("applied %+v, error %v", o.Applied.Ports, o.Err)
			}
			if input, err := repair(a, lb.IPv4); err != nil || input != "" {
				t.Errorf("the kernel lacks, %v:\n%.2000s", err, input)
			}
			if err := set(small); err != nil || !strings.Contains(fmt.Sprint(kernel.tables), vip) {
				t.Errorf("small again: %v", err)
			}
			if err := set(plan.Service{Key: small.Key}); err != nil || strings.Contains(fmt.Sprint(kernel.tables), clusterIP) {
				t.Errorf("gone: %v", err)
			}
		})
	}
}

// TestContract6TooLargeIsServedAsBefore checks that a Service that is too large, and that a
// predecessor has written as it is wanted, is served after a start as before, until it changes.
func TestContract6TooLargeIsServedAsBefore(t *testing.T) {
	kernel := newFakeKernel()
	s := large(3, 5, 1)
	predecessor := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
	predecessor.Set(plans(s))
	if err := settle(predecessor, false); err != nil {
		t.Fatal(err)
	}
	watched := &spy{Kernel: kernel}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
	a.families[0].most = 40
	all := many(3, 1)
	all[s.Key] = s
	a.Set(all)
	if err := settle(a, false); err != nil {
		t.Errorf("after a start: %v", err)
	}
	if o := a.Outcomes()[s.Key]; o.Err != nil || len(o.Applied.Ports) != len(s.Ports) {
		t.Errorf("after a start %d ports are applied, error %v", len(o.Applied.Ports), o.Err)
	}
	if input, err := repair(a, lb.IPv4); err != nil || input != "" {
		t.Errorf("after a start the kernel lacks, %v:\n%.2000s", err, input)
	}
	for _, input := range watched.writes {
		if strings.Contains(input, s.Key.String()) {
			t.Errorf("rules that were right were written:\n%.2000s", input)
		}
	}
	a.Set(plans(large(3, 5, 2)))
	if err := settle(a, false); !errors.As(err, new(plan.TooLarge)) {
		t.Errorf("after a change: %v", err)
	}
	if o := a.Outcomes()[s.Key]; len(o.Applied.Ports) != len(s.Ports) {
		t.Errorf("after a change %d ports are applied", len(o.Applied.Ports))
	}
}

// Contract clause 11: a Service with a part that the kernel refuses waits ever longer between its
// tries, whether or not others are written meanwhile, and they are.
func TestContract11ARefusedPartBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kernel := newFakeKernel()
		var tries []time.Duration
		began := time.Now()
		watched := &spy{Kernel: kernel, refuse: func(input string) error {
			if !strings.Contains(input, "--dport 1050 ") {
				return nil
			}
			tries = append(tries, time.Since(began))
			return errors.New("this rule is refused")
		}}
		a := actorWith(dialect.Deps{}, map[lb.Family]Kernel{lb.IPv4: watched})
		a.families[0].batch = 500
		a.Configure(seedConfig)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		s := large(60, 60, 0)
		a.Set(plans(s))
		written := 0
		for version := range 120 {
			before := kernel.restores
			a.Update(many(5, version))
			time.Sleep(time.Second)
			synctest.Wait()
			if kernel.restores > before {
				written++
			}
		}
		if n := len(tries); n < 5 || n > 12 {
			t.Errorf("%d tries in two minutes: %v", n, tries)
		}
		if written < 120 {
			t.Errorf("others were written %d times of 120", written)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Contract clause 11: at a start the others' rules are written before those of a large Service are even
// rendered, though its name comes first.
func TestContract11AStartWritesOthersFirst(t *testing.T) {
	watched := &spy{Kernel: newFakeKernel()}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
	f := a.families[0]
	f.batch = 500
	s := large(60, 60, 0)
	all := many(5, 2)
	all[s.Key] = s
	watched.refuse = func(input string) error {
		if len(watched.writes) == 0 && (len(f.want[s.Key].rules.chains) > 0 || strings.Contains(input, s.Key.String()) ||
			!strings.Contains(input, "bench/svc-00004")) {
			t.Errorf("%d chains of the large Service are rendered, and written is:\n%.1000s",
				len(f.want[s.Key].rules.chains), input)
		}
		return nil
	}
	a.Set(all)
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	if o := a.Outcomes()[s.Key]; o.Err != nil || len(o.Applied.Ports) != len(s.Ports) {
		t.Errorf("in the end %d ports are applied, error %v", len(o.Applied.Ports), o.Err)
	}
}

// Contract clause 11: beside a Service that is too large the rules that concern no Service are written in
// the first round, also if there is no other Service.
func TestContract11TooLargeAlone(t *testing.T) {
	for _, batch := range []int{0, 500} {
		kernel, fresh := newFakeKernel(), newFakeKernel()
		a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
		a.families[0].batch, a.families[0].most = batch, 40
		s := large(3, 5, 1)
		a.Set(plans(s))
		if err := settle(a, false); !errors.As(err, new(plan.TooLarge)) {
			t.Error(err)
		}
		without := newActor(map[lb.Family]Kernel{lb.IPv4: fresh}, seedConfig)
		without.Set(nil)
		if err := settle(without, false); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(fmt.Sprint(fresh.tables), fmt.Sprint(kernel.tables)); d != "" || len(fresh.tables) == 0 {
			t.Errorf("batch %d (-without it +with it):\n%s", batch, d)
		}
	}
}

// servesPort reports whether the kernel has a rule for a port of a large Service.
func (k *fakeKernel) servesPort(port uint16) bool {
	return strings.Contains(fmt.Sprint(k.tables["nat"]), fmt.Sprintf("--dport %d ", port))
}

// partsOfTen returns rules that are written ten at a time.
func partsOfTen() (*fakeKernel, *testActor, *family) {
	kernel := newFakeKernel()
	a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
	f := a.families[0]
	f.batch, f.once, f.portion, f.least = 500, 10, 10, 10
	return kernel, a, f
}

// wantHeldServed fails the test if a port is said to be applied that the kernel does not have.
func wantHeldServed(t *testing.T, f *family, kernel *fakeKernel, key lb.Key) {
	t.Helper()
	held, _ := f.Held(key)
	for _, p := range held.Ports {
		if port := p.Frontends[0].Port; !kernel.servesPort(port) {
			t.Errorf("port %d is said to be applied, and is not in the kernel", port)
		}
	}
}

// Ports that are given up and asked for again amid parts are not said to be applied while they are not there.
func TestContract1PortsThatComeBackAmidParts(t *testing.T) {
	kernel, a, f := partsOfTen()
	all, fewer := large(8, 7, 0), large(8, 7, 1)
	a.Set(plans(all))
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	fewer.Ports = fewer.Ports[:2]
	f.Touch(all.Key)
	f.Want(all.Key, fewer)
	for gone := false; !gone; {
		f.portion = 10
		if _, err := f.Commit(t.Context(), []lb.Key{all.Key}); !errors.Is(err, dialect.ErrUnfinished) {
			t.Fatal(err)
		}
		for i := range uint16(8) {
			gone = gone || !kernel.servesPort(1000+i)
		}
	}
	f.Touch(all.Key)
	f.Want(all.Key, all)
	f.portion = 10
	if _, err := f.Commit(t.Context(), []lb.Key{all.Key}); !errors.Is(err, dialect.ErrUnfinished) {
		t.Fatal(err)
	}
	wantHeldServed(t, f, kernel, all.Key)
}

// A Service that becomes too large amid parts is not said to be applied beyond them.
func TestContract1TooLargeAmidParts(t *testing.T) {
	kernel, _, f := partsOfTen()
	s := large(8, 7, 0)
	f.Configure(seedConfig)
	f.Touch(s.Key)
	f.Want(s.Key, s)
	for len(f.held[s.Key].rules.entries) < 8 {
		f.portion = 10
		if _, err := f.Commit(t.Context(), []lb.Key{s.Key}); !errors.Is(err, dialect.ErrUnfinished) {
			t.Fatal(err)
		}
	}
	next := s
	f.most = 20
	next.Ports = slices.DeleteFunc(slices.Clone(s.Ports), func(p plan.Port) bool { return p.Frontends[0].Port == 1003 })
	f.Touch(s.Key)
	f.Want(s.Key, next)
	_, _ = f.Commit(t.Context(), []lb.Key{s.Key}) // which says that it is too large
	wantHeldServed(t, f, kernel, s.Key)
}

// A change of one endpoint renders the chains of the others not again, and comes to the same as if it did.
func TestEndpointsAreRenderedOnce(t *testing.T) {
	r := renderer{seedConfig, lb.IPv4}
	before, now := largeNumber(0, 3, 20, 1), largeNumber(0, 3, 20, 2)
	forgetful := now
	forgetful.AffinityTimeout = 0
	old := r.service(before).chains
	again := r.again(now, old)
	kept := 0
	for chain, rules := range again.chains {
		if strings.HasPrefix(chain, prefixEndpoint) && isOne(rules, old[chain]) {
			kept++
		}
	}
	if kept != 3*19 {
		t.Errorf("%d chains of endpoints were kept, want %d", kept, 3*19)
	}
	for _, s := range []plan.Service{now, forgetful} {
		for name, got := range map[string]chains{"at once": r.again(s, old).chains,
			"by port": together(r.byPort(s, old)).chains} {
			if d := cmp.Diff(r.service(s).chains, got); d != "" {
				t.Errorf("%s, affinity %v (-fresh +again):\n%s", name, s.AffinityTimeout, d)
			}
		}
	}
}
