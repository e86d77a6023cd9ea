package iptables

import (
	"context"
	"reflect"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// service is one Service's plan and what it renders to.
type service struct {
	plan  plan.Service
	rules contribution
	// refusal says why the Service is not written; nil if it is. It has no rules then.
	refusal error
	// unrendered is set if the rules are so many that they are rendered when it is their turn to be written.
	unrendered bool
	// ports are the rules by port; nil if that has to be found out.
	ports map[string]contribution
}

// family keeps the rules of one address family. One goroutine owns it.
type family struct {
	*dialect.Ledger
	kernel Kernel
	// batch is how many Services one call of iptables-restore writes at most; 0 for any number.
	batch int
	// most is how many rules a Service may have; 0 for as many as the variant allows. One with more than
	// once is not written at once.
	most, once int
	renderer
	configured bool
	// fixed are the rules that depend on no Service.
	fixed tables

	want map[lb.Key]service
	// held are the Services whose rules the kernel has confirmed.
	held map[lb.Key]service
	// shared are the rules of held Services in the chains that they share.
	shared shared
	// have is what the kernel holds; nil when that is not known.
	have *tables
	// size counts our rules in what the kernel was last known to hold.
	size struct{ nat, filter int }
	// whole is set when any chain may differ from what is wanted. Else only those can of which
	// Services are dirty.
	whole bool
	// leftovers stay for Services that are not held yet.
	leftovers leftovers
	// parted are the Services of which a part is written, dividing is set while that is being done, and
	// portion is how many rules the next part may name, least how many any part may.
	parted         map[lb.Key]parting
	dividing       bool
	portion, least int
}

var _ dialect.Rules = (*family)(nil)

func newFamily(name lb.Family, kernel Kernel, batch int, ledger *dialect.Ledger) *family {
	return &family{
		Ledger: ledger, kernel: kernel, batch: batch, renderer: renderer{family: name}, shared: shared{},
		want: map[lb.Key]service{}, held: map[lb.Key]service{},
		parted: map[lb.Key]parting{}, once: maxRules, portion: maxRules / 4, least: minRules,
	}
}

// Configure implements dialect.Rules.
func (f *family) Configure(config plan.Config) {
	if f.configured && reflect.DeepEqual(f.config, config) {
		return
	}
	f.config, f.configured, f.whole = config, true, true
	f.fixed = f.base()
	for key, s := range f.want {
		f.Want(key, s.plan)
		f.Touch(key)
	}
}

// Want implements dialect.Rules.
func (f *family) Want(key lb.Key, s plan.Service) {
	if len(s.Ports) == 0 {
		delete(f.want, key)
		return
	}
	f.want[key] = f.render(s, f.held[key].rules.chains)
}

// render renders a Service, unless it is too large, or so large that the others would wait for it.
func (f *family) render(s plan.Service, before chains) service {
	limit := MaxServiceRules
	switch {
	case f.most > 0:
		limit = f.most
	case f.batch == 0:
		limit = MaxLegacyRules
	}
	n := f.count(s)
	switch {
	case n > limit:
		return service{plan: s, refusal: plan.TooLarge{Elements: n, Limit: limit, Of: "rules"}}
	case f.batch > 0 && n > f.once:
		return service{plan: s, unrendered: true}
	}
	return service{plan: s, rules: f.again(s, before)}
}

// rendered makes sure that the rules of a Service are rendered.
func (f *family) rendered(key lb.Key) {
	s := f.want[key]
	if !s.unrendered {
		return
	}
	s.ports, s.unrendered = f.byPort(s.plan, f.held[key].rules.chains), false
	s.rules = together(s.ports)
	f.want[key] = s
	f.keepOnce(s.rules)
}

// keepOnce drops the rules of the kernel that are as wanted: they are worth keeping once.
func (f *family) keepOnce(wanted contribution) {
	for chain, rules := range wanted.chains {
		if slices.Equal(f.have.nat[chain], rules) {
			f.have.nat[chain] = rules
		}
	}
}

// Held implements dialect.Rules. Rules of different Services never stand in each other's way.
func (f *family) Held(key lb.Key) (plan.Service, error) {
	if p, ok := f.parted[key]; ok {
		return p.before, nil
	}
	return f.held[key].plan, nil
}

// Size implements dialect.Rules.
func (f *family) Size() map[string]int {
	return map[string]int{"nat": f.size.nat, "filter": f.size.filter}
}

// Prepare implements dialect.Rules.
func (f *family) Prepare(ctx context.Context, verify bool) error {
	if !verify && f.have != nil {
		return nil
	}
	return f.read(ctx, verify)
}

// Commit implements dialect.Rules. iptables-nft takes a time that grows with the square of the
// number of chains that it is given. What is right in the kernel already costs nothing and comes
// first, with all that concerns no Service.
func (f *family) Commit(ctx context.Context, keys []lb.Key) (n int, err error) {
	if f.have == nil {
		if err := f.read(ctx, false); err != nil {
			return len(keys), dialect.General(err)
		}
	}
	if i := slices.IndexFunc(keys, f.alone); i == 0 && len(keys) > 1 {
		return 1, dialect.ErrUnfinished
	} else if i == 0 {
		return 1, f.commitAlone(ctx, keys[0])
	} else if i > 0 {
		keys = keys[:i]
	}
	n = len(keys)
	switch {
	case f.batch > 0 && n > f.batch && f.whole:
		n = f.rightFirst(keys)
	case f.batch > 0:
		n = f.fitting(keys[:min(n, f.batch)])
	}
	return n, f.apply(ctx, keys[:n])
}

// fitting returns how many of the Services one call writes.
func (f *family) fitting(keys []lb.Key) int {
	rules := 0
	for i, key := range keys {
		rules += cost(f.held[key].rules, f.want[key].rules)
		if i > 0 && rules > maxBatchRules {
			return i
		}
	}
	return len(keys)
}

// alone reports whether a Service has to be looked at when no others wait: it is too large, or large.
func (f *family) alone(key lb.Key) bool {
	s := f.want[key]
	return s.refusal != nil || s.unrendered || f.large(key)
}

// commitAlone writes a Service that is large, or a part of it, or what has to go of one that is too large.
func (f *family) commitAlone(ctx context.Context, key lb.Key) error {
	if f.refused(key) {
		err := f.yield(ctx, key)
		if err == nil && f.whole {
			err = f.apply(ctx, nil) // what concerns no Service does not wait for it
		}
		if err != nil {
			return err
		}
		return dialect.Own(f.want[key].refusal)
	}
	if f.rendered(key); f.large(key) {
		return f.applyPart(ctx, key)
	}
	return f.apply(ctx, []lb.Key{key})
}

// refused reports whether a Service is too large. One that a predecessor has written as it is
// wanted is served as it was: there is nothing to write.
func (f *family) refused(key lb.Key) bool {
	s := f.want[key]
	if s.refusal == nil {
		return false
	}
	if _, held := f.held[key]; held || f.Tried() {
		return true
	}
	for _, p := range s.plan.Ports {
		_, cluster := f.have.nat[prefixCluster+suffix(key, p)]
		if _, local := f.have.nat[prefixLocal+suffix(key, p)]; !cluster && !local {
			continue
		}
		if rules := f.service(s.plan); f.intact(rules) {
			f.want[key] = service{plan: s.plan, rules: rules}
			return false
		}
		break
	}
	return true
}

// yield takes the rules that lead to a Service which is too large out of the chains that Services
// share, where the Service does not ask for the frontend any more: another one may get it, and the
// first rule in a chain wins.
func (f *family) yield(ctx context.Context, key lb.Key) error {
	held, ok := f.held[key]
	if !ok {
		return nil
	}
	want, asked := f.want[key], map[entry]bool{}
	for _, s := range []plan.Service{held.plan, f.parted[key].before} {
		for _, e := range f.entries(s.Within(want.plan)) {
			asked[e] = true
		}
	}
	gone := func(e entry) bool { return !asked[e] }
	if !slices.ContainsFunc(held.rules.entries, gone) {
		return nil
	}
	rules := held.rules
	rules.entries = slices.DeleteFunc(slices.Clone(rules.entries), gone)
	stays := held.plan
	if p, ok := f.parted[key]; ok {
		stays = p.before // of what has come since, only a part is there
	}
	f.want[key] = service{plan: stays.Within(want.plan), rules: rules}
	err := f.apply(ctx, []lb.Key{key})
	f.want[key] = want
	f.Touch(key)
	return err
}

// rightFirst moves the Services whose rules the kernel has to the front, and returns how many they
// are.
func (f *family) rightFirst(keys []lb.Key) int {
	var right, rest []lb.Key
	for _, key := range keys {
		if s, ok := f.want[key]; ok && f.intact(s.rules) {
			right = append(right, key)
		} else {
			rest = append(rest, key)
		}
	}
	copy(keys, slices.Concat(right, rest))
	return len(right)
}

// Recover implements dialect.Rules: does the kernel take our rules at all, without any Service's
// change?
func (f *family) Recover(ctx context.Context) error {
	err := f.apply(ctx, nil)
	if err == nil {
		err = f.kernel.Restore(ctx, "*nat\nCOMMIT\n")
	}
	if err != nil {
		f.distrust(ctx, err)
	}
	return err
}

// Prune implements dialect.Rules.
func (f *family) Prune(ctx context.Context) error {
	if len(f.leftovers.chains) == 0 || len(f.parted) > 0 { // after the last part, not after each
		return nil
	}
	f.whole = true
	return f.apply(ctx, nil)
}

// read learns what the kernel holds.
func (f *family) read(ctx context.Context, verify bool) error {
	have, err := readSave(ctx, f.kernel)
	if err != nil {
		return err
	}
	f.Stats.Verified = true
	if verify && f.have != nil {
		hooks := f.hooks()
		f.Stats.Repaired += differences(f.have.nat, have.nat, hooks.nat) +
			differences(f.have.filter, have.filter, hooks.filter)
	}
	f.have, f.whole = &have, true
	for _, service := range f.want {
		f.keepOnce(service.rules)
	}
	return nil
}

// differences counts the rules of ours in which a table differs from what it was known to hold, our
// jumps from built-in chains among them, also if others have put theirs ahead of those.
func differences(known, have, hooks chains) int {
	ours := func(table chains, chain string) []string {
		if strings.HasPrefix(chain, prefix) {
			return table[chain]
		}
		return slices.DeleteFunc(slices.Clone(table[chain]),
			func(r string) bool { return !strings.HasPrefix(target(r), prefix) })
	}
	n := 0
	for chain := range union(known, have) {
		before, now := ours(known, chain), ours(have, chain)
		switch {
		case !slices.Equal(before, now):
			n += max(1, missing(before, now)+missing(now, before))
		case hooksRight(known[chain], hooks[chain]) && !hooksRight(have[chain], hooks[chain]):
			n++
		}
	}
	return n
}

// unconfirmed returns the chains that a predecessor left for Services that are wanted but not held:
// they go on serving until ours are in place. Chains to which they jump stay with them.
func (f *family) unconfirmed(keys []lb.Key) map[string]bool {
	keep := map[string]bool{}
	named := make(map[lb.Key]bool, len(keys))
	for _, key := range keys {
		named[key] = true
	}
	var visit func(chain string)
	visit = func(chain string) {
		rules, ok := f.have.nat[chain]
		if !ok || keep[chain] {
			return
		}
		keep[chain] = true
		for _, r := range rules {
			if t := target(r); strings.HasPrefix(t, prefix) && t != chainMasquerade {
				visit(t)
			}
		}
	}
	for key := range f.Dirty() {
		_, held := f.held[key]
		_, parted := f.parted[key]
		if held && !parted || named[key] && !f.dividing {
			continue
		}
		for _, p := range f.want[key].plan.Ports {
			for _, chain := range []string{prefixExternal, prefixSourceRange, prefixCluster, prefixLocal} {
				visit(chain + suffix(key, p))
			}
		}
	}
	return keep
}

// distrust is for when the kernel does not take the rules of Services that it held: those whose
// rules are no longer in the kernel are not held.
func (f *family) distrust(ctx context.Context, err error) {
	if f.have == nil && f.read(ctx, false) != nil {
		return // not known: nothing is said
	}
	whole := true
	hooks, base := f.hooks(), f.fixed
	for table, pair := range map[*chains][2]chains{&f.have.nat: {hooks.nat, base.nat},
		&f.have.filter: {hooks.filter, base.filter}} {
		for chain, jumps := range pair[0] {
			whole = whole && hooksRight((*table)[chain], jumps)
		}
		for chain, rules := range pair[1] {
			have, ok := (*table)[chain]
			whole = whole && ok && containsAll(have, rules)
		}
	}
	for key, s := range f.held {
		if whole && f.intact(s.rules) {
			continue
		}
		delete(f.held, key)
		delete(f.parted, key)
		f.shared.add(s.rules.entries, -1, map[place]bool{})
		f.Lost(key, err)
	}
}

// intact reports whether the kernel has all rules of a Service.
func (f *family) intact(c contribution) bool {
	for chain, rules := range c.chains {
		if !slices.Equal(f.have.nat[chain], rules) {
			return false
		}
	}
	for _, e := range c.entries {
		if !slices.Contains(e.in(*f.have)[e.chain], e.rule) {
			return false
		}
	}
	return true
}

func containsAll(have, want []string) bool {
	for _, r := range want {
		if !slices.Contains(have, r) {
			return false
		}
	}
	return true
}
