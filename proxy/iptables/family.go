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
	renderer
	configured bool
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
	// have is what the kernel holds; nil when that is not known.
	have *tables
	// reported is set for Services whose outcome has to be told.
	reported map[lb.Key]bool
}

func newFamily(name lb.Family, kernel Kernel) *family {
	return &family{
		kernel: kernel, renderer: renderer{family: name},
		want: map[lb.Key]service{}, held: map[lb.Key]service{}, failed: map[lb.Key]error{}, blamed: map[lb.Key]bool{},
		dirty: map[lb.Key]bool{}, reported: map[lb.Key]bool{},
	}
}

// configure takes what all rules depend on. A change makes every Service dirty.
func (f *family) configure(config plan.Config) {
	if f.configured && reflect.DeepEqual(f.config, config) {
		return
	}
	f.config, f.configured = config, true
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
	repaired int // lines that it takes to undo what others did to our rules
	verified bool
}

// sync makes the kernel hold what is wanted. With verify, or when it is not known, it reads what the kernel holds first.
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
	err := f.attempt(ctx, fresh, &st)
	if errors.As(err, new(generalError)) || ctx.Err() != nil {
		return st, err
	}
	// Those that failed before are tried one by one, so that they hold nobody back.
	errs := []error{err}
	for _, key := range blamed {
		errs = append(errs, f.attempt(ctx, []lb.Key{key}, &st))
	}
	f.tried = true
	return st, errors.Join(errs...)
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
	saved, err := f.kernel.Save(ctx)
	if err != nil {
		return err
	}
	have, err := parseSave(saved)
	if err != nil {
		return err
	}
	f.have = &have
	st.verified = true
	if verify && f.tried {
		st.repaired = strings.Count(f.script(nil), "\n")
	}
	return nil
}

// attempt applies the wanted rules of the named Services, together with any repair that is due. When that fails it finds out
// which of them are to blame, and applies the others.
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

// applyBase applies what is due without any Service's change, and makes sure that iptables-restore works at all.
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

// apply makes one call of iptables-restore for the named Services. The others stay as they are.
func (f *family) apply(ctx context.Context, keys []lb.Key, st *stats) error {
	if f.have == nil {
		if err := f.read(ctx, st, false); err != nil {
			return err
		}
	}
	if input := f.script(keys); input != "" {
		if err := f.kernel.Restore(ctx, input); err != nil {
			st.failures++
			f.have = nil
			return err
		}
		st.lines += strings.Count(input, "\n")
		f.record(keys)
	}
	for _, key := range keys {
		if s, ok := f.want[key]; ok {
			f.held[key] = s
		} else {
			delete(f.held, key)
		}
		delete(f.failed, key)
		delete(f.blamed, key)
		delete(f.dirty, key)
		f.reported[key] = true
	}
	return nil
}

// target returns the rules with the named Services as wanted and all others as they are held.
func (f *family) target(keys []lb.Key) tables {
	services := maps.Clone(f.held)
	for _, key := range keys {
		if s, ok := f.want[key]; ok {
			services[key] = s
		} else {
			delete(services, key)
		}
	}
	contributions := make([]contribution, 0, len(services))
	for _, s := range services {
		contributions = append(contributions, s.rules)
	}
	return f.ruleset(contributions)
}

func (f *family) script(keys []lb.Key) string {
	return script(*f.have, f.target(keys), f.hooks(), f.unconfirmed(keys))
}

// unconfirmed returns the chains that a predecessor left for Services that are wanted but not held: they go on serving until ours
// are in place. Chains to which they jump stay with them.
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

// record notes what the kernel holds after a restore succeeded.
func (f *family) record(keys []lb.Key) {
	if len(f.unconfirmed(keys)) > 0 {
		f.have = nil // ours and a predecessor's rules are mixed: read them when they matter
		return
	}
	want, hooks := f.target(keys), f.hooks()
	f.have = &tables{nat: hooked(f.have.nat, want.nat, hooks.nat), filter: hooked(f.have.filter, want.filter, hooks.filter)}
}

// hooked returns what a table holds once our own chains are as wanted and the built-in ones have our jumps.
func hooked(have, want, hooks chains) chains {
	now := maps.Clone(want)
	for chain, rules := range have {
		if !strings.HasPrefix(chain, prefix) {
			now[chain] = rules
		}
	}
	for chain, jumps := range hooks {
		if !hooksRight(now[chain], jumps) {
			others := slices.DeleteFunc(slices.Clone(now[chain]), func(r string) bool { return strings.HasPrefix(target(r), prefix) })
			now[chain] = append(slices.Clone(jumps), others...)
		}
	}
	return now
}

// fail notes why Services are not as wanted.
func (f *family) fail(keys []lb.Key, err error) {
	for _, key := range keys {
		f.failed[key] = err
		f.reported[key] = true
	}
}

// distrust is for when the kernel does not take the rules of Services that it held: those whose rules are no longer in the kernel are not held.
func (f *family) distrust(ctx context.Context, err error, st *stats) {
	if f.have == nil && f.read(ctx, st, false) != nil {
		return // not known: nothing is said
	}
	whole := true
	hooks, base := f.hooks(), f.base()
	for table, pair := range map[*chains][2]chains{&f.have.nat: {hooks.nat, base.nat}, &f.have.filter: {hooks.filter, base.filter}} {
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
		in := f.have.nat
		if e.filter {
			in = f.have.filter
		}
		if !slices.Contains(in[e.chain], e.rule) {
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
