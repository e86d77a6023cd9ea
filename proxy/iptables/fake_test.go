package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// fakeKernel keeps rules as the kernel does, and refuses what it refuses: each table changes as a
// whole or not at all.
type fakeKernel struct {
	mu     sync.Mutex
	tables map[string]chains
	// fail is asked before each call; an error is returned to the caller, after the tables before
	// failAfter have been changed.
	fail                   func(call string) error
	failAfter              int
	saves, restores, lines int
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{tables: map[string]chains{
		"nat":    {"PREROUTING": nil, "INPUT": nil, "OUTPUT": nil, "POSTROUTING": nil},
		"filter": {"INPUT": nil, "FORWARD": nil, "OUTPUT": nil},
	}}
}

func (k *fakeKernel) Save(_ context.Context, read func(io.Reader) error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.saves++
	if k.fail != nil {
		if err := k.fail("save"); err != nil {
			return err
		}
	}
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(k.tables)) {
		fmt.Fprintf(&b, "*%s\n", table)
		for _, chain := range slices.Sorted(maps.Keys(k.tables[table])) {
			policy := "-"
			if !strings.HasPrefix(chain, prefix) {
				policy = "ACCEPT"
			}
			fmt.Fprintf(&b, ":%s %s [0:0]\n", chain, policy)
			for _, r := range k.tables[table][chain] {
				fmt.Fprintf(&b, "-A %s %s\n", chain, r)
			}
		}
		b.WriteString("COMMIT\n")
	}
	return read(strings.NewReader(b.String()))
}

func (k *fakeKernel) Restore(_ context.Context, input string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.restores++
	sections := strings.SplitAfter(input, "\nCOMMIT\n")
	var failure error
	if k.fail != nil {
		failure = k.fail("restore")
	}
	for i, section := range sections[:len(sections)-1] {
		if failure != nil && i >= k.failAfter {
			return failure
		}
		lines := strings.Split(strings.TrimSpace(section), "\n")
		table := lines[0][1:]
		now, err := change(k.tables[table], lines[1:len(lines)-1])
		if err != nil {
			return err
		}
		k.tables[table] = now
		k.lines += len(lines)
	}
	return failure
}

func change(before chains, lines []string) (chains, error) {
	now := chains{}
	for chain, rules := range before {
		now[chain] = slices.Clone(rules)
	}
	for _, line := range lines {
		op, rest, _ := strings.Cut(line, " ")
		chain, r, _ := strings.Cut(rest, " ")
		if strings.HasPrefix(line, ":") {
			now[op[1:]] = nil // an existing chain would be emptied
			continue
		}
		rules, ok := now[chain]
		if !ok {
			return nil, fmt.Errorf("%q: no such chain", line)
		}
		switch op {
		case "-A":
			now[chain] = append(rules, r)
		case "-I":
			var at int
			number, r, _ := strings.Cut(r, " ")
			if _, err := fmt.Sscan(number, &at); err != nil || at > len(rules)+1 {
				return nil, fmt.Errorf("%q: index too big", line)
			}
			now[chain] = slices.Insert(rules, at-1, r)
		case "-D":
			i := slices.Index(rules, r)
			if i < 0 {
				return nil, fmt.Errorf("%q: no such rule", line)
			}
			now[chain] = slices.Delete(rules, i, i+1)
		case "-F":
			now[chain] = nil
		case "-X":
			if len(rules) > 0 {
				return nil, fmt.Errorf("%q: not empty", line)
			}
			delete(now, chain)
		default:
			return nil, fmt.Errorf("%q: unknown", line)
		}
	}
	for chain, rules := range now {
		for _, r := range rules {
			if t := target(r); strings.HasPrefix(t, prefix) {
				if _, ok := now[t]; !ok {
					return nil, fmt.Errorf("%s: %q jumps nowhere", chain, r)
				}
			}
		}
	}
	return now, nil
}

// Whatever call fails, before, in the middle of, or after its effect: the next rounds end in the
// rules of a fresh start, and no outcome says that all is well with a Service whose rules the
// kernel lacks.
func TestContract1RandomFailures(t *testing.T) {
	t.Parallel()
	seeds.Run(t, seeds.Of(30, 500), nil, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 9))
		k := newFakeKernel()
		k.fail = func(string) error {
			k.failAfter = r.IntN(4)
			if r.IntN(4) == 0 {
				return errors.New("as the test wants")
			}
			return nil
		}
		start := func() *testActor {
			a := newActor(map[lb.Family]Kernel{lb.IPv4: k}, seedConfig)
			a.families[0].batch = int(seed % 4)
			if seed%3 == 0 {
				f := a.families[0]
				f.once, f.portion, f.least = 3, 3, 3 // all Services are large
			}
			return a
		}
		a := start()
		a.Set(nil)
		final, said := map[lb.Key]plan.Service{}, map[lb.Key]plan.Outcome{}
		for range 60 {
			s := random(r, r.IntN(6)).Only(lb.IPv4)
			if r.IntN(4) == 0 {
				s = plan.Service{Key: s.Key}
			}
			final[s.Key] = s
			a.Set(plans(s))
			if r.IntN(10) == 0 {
				a = start()
				a.Set(final)
				clear(said)
			}
			_ = settle(a, r.IntN(3) == 0) // fails now and then
			maps.Copy(said, a.Outcomes())
			checkOutcomes(t, k, said)
			if t.Failed() {
				t.FailNow()
			}
		}
		k.fail = nil
		for range 2 {
			if err := settle(a, false); err != nil {
				t.Fatal(err)
			}
		}
		if f := a.families[0]; f.size.nat != ours(k.tables["nat"]) || f.size.filter != ours(k.tables["filter"]) {
			t.Errorf("counted %+v rules, there are %d and %d", f.size, ours(k.tables["nat"]),
				ours(k.tables["filter"]))
		}
		maps.Copy(said, a.Outcomes())
		for key, s := range final {
			if o := said[key]; o.Err != nil || !plan.SameRules(o.Applied, s, lb.IPv4) {
				t.Errorf("outcome of %s: %+v", key, o)
			}
		}
		fresh := newFakeKernel()
		b := newActor(map[lb.Family]Kernel{lb.IPv4: fresh}, seedConfig)
		b.Set(final)
		if err := settle(b, false); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(listing(t, fresh), listing(t, k)); d != "" {
			t.Errorf("not as after a fresh start (-fresh +got):\n%s", d)
		}
	})
}

// checkOutcomes fails the test if a Service is said to be applied whose rules the kernel lacks.
// With an error, a restore may have ended between two tables: then the kernel holds something
// between the applied plan and the newer one.
func checkOutcomes(t *testing.T, k *fakeKernel, said map[lb.Key]plan.Outcome) {
	t.Helper()
	f := newFamily(lb.IPv4, k, 0, nil)
	f.renderer = renderer{seedConfig, lb.IPv4}
	f.have = &tables{nat: k.tables["nat"], filter: k.tables["filter"]}
	for key, o := range said {
		if o.Err == nil && !f.intact(f.service(o.Applied)) {
			t.Errorf("%s is not in the kernel as was said", key)
		}
	}
}

func TestRetriesAndVerification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeKernel()
		failures := 3
		k.fail = func(call string) error {
			if call == "restore" && failures > 0 {
				failures--
				return errors.New("no lock")
			}
			return nil
		}
		var rounds []dialect.Sync
		a := actorWith(dialect.Deps{
			Verify:  15 * time.Second,
			Observe: func(s dialect.Sync) { rounds = append(rounds, s) },
		}, map[lb.Family]Kernel{lb.IPv4: k})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		synctest.Wait()
		a.Configure(seedConfig)
		time.Sleep(time.Hour)
		if k.saves+k.restores != 0 {
			t.Error("touched the kernel before knowing what is wanted")
		}
		start := time.Now()
		a.Set(seed(func(*lb.Service) {}))
		for a.Outcomes(); !a.Tried; a.Outcomes() {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
		}
		if waited := time.Since(start); waited < 100*time.Millisecond || waited > time.Second {
			t.Errorf("rules were there after %s", waited)
		}
		written := k.lines
		time.Sleep(time.Minute)
		synctest.Wait()
		if k.lines != written {
			t.Error("right rules were written again")
		}
		k.mu.Lock()
		k.tables["nat"]["LF-SERVICES"] = nil
		k.mu.Unlock()
		time.Sleep(16 * time.Second)
		synctest.Wait()
		if len(k.tables["nat"]["LF-SERVICES"]) == 0 {
			t.Error("lost rules are not repaired")
		}
		if last := rounds[len(rounds)-1]; !last.Verified || last.Err != nil {
			t.Errorf("last round %+v", last)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if len(k.tables["nat"]["LF-SERVICES"]) == 0 {
			t.Error("the rules went with the actor")
		}
	})
}
