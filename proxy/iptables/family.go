package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// service is one Service's plan and what it renders to.
type service struct {
	plan  plan.Service
	rules contribution
}

// family keeps the rules of one address family. One goroutine owns it.
type family struct {
	kernel Kernel
	// batch is how many Services one call of iptables-restore writes at most; 0 for any number.
	batch int
	renderer
	configured bool
	// fixed are the rules that depend on no Service.
	fixed tables
	// unusable says why this family has no kernel on this node; nil when it has one.
	unusable error

	want map[lb.Key]service
	// held are the Services whose rules the kernel has confirmed.
	held map[lb.Key]service
	// failed says why what is wanted for a Service is not held.
	failed map[lb.Key]error
	// blamed are the failed ones that fail by themselves, while others do not.
	blamed map[lb.Key]bool
	// dirty are the Services for which want and held may differ.
	dirty map[lb.Key]bool
	// tried is set once what the kernel holds was known, and all that was wanted then has been tried.
	tried bool
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
	// reported is set for Services whose outcome has to be told.
	reported map[lb.Key]bool
}

func newFamily(name lb.Family, kernel Kernel) *family {
	return &family{
		kernel: kernel, renderer: renderer{family: name}, shared: shared{},
		want: map[lb.Key]service{}, held: map[lb.Key]service{}, failed: map[lb.Key]error{}, blamed: map[lb.Key]bool{},
		dirty: map[lb.Key]bool{}, reported: map[lb.Key]bool{},
	}
}

// configure takes what all rules depend on. A change makes every Service dirty.
func (f *family) configure(config plan.Config) {
	if f.configured && reflect.DeepEqual(f.config, config) {
		return
	}
	f.config, f.configured, f.whole = config, true, true
	f.fixed = f.base()
	for key, s := range f.want {
		f.want[key] = service{s.plan, f.service(s.plan)}
		f.dirty[key] = true
	}
}

// set takes what is wanted for one Service; a plan without ports of this family stands for nothing.
func (f *family) set(key lb.Key, s plan.Service) {
	s = s.Only(f.family)
	f.dirty[key] = true
	if len(s.Ports) == 0 {
		delete(f.want, key)
		return
	}
	f.want[key] = service{s, f.service(s)}
}

// stats say what a sync did.
type stats struct {
	lines    int // written to iptables-restore
	failures int // of iptables-restore
	partial  int // those that named only what had changed
	repaired int // lines that it takes to undo what others did to our rules
	verified bool
}

// sync makes the kernel hold what is wanted. With verify, or when it is not known, it reads what
// the kernel holds first.
func (f *family) sync(ctx context.Context, verify bool) (stats, error) {
	var st stats
	if f.unusable != nil {
		f.refuseAll()
		f.tried = true
		return st, nil
	}
	if verify || f.have == nil {
		if err := f.read(ctx, &st, verify); err != nil {
			f.fail(slices.Collect(maps.Keys(f.dirty)), err)
			return st, err
		}
	}
	var fresh, blamed []lb.Key
	for _, key := range slices.SortedFunc(maps.Keys(f.dirty), lb.Key.Compare) {
		if f.blamed[key] {
			blamed = append(blamed, key)
		} else {
			fresh = append(fresh, key)
		}
	}
	var errs []error
	for _, keys := range f.batches(fresh) {
		err := f.attempt(ctx, keys, &st)
		if errors.As(err, new(generalError)) || ctx.Err() != nil {
			return st, err
		}
		errs = append(errs, err)
	}
	// Those that failed before are tried one by one, so that they hold nobody back.
	for _, key := range blamed {
		errs = append(errs, f.attempt(ctx, []lb.Key{key}, &st))
	}
	if len(f.leftovers.chains) > 0 {
		f.whole = true
		errs = append(errs, f.attempt(ctx, nil, &st))
	}
	f.tried = true
	if len(f.dirty) == 0 {
		f.dirty = map[lb.Key]bool{} // a map that was large once is slow to go through for ever
	}
	return st, errors.Join(errs...)
}

// batches divides Services among calls of iptables-restore. iptables-nft takes a time that grows
// with the square of the number of chains that it is given. What is right in the kernel already
// costs nothing and comes first, with all that concerns no Service.
func (f *family) batches(keys []lb.Key) [][]lb.Key {
	if f.batch == 0 || len(keys) <= f.batch {
		return [][]lb.Key{keys}
	}
	var right, rest []lb.Key
	for _, key := range keys {
		if s, ok := f.want[key]; ok && f.whole && f.intact(s.rules) {
			right = append(right, key)
		} else {
			rest = append(rest, key)
		}
	}
	return append([][]lb.Key{right}, slices.Collect(slices.Chunk(rest, f.batch))...)
}

// generalError is a failure for which no Service is to blame.
type generalError struct{ error }

func (e generalError) Unwrap() error { return e.error }

// refuseAll is for a family that the node does not have: nothing is held, and nothing will be.
func (f *family) refuseAll() {
	for key := range f.dirty {
		f.reported[key] = true
		if _, ok := f.want[key]; ok {
			f.failed[key] = f.unusable
		} else {
			delete(f.failed, key)
		}
	}
	clear(f.dirty)
}

// read learns what the kernel holds.
func (f *family) read(ctx context.Context, st *stats, verify bool) error {
	have, err := readSave(ctx, f.kernel)
	if err != nil {
		return err
	}
	for _, service := range f.want { // what is as wanted is worth keeping once
		for chain, rules := range service.rules.chains {
			if slices.Equal(have.nat[chain], rules) {
				have.nat[chain] = rules
			}
		}
	}
	f.have, f.whole = &have, true
	st.verified = true
	if verify && f.tried {
		want := f.all(nil)
		repair, _ := script(have, want, f.hooks(), newLeftovers(have.nat, want.nat, f.unconfirmed(nil)))
		st.repaired = strings.Count(repair, "\n")
	}
	return nil
}

// attempt applies the wanted rules of the named Services, together with any repair that is due.
// When that fails it finds out which of them are to blame, and applies the others.
func (f *family) attempt(ctx context.Context, keys []lb.Key, st *stats) error {
	err := f.apply(ctx, keys, st)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return err
	}
	// Without any Service's change: does the kernel take our rules at all?
	if baseErr := f.applyBase(ctx, st); baseErr != nil {
		f.fail(keys, baseErr)
		f.distrust(ctx, baseErr, st)
		return generalError{baseErr}
	}
	return f.blame(ctx, keys, err, st)
}

// applyBase applies what is due without any Service's change, and makes sure that iptables-restore
// works at all.
func (f *family) applyBase(ctx context.Context, st *stats) error {
	if err := f.apply(ctx, nil, st); err != nil {
		return err
	}
	return f.kernel.Restore(ctx, "*nat\nCOMMIT\n")
}

// blame bisects keys, whose common change failed with err.
func (f *family) blame(ctx context.Context, keys []lb.Key, err error, st *stats) error {
	if len(keys) == 0 {
		return nil // it was the repair, which has succeeded by now
	}
	if len(keys) == 1 {
		f.fail(keys, err)
		f.blamed[keys[0]] = true
		return fmt.Errorf("rules of %s: %w", keys[0], err)
	}
	var errs []error
	for _, half := range [][]lb.Key{keys[:len(keys)/2], keys[len(keys)/2:]} {
		if err := f.apply(ctx, half, st); err != nil {
			if ctx.Err() != nil {
				return err
			}
			errs = append(errs, f.blame(ctx, half, err, st))
		}
	}
	return errors.Join(errs...)
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
	for key := range f.dirty {
		if _, held := f.held[key]; held || named[key] {
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

// fail notes why Services are not as wanted.
func (f *family) fail(keys []lb.Key, err error) {
	for _, key := range keys {
		f.failed[key] = err
		f.reported[key] = true
	}
}

// distrust is for when the kernel does not take the rules of Services that it held: those whose
// rules are no longer in the kernel are not held.
func (f *family) distrust(ctx context.Context, err error, st *stats) {
	if f.have == nil && f.read(ctx, st, false) != nil {
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
		f.shared.add(s.rules.entries, -1, map[place]bool{})
		f.dirty[key] = true
		f.fail([]lb.Key{key}, err)
	}
}

// intact tells whether the kernel has all rules of a Service.
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
