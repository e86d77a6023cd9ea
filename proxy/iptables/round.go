package iptables

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// apply makes one call of iptables-restore for the named Services. The others stay as they are.
// Unless whole is set it costs what these Services and the shared chains that they change have,
// however many Services there are.
func (f *family) apply(ctx context.Context, keys []lb.Key) error {
	if f.have == nil {
		if err := f.read(ctx, false); err != nil {
			return err
		}
	}
	if len(keys) == 0 && !f.whole {
		return nil
	}
	changed := f.share(keys, f.held, f.want)
	var hooks tables
	have, want := f.part(keys, changed)
	if f.whole {
		have, want, hooks = *f.have, f.all(keys), f.hooks()
		f.leftovers = newLeftovers(have.nat, want.nat, f.unconfirmed(keys))
	}
	input, now := script(have, want, hooks, f.leftovers)
	if input != "" {
		f.Stats.Transactions++
		if err := f.kernel.Restore(ctx, input); err != nil {
			f.Stats.Failures++
			if !f.whole {
				f.Stats.Partial++
			}
			f.have = nil
			f.share(keys, f.want, f.held)
			return err
		}
		f.Stats.Changes += strings.Count(input, "\n")
	}
	if f.whole {
		f.have, f.whole = &now, false
		f.size.nat, f.size.filter = ours(now.nat), ours(now.filter)
	} else {
		f.size.nat += record(f.have.nat, have.nat, now.nat)
		f.size.filter += record(f.have.filter, have.filter, now.filter)
	}
	for _, key := range keys {
		if s, ok := f.want[key]; ok {
			f.held[key] = s
		} else {
			delete(f.held, key)
		}
		delete(f.parted, key)
		f.Done(key)
	}
	return nil
}

// record notes that a part of a table has changed, and returns how many more rules there are now.
func record(table, part, now chains) int {
	for chain := range part {
		delete(table, chain)
	}
	maps.Copy(table, now)
	return ours(now) - ours(part)
}

// ours counts the rules in our own chains.
func ours(table chains) int {
	n := 0
	for chain, rules := range table {
		if strings.HasPrefix(chain, prefix) {
			n += len(rules)
		}
	}
	return n
}

// share takes the named Services' rules out of the shared chains as they are in from, and puts them
// in as in to. It returns the chains that change.
func (f *family) share(keys []lb.Key, from, to map[lb.Key]service) map[place]bool {
	changed := map[place]bool{}
	for _, key := range keys {
		f.shared.add(to[key].rules.entries, 1, changed) // first, so that a rule that stays is no change
		f.shared.add(from[key].rules.entries, -1, changed)
	}
	return changed
}

// part returns what the kernel has and shall have in the chains of the named Services, and in the
// shared ones that change.
func (f *family) part(keys []lb.Key, changed map[place]bool) (have, want tables) {
	have, want = tables{nat: chains{}, filter: chains{}}, tables{nat: chains{}, filter: chains{}}
	for _, key := range keys {
		before, after := f.held[key].rules.chains, f.want[key].rules.chains
		look := func(chain string) {
			if rules, ok := f.have.nat[chain]; ok {
				have.nat[chain] = rules
			}
		}
		for chain, rules := range after {
			if isOne(rules, before[chain]) && isOne(rules, f.have.nat[chain]) {
				continue // all but a few, of a large Service
			}
			want.nat[chain] = rules
			look(chain)
		}
		for chain := range before {
			if _, wanted := after[chain]; !wanted {
				look(chain)
			}
		}
	}
	for at := range changed {
		if rules, ok := at.in(*f.have)[at.chain]; ok {
			at.in(have)[at.chain] = rules
		}
		if rules, ok := f.rules(f.fixed, f.shared, at); ok {
			at.in(want)[at.chain] = rules
		}
	}
	return have, want
}

// all returns all of our chains, with the named Services as wanted and the others as they are held.
func (f *family) all(keys []lb.Key) tables {
	named := make(map[lb.Key]bool, len(keys))
	var services []contribution
	for _, key := range keys {
		named[key] = true
		services = append(services, f.want[key].rules)
	}
	for key, s := range f.held {
		if !named[key] {
			services = append(services, s.rules)
		}
	}
	for key := range f.Dirty() {
		if _, held := f.held[key]; !held && !named[key] {
			services = append(services, f.filters(f.want[key]))
		}
	}
	return f.ruleset(services)
}

// filters returns the rules of a Service in the table filter, as far as a predecessor has left them in the
// kernel. A jump to a chain of addresses where it has left none is not kept: the chain goes.
func (f *family) filters(s service) contribution {
	c := s.rules
	if s.unrendered || s.refusal != nil {
		c.entries = f.entries(s.plan)
	}
	var left []entry
	there := map[string]bool{}
	for _, e := range c.entries {
		if e.filter && slices.Contains(f.have.filter[e.chain], e.rule) {
			left = append(left, e)
			there[e.chain] = true
		}
	}
	return contribution{entries: slices.DeleteFunc(left, func(e entry) bool {
		to := target(e.rule)
		return strings.HasPrefix(to, e.chain+"-") && !there[to]
	})}
}

// ruleset returns all of our chains for the given Services.
func (r renderer) ruleset(services []contribution) tables {
	fixed, in := r.base(), shared{}
	t := tables{nat: maps.Clone(fixed.nat), filter: maps.Clone(fixed.filter)}
	// where rules come last, even if no Service has any
	changed := map[place]bool{{chain: chainServices}: true, {filter: true, chain: chainServices}: true}
	for _, c := range services {
		maps.Copy(t.nat, c.chains)
		in.add(c.entries, 1, changed)
	}
	for at := range changed {
		at.in(t)[at.chain], _ = r.rules(fixed, in, at)
	}
	return t
}

// rules returns the rules of a chain that Services share, and whether it is there at all.
func (r renderer) rules(fixed tables, in shared, at place) ([]string, bool) {
	first, always := at.in(fixed)[at.chain]
	if !always && len(in[at]) == 0 {
		return nil, false
	}
	return slices.Concat(first, in.rules(at), r.last(at)), true
}
