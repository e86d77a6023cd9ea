package nftables

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// maxOperations is how many elements one transaction adds and removes: the kernel works through
// them in a few milliseconds, and they fit into the smallest send buffer.
const maxOperations = 1500

// fewOperations is how many elements of one Service others may wait for in one transaction, about a
// millisecond: a change of more goes after those of others, and on its own.
const fewOperations = 300

// table keeps the table of one family. One goroutine owns it.
type table struct {
	claims
	*dialect.Ledger
	kernel kernel
	// limit is maxOperations.
	limit int
	// config is what the rules depend on.
	config     plan.Config
	configured bool

	// applied are the Services whose elements the kernel has confirmed, users how many of them share
	// an element.
	applied map[lb.Key]*service
	users   map[common]int
	// have is what the kernel holds, when known is set.
	have  held
	known bool
	// rules are those that the kernel holds; nil when they are not known or not right.
	rules *ruleset
	// unpruned is set while the kernel may hold elements of frontends that no Service has.
	unpruned bool
	// parted are Services of whose change only a part is written, with what is to be written next.
	parted map[lb.Key]*parting
	// doubtful is set when the last failure may come of the kernel holding something else than known.
	doubtful bool
	// foreign is set when what was last found to differ was changed by others.
	foreign bool
}

var _ dialect.Rules = (*table)(nil)

func newTable(family lb.Family, k kernel, ledger *dialect.Ledger) *table {
	return &table{
		Ledger: ledger, claims: newClaims(family, ledger.Touch), kernel: k, limit: maxOperations,
		applied: map[lb.Key]*service{},
		users:   map[common]int{}, parted: map[lb.Key]*parting{},
	}
}

// Configure implements dialect.Rules. What concerns node ports concerns elements alone.
func (t *table) Configure(config plan.Config) {
	rules := config
	rules.NodePortAddresses, rules.LoopbackNodePorts = nil, false
	if !t.configured || !reflect.DeepEqual(t.config, rules) {
		t.config, t.configured, t.rules = rules, true, nil
	}
	if r := newRenderer(t.family, config); r.relay != t.relay || !slices.Equal(r.nodeAddresses, t.nodeAddresses) {
		t.render(r)
	}
}

// Want implements dialect.Rules.
func (t *table) Want(key lb.Key, s plan.Service) { t.set(key, s) }

// Weigh implements dialect.Weigher. A Service that is being written anew is not written anew again:
// one that needs many parts would never be finished.
func (t *table) Weigh(key lb.Key, load plan.Load) {
	s := t.want[key]
	if s == nil || !s.input.Scheduler.Counts() {
		return
	}
	t.loads[key] = load
	if s != t.applied[key] || t.Dirty()[key] {
		return
	}
	t.set(key, s.input)
	t.want[key].weighed = true
}

// Size implements dialect.Rules: the rules are always the same.
func (t *table) Size() map[string]int { return nil }

// Prepare implements dialect.Rules.
func (t *table) Prepare(_ context.Context, verify bool) error {
	t.foreign = false
	return t.prepare(verify)
}

// Recover implements dialect.Rules. Rules that are right show nothing, so it adds an element that
// no packet matches, and removes it.
func (t *table) Recover(context.Context) error {
	if err := t.prepare(t.doubtful); err != nil {
		return err
	}
	probe := []entry{{element: common{set: setHairpin}.element()}}
	if err := t.commit(change{add: probe}); err != nil {
		return fmt.Errorf("add an element that concerns no Service: %w", err)
	}
	if err := t.commit(change{remove: probe}); err != nil {
		t.known = false
		return fmt.Errorf("remove an element that concerns no Service: %w", err)
	}
	return nil
}

// prepare makes sure that it is known what the kernel holds, and that it holds the right rules.
func (t *table) prepare(verify bool) error {
	if !verify && t.known && t.rules != nil {
		return t.renumber()
	}
	loaded, err := t.kernel.load()
	if err != nil {
		t.known = false
		return fmt.Errorf("read the table %s: %w", TableName, err)
	}
	t.Stats.Verified = true
	t.foreign = t.known && verify
	have := newHeld(loaded.elements)
	if t.foreign {
		t.Stats.Repaired += t.disturbed(loaded, have)
	}
	needs := t.needed()
	if t.rules != nil { // what is not needed is not foreign: trim removes it
		needs = needs.with(t.rules.needs)
	}
	wanted := newRuleset(t.family, t.config, needs)
	right, keep := wanted.compare(loaded)
	if !right {
		if err := t.commit(change{rules: &wanted, have: loaded, replace: !keep}); err != nil {
			t.known = false
			if t.foreign || !loaded.exists { // else the rules of before are still there
				t.withdraw(err)
			}
			return fmt.Errorf("write the rules: %w", err)
		}
		if !keep {
			loaded.elements, loaded.unknown = nil, nil
		}
		wanted.leaveOut(&loaded)
		have = newHeld(loaded.elements)
	}
	t.rules, t.known, t.unpruned, t.have = &wanted, true, true, have
	if err := t.misled(); err != nil {
		return fmt.Errorf("remove what leads to another Service: %w", err)
	}
	if err := t.repair(loaded.unknown); err != nil {
		t.withdraw(err)
		return fmt.Errorf("repair the elements: %w", err)
	}
	return nil
}

// disturbed counts what others have changed: how what was read differs from what is known.
func (t *table) disturbed(loaded state, have held) int {
	n := len(loaded.unknown) + t.have.differences(have)
	if t.rules != nil {
		if right, _ := t.rules.compare(loaded); !right {
			n++
		}
	}
	return n
}

// misled removes what leads from a predecessor's frontends to groups whose numbers are those of
// other Services now, as happens when two have one hash.
func (t *table) misled() error {
	if len(t.applied) > 0 {
		return nil // numbers do not change while a process runs
	}
	var c change
	for f, entries := range t.have.parts {
		for _, e := range entries {
			if e.set == setRelayOwners { // which are no groups
				continue
			}
			if owner := t.owners[frontend{group: e.to.group}]; e.to.group != 0 && owner != nil && owner != t.owners[f] {
				c.remove = append(c.remove, e)
			}
		}
	}
	if c.empty() {
		return nil
	}
	slices.SortFunc(c.remove, inOrder)
	if err := t.commitInParts(c); err != nil {
		t.known = false
		return err
	}
	t.have.patch(c)
	return nil
}

// renumber adds the numbered sets that Services need and the rules do not have yet. Those that they no longer need stay
// until trim: one Service can change what it needs many times a second, and all others wait while rules are written.
func (t *table) renumber() error {
	for n := range t.needs {
		if _, ok := slices.BinarySearchFunc(t.rules.needs, n, need.compare); !ok {
			return t.write(t.rules.needs.with(t.needed()))
		}
	}
	return nil
}

// trim removes the numbered sets that no Service needs, nor has needed since the verification before this one.
func (t *table) trim() error {
	if !t.Stats.Verified || !t.known || t.rules == nil {
		return nil
	}
	gone := map[need]bool{}
	for _, n := range t.rules.needs {
		if t.needs[n] == 0 && !t.recent[n] {
			gone[n] = true
		}
	}
	clear(t.recent)
	if len(gone) == 0 {
		return nil
	}
	keep := slices.DeleteFunc(slices.Clone(t.rules.needs), func(n need) bool { return gone[n] })
	if err := t.write(keep); err != nil {
		return err
	}
	t.have.leaveOut(func(e element) bool { return e.set.isNumbered() && gone[need{e.set, e.number}] })
	return nil
}

// write writes the rules with other numbered sets.
func (t *table) write(needs needs) error {
	wanted := newRuleset(t.family, t.config, needs)
	if err := t.commit(change{rules: &wanted, have: t.rules.state()}); err != nil {
		t.known = false
		return fmt.Errorf("write the rules for numbered sets: %w", err)
	}
	t.rules = &wanted
	return nil
}

// repair makes the kernel hold again all that is applied. What is there of other frontends stays,
// as long as somebody wants them.
func (t *table) repair(unknown []unknownElement) error {
	d := t.newDiff()
	for key, s := range t.applied {
		if t.parted[key] != nil {
			continue // it is on its way to something else
		}
		for _, p := range s.parts {
			if t.owns(key, p.frontend) {
				d.part(p.frontend, p.entries)
			}
		}
	}
	for e := range t.users {
		d.shares[e] = 0
	}
	c := d.change()
	c.unknown = unknown
	if c.empty() {
		return nil
	}
	if err := t.commitInParts(c); err != nil {
		t.known = false
		return err
	}
	d.happened(t.have, t.users)
	return nil
}

// withdraw notes that nothing is confirmed any more.
func (t *table) withdraw(err error) {
	for key, s := range t.applied {
		t.Lost(key, err)
		t.count(s, -1)
	}
	clear(t.applied)
	clear(t.users)
}

func (t *table) newDiff() *diff { return newDiff(t.have, t.users) }

// Commit implements dialect.Rules.
func (t *table) Commit(_ context.Context, keys []lb.Key) (n int, err error) {
	if !t.known {
		if err := t.prepare(false); err != nil {
			return len(keys), dialect.General(err)
		}
	}
	if len(keys) == 1 {
		if part := t.next(keys[0]); !part.empty() {
			return 1, t.begin(keys[0], part)
		}
	}
	d := t.newDiff()
	for n < len(keys) && d.operations() < t.limit {
		if now := t.want[keys[n]]; now != nil && now.refusal != nil {
			if n == 0 {
				return 1, dialect.Own(now.refusal)
			}
			break
		}
		d.service(keys[n], t.applied[keys[n]], t.want[keys[n]], &t.claims)
		n++
	}
	if n > 1 && d.operations() > t.limit { // the last is too much
		n--
		d = t.newDiff()
		for _, key := range keys[:n] {
			d.service(key, t.applied[key], t.want[key], &t.claims)
		}
	}
	if n == 1 && len(keys) > 1 && d.operations() > fewOperations && t.Tried() {
		return n, dialect.ErrUnfinished
	}
	c := d.change()
	if n != 1 {
		return n, t.apply(d, c)
	}
	switch parts := c.parts(t.limit); {
	case len(parts) <= 1:
		return n, t.apply(d, c)
	case len(keys) > 1:
		return n, dialect.ErrUnfinished
	default:
		t.parted[keys[0]] = newParting(t.want[keys[0]], d.shares, parts[1:])
		return n, t.begin(keys[0], parts[0])
	}
}

// begin writes a part of what a Service needs.
func (t *table) begin(key lb.Key, part change) error {
	if err := t.commit(part); err != nil {
		t.parted[key].parts = nil // what follows may lead to what is missing
		return err
	}
	t.have.patch(part)
	return dialect.ErrUnfinished
}

// apply makes one transaction, and records what it did.
func (t *table) apply(d *diff, c change) error {
	if !c.empty() {
		if err := t.commit(c); err != nil {
			return err
		}
	}
	d.happened(t.have, t.users)
	for key, s := range d.services {
		t.count(t.applied[key], -1)
		t.count(s, 1)
		if t.Failed(key) || t.parted[key] != nil {
			t.unpruned = true // what a predecessor left for it was kept, or parts of what it no longer wants
		}
		quiet := s != nil && s.weighed && t.applied[key] != nil && t.parted[key] == nil && !t.Failed(key)
		delete(t.parted, key)
		if s != nil {
			t.applied[key] = s
		} else {
			delete(t.applied, key)
		}
		if quiet {
			t.Same(key)
		} else {
			t.Done(key)
		}
	}
	return nil
}

// Prune implements dialect.Rules.
func (t *table) Prune(context.Context) error {
	return errors.Join(t.prune(), t.trim())
}

// commit makes one transaction.
func (t *table) commit(c change) error {
	t.Stats.Transactions++
	if err := t.kernel.commit(c); err != nil {
		t.Stats.Failures++
		t.known = t.known && !errors.Is(err, errUnanswered)
		t.doubtful = !errors.Is(err, unix.EMSGSIZE) && !errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.ENOBUFS)
		return err
	}
	t.Stats.Changes += len(c.add) + len(c.remove) + len(c.unknown)
	return nil
}

// commitInParts makes a change in as many transactions as it needs.
func (t *table) commitInParts(c change) error {
	for _, part := range c.parts(t.limit) {
		if err := t.commit(part); err != nil {
			return err
		}
	}
	return nil
}

// prune removes the elements of frontends that no Service has, after every wanted one was tried.
func (t *table) prune() error {
	if !t.known || !t.unpruned {
		return nil
	}
	d := t.newDiff()
	for f := range t.have.parts {
		if t.owners[f] == nil {
			d.part(f, nil)
		}
	}
	wanted := map[common]bool{}
	for key := range t.Dirty() {
		if s := t.want[key]; s != nil {
			for _, e := range s.shared {
				wanted[e] = true
			}
		}
	}
	for e := range t.have.shared {
		if t.users[e] == 0 && !wanted[e] {
			d.shares[e] = 0
		}
	}
	t.unpruned = false
	c := d.change()
	if c.empty() {
		return nil
	}
	if err := t.commitInParts(c); err != nil {
		t.known = false
		return fmt.Errorf("remove unused elements: %w", err)
	}
	d.happened(t.have, t.users)
	return nil
}
