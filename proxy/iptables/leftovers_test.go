package iptables

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// choosyKernel refuses what adds to some Services' own chains, and notes what it is given.
type choosyKernel struct {
	*fakeKernel
	refuses map[lb.Key]bool
	inputs  []string
}

func (k *choosyKernel) Restore(ctx context.Context, input string) error {
	for line := range strings.Lines(input) {
		op, rest, _ := strings.Cut(line, " ")
		chain, r, _ := strings.Cut(rest, " ")
		for key := range k.refuses {
			if (op == "-A" || op == "-I") && ofOne(chain) && strings.Contains(r, key.String()+":") {
				return errors.New("as the test wants")
			}
		}
	}
	k.inputs = append(k.inputs, input)
	return k.fakeKernel.Restore(ctx, input)
}

// reached returns the chains in the table nat that packets come to from the built-in ones.
func (k *choosyKernel) reached() map[string]bool { return k.from("PREROUTING", "OUTPUT") }

// from returns the chains in the table nat that packets come to from some.
func (k *choosyKernel) from(chains ...string) map[string]bool {
	nat, seen := k.tables["nat"], map[string]bool{}
	var visit func(chain string)
	visit = func(chain string) {
		for _, r := range nat[chain] {
			if t := target(r); strings.HasPrefix(t, prefix) && !seen[t] {
				seen[t] = true
				visit(t)
			}
		}
	}
	for _, chain := range chains {
		visit(chain)
	}
	return seen
}

// chainsOf returns the chains in the table nat that belong to a Service: those of its ports, and
// those to which they jump.
func (k *choosyKernel) chainsOf(s plan.Service) map[string][]string {
	nat, own := k.tables["nat"], map[string][]string{}
	var visit func(chain string)
	visit = func(chain string) {
		rules, ok := nat[chain]
		if _, seen := own[chain]; !ok || seen || chain == chainMasquerade || !strings.HasPrefix(chain, prefix) {
			return
		}
		own[chain] = rules
		for _, r := range rules {
			visit(target(r))
		}
	}
	for _, p := range s.Ports {
		for _, start := range []string{prefixExternal, prefixSourceRange, prefixCluster, prefixLocal} {
			visit(start + suffix(s.Key, p))
		}
	}
	return own
}

// damage makes of a predecessor's rules those of a run that was interrupted, of another release, or
// what others did to them. No rule jumps nowhere after it, as the kernel does not take that.
func (k *choosyKernel) damage(r *rand.Rand) {
	for range r.IntN(6) {
		table := k.tables[pick(r, "nat", "nat", "filter")]
		var ours []string
		for _, chain := range slices.Sorted(maps.Keys(table)) {
			if strings.HasPrefix(chain, prefix) {
				ours = append(ours, chain)
			}
		}
		if len(ours) == 0 {
			continue
		}
		chain := ours[r.IntN(len(ours))]
		rules := slices.Clone(table[chain])
		switch r.IntN(7) {
		case 0: // written as far as this
			table[chain] = rules[:r.IntN(len(rules)+1)]
		case 1: // one that is gone
			if len(rules) > 0 {
				i := r.IntN(len(rules))
				table[chain] = slices.Delete(rules, i, i+1)
			}
		case 2: // in another order, and one twice
			r.Shuffle(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
			if table[chain] = rules; len(rules) > 0 {
				table[chain] = append(rules, rules[0])
			}
		case 3: // another release's words
			for i := range rules {
				rules[i] = strings.Replace(rules[i], `--comment "`, `--comment "v0 `, 1)
			}
			table[chain] = rules
		case 4: // another release's names of chains that Services share
			shared := slices.DeleteFunc(ours, func(chain string) bool { // a release keeps the names of those that are hooked
				return ofOne(chain) || hooked(table, chain)
			})
			if len(shared) > 0 {
				chain = shared[r.IntN(len(shared))]
				rename(table, chain, prefix+"V0-"+strings.TrimPrefix(chain, prefix))
			}
		case 5: // another release's chain behind a Service's
			if table[chain] != nil {
				table[prefix+"V0-BEHIND"] = []string{`-m comment --comment "v0" -j RETURN`}
				table[chain] = append(rules, `-m comment --comment "v0" -j `+prefix+"V0-BEHIND")
			}
		case 6: // jumps to our chains
			for _, hook := range []string{"PREROUTING", "OUTPUT", "INPUT", "FORWARD"} {
				if hooks := table[hook]; len(hooks) > 0 && r.IntN(2) == 0 {
					table[hook] = append([]string{`-m comment --comment theirs -j KUBE-SERVICES`}, hooks[1:]...)
				}
			}
		}
	}
}

// hooked reports whether a built-in chain jumps to a chain.
func hooked(table chains, chain string) bool {
	for from, rules := range table {
		if !strings.HasPrefix(from, prefix) &&
			slices.ContainsFunc(rules, func(r string) bool { return target(r) == chain }) {
			return true
		}
	}
	return false
}

func rename(table chains, old, now string) {
	table[now] = table[old]
	delete(table, old)
	for chain, rules := range table {
		for i, r := range rules {
			if target(r) == old {
				rules = slices.Clone(rules)
				rules[i] = strings.Replace(r, "-j "+old, "-j "+now, 1)
				table[chain] = rules
			}
		}
	}
}

// Contract clause 6: a start over what another run has left, half written or written otherwise,
// ends in the rules of a fresh start. Until a Service's own rules are in place, its old ones stay
// and are reached; what is not wanted is removed.
func TestContract6StartOverLeftovers(t *testing.T) {
	t.Parallel()
	// Those that find a jump to a chain of refusals that goes, that another Service's chains count as a
	// way, a way over two chains that is lost, and a rule that stands there twice.
	found := []uint64{3, 14, 40, 96, 181}
	seeds.Run(t, seeds.Of(50, 3000), found, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 17))
		k := &choosyKernel{fakeKernel: newFakeKernel(), refuses: map[lb.Key]bool{}}
		start := func(k Kernel, config plan.Config, all map[lb.Key]plan.Service) (*testActor, error) {
			a := newActor(map[lb.Family]Kernel{lb.IPv4: k}, config)
			a.families[0].batch = int(seed % 4)
			a.Set(all)
			return a, settle(a, false)
		}
		before, now := map[lb.Key]plan.Service{}, map[lb.Key]plan.Service{}
		for n := range 6 {
			s := random(r, n).Only(lb.IPv4)
			if before[s.Key] = s; r.IntN(3) > 0 {
				s = random(r, n).Only(lb.IPv4)
			}
			if now[s.Key] = s; r.IntN(4) == 0 {
				delete(now, s.Key)
			}
		}
		predecessor := randomConfig(r)
		if _, err := start(k, predecessor, before); err != nil {
			t.Fatal(err)
		}
		k.damage(r)
		few := pick(r, 1, 3, 3)
		for _, key := range slices.SortedFunc(maps.Keys(now), lb.Key.Compare) {
			if r.IntN(few) == 0 {
				k.refuses[key] = true
			}
		}
		old, reached, config := map[lb.Key]map[string][]string{}, k.reached(), randomConfig(r)
		config.NodePortAddresses = predecessor.NodePortAddresses // else they are reached elsewhere, or nowhere
		for key := range k.refuses {
			old[key] = k.chainsOf(now[key])
		}
		k.inputs = nil
		predecessors := tables{nat: maps.Clone(k.tables["nat"]), filter: maps.Clone(k.tables["filter"])}
		a, err := start(k, config, now)
		said := a.Outcomes()
		for key := range now {
			if o := said[key]; (o.Err != nil) != k.waits(a, key) {
				t.Errorf("outcome of %s: %v; refused are %v", key, o.Err, k.refuses)
			}
		}
		still := k.reached()
		for key, chains := range old {
			if !k.waits(a, key) {
				continue // there was nothing to add
			}
			for chain, rules := range chains {
				if d := cmp.Diff(rules, k.tables["nat"][chain]); d != "" {
					t.Errorf("%s of %s, which waits (-before +now):\n%s", chain, key, d)
				}
				if reached[chain] && !still[chain] {
					t.Errorf("%s of %s, which waits, is not reached any more", chain, key)
				}
			}
		}
		k.untouched(t, a, predecessors)
		k.orphans(t, a, old)
		if len(k.refuses) == 0 && err != nil {
			t.Error(err)
		}
		clear(k.refuses)
		for range 2 {
			if err := settle(a, false); err != nil {
				t.Fatal(err)
			}
		}
		fresh := newFakeKernel()
		if _, err := start(fresh, config, now); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(listing(t, fresh), k.ours(t)); d != "" {
			t.Errorf("not as after a fresh start (-fresh +got):\n%s", d)
		}
	})
}

// waits reports whether a Service's own rules are not in place.
func (k *choosyKernel) waits(a *testActor, key lb.Key) bool {
	_, held := a.families[0].held[key]
	return !held
}

// untouched fails the test if chains of Services were written although they were right, or if the
// refusals at the cluster IP of a Service that waits have gone.
func (k *choosyKernel) untouched(t *testing.T, a *testActor, before tables) {
	t.Helper()
	f := a.families[0]
	for key, s := range f.want {
		right := true
		for chain, rules := range s.rules.chains {
			right = right && slices.Equal(before.nat[chain], rules)
		}
		for line := range strings.Lines(strings.Join(k.inputs, "")) {
			_, rest, _ := strings.Cut(line, " ")
			chain, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
			if _, own := s.rules.chains[chain]; own && right {
				t.Errorf("the rules of %s were right; written was %s", key, line)
			}
		}
		for _, e := range s.rules.entries {
			bucket := e.filter && strings.HasSuffix(e.rule, " "+chainRefuse)
			if bucket && k.waits(a, key) && slices.Contains(before.filter[e.chain], e.rule) &&
				!slices.Contains(k.tables["filter"][e.chain], e.rule) {
				t.Errorf("%s waits, and %s has lost %s", key, e.chain, e.rule)
			}
		}
	}
}

// orphans fails the test if there are chains of ours that nobody needs: of no Service that is
// wanted, and not on the way to what waits.
func (k *choosyKernel) orphans(t *testing.T, a *testActor, old map[lb.Key]map[string][]string) {
	t.Helper()
	f := a.families[0]
	if err := f.Prepare(t.Context(), false); err != nil { // the last call may have failed
		t.Fatal(err)
	}
	needed := f.all(nil).nat
	waiting := map[string]bool{}
	for key, chains := range old {
		for chain := range chains {
			waiting[chain] = waiting[chain] || k.waits(a, key)
		}
	}
	for chain, rules := range k.tables["nat"] {
		if _, ok := needed[chain]; ok || !strings.HasPrefix(chain, prefix) || waiting[chain] {
			continue
		}
		leads := false
		for to := range k.from(chain) {
			leads = leads || waiting[to]
		}
		if ofOne(chain) || !leads {
			t.Errorf("%s is needed for nothing: %q", chain, rules)
		}
	}
	for chain := range k.tables["filter"] {
		if _, ok := f.all(nil).filter[chain]; !ok && strings.HasPrefix(chain, prefix) {
			t.Errorf("%s in the table filter is needed for nothing", chain)
		}
	}
}

// ours is listing without what others have put into the built-in chains.
func (k *choosyKernel) ours(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(listing(t, k)) {
		if !strings.HasSuffix(line, "-j KUBE-SERVICES\n") {
			b.WriteString(line)
		}
	}
	return b.String()
}
