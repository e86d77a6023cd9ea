package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// maxOperations is how many elements one transaction adds and removes, unless a single Service
// needs more: the kernel works through them in a few milliseconds, and they fit into the smallest
// send buffer.
const maxOperations = 1500

// table keeps the table of one family. One goroutine owns it.
type table struct {
	claims
	*dialect.Ledger
	kernel kernel
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
	// stale is set while clients may be remembered for backends that are gone.
	stale bool
	// foreign is set when what was last found to differ was changed by others.
	foreign bool
}

var _ dialect.Rules = (*table)(nil)

func newTable(family lb.Family, k kernel, ledger *dialect.Ledger) *table {
	return &table{
		Ledger: ledger, claims: newClaims(family, ledger.Touch), kernel: k, applied: map[lb.Key]*service{},
		users: map[common]int{}, stale: true,
	}
}

// Configure implements dialect.Rules. What concerns node ports concerns elements alone.
func (t *table) Configure(config plan.Config) {
	rules := config
	rules.NodePortAddresses, rules.LoopbackNodePorts = nil, false
	if !t.configured || !reflect.DeepEqual(t.config, rules) {
		t.config, t.configured, t.rules = rules, true, nil
	}
	if r := newRenderer(t.family, config); !slices.Equal(r.nodeAddresses, t.nodeAddresses) {
		t.render(r)
	}
}

// Want implements dialect.Rules.
func (t *table) Want(key lb.Key, s plan.Service) { t.set(key, s) }

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
	if err := t.prepare(true); err != nil {
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
	if !verify && t.known && t.rules != nil && !t.retimed() {
		return nil
	}
	loaded, err := t.kernel.load()
	if err != nil {
		t.known = false
		return fmt.Errorf("read the table %s: %w", TableName, err)
	}
	t.Stats.Verified = true
	t.foreign = t.known && verify
	wanted := newRuleset(t.family, t.config, slices.Sorted(maps.Keys(t.timeouts)))
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
	}
	if t.foreign && !right && t.rules != nil {
		t.Stats.Repaired++
	}
	t.rules, t.known, t.unpruned, t.have = &wanted, true, true, newHeld(loaded.elements)
	if err := t.repair(loaded.unknown); err != nil {
		t.withdraw(err)
		return fmt.Errorf("repair the elements: %w", err)
	}
	return nil
}

// retimed reports whether other affinity timeouts are needed than the rules have.
func (t *table) retimed() bool {
	for _, seconds := range t.rules.timeouts {
		if t.timeouts[seconds] == 0 {
			return true
		}
	}
	return len(t.rules.timeouts) != len(t.timeouts)
}

// repair makes the kernel hold again all that is applied. What is there of other frontends stays,
// as long as somebody wants them.
func (t *table) repair(unknown []unknownElement) error {
	d := t.newDiff()
	for key, s := range t.applied {
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
	if t.foreign {
		t.Stats.Repaired += len(c.add) + len(c.remove) + len(c.unknown)
	}
	if err := t.commitInParts(c); err != nil {
		t.known = false
		return err
	}
	d.happened(t.have, t.users)
	t.stale = true
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
	d := t.newDiff()
	for n < len(keys) && (n == 0 || d.operations() < maxOperations) {
		d.service(keys[n], t.applied[keys[n]], t.want[keys[n]], &t.claims)
		n++
	}
	return n, t.apply(d)
}

// apply makes one transaction, and records what it did.
func (t *table) apply(d *diff) error {
	if c := d.change(); !c.empty() {
		if err := t.commit(c); err != nil {
			return err
		}
	}
	d.happened(t.have, t.users)
	t.stale = t.stale || d.loses
	for key, s := range d.services {
		t.count(t.applied[key], -1)
		t.count(s, 1)
		if t.Failed(key) {
			t.unpruned = true // what a predecessor left for it was kept
		}
		if s != nil {
			t.applied[key] = s
		} else {
			delete(t.applied, key)
		}
		t.Done(key)
	}
	return nil
}

// Prune implements dialect.Rules.
func (t *table) Prune(context.Context) error {
	return errors.Join(t.prune(), t.prepare(false), t.forget())
}

// commit makes one transaction.
func (t *table) commit(c change) error {
	t.Stats.Transactions++
	if err := t.kernel.commit(c); err != nil {
		t.Stats.Failures++
		t.known = t.known && !errors.Is(err, errUnanswered)
		return err
	}
	t.Stats.Changes += len(c.add) + len(c.remove) + len(c.unknown)
	return nil
}

// commitInParts adds and removes elements in several transactions, what is replaced in the same
// one.
func (t *table) commitInParts(c change) error {
	replaced := make(map[element]entry, min(len(c.add), len(c.remove)))
	for _, e := range c.remove {
		replaced[e.element] = entry{}
	}
	additions := c.add[:0:0]
	for _, e := range c.add {
		if _, ok := replaced[e.element]; ok {
			replaced[e.element] = e
		} else {
			additions = append(additions, e)
		}
	}
	for batch := range slices.Chunk(additions, maxOperations) {
		if err := t.commit(change{add: batch}); err != nil {
			return err
		}
	}
	for batch := range slices.Chunk(c.remove, maxOperations/2) {
		part := change{remove: batch}
		for _, e := range batch {
			if again := replaced[e.element]; again != (entry{}) {
				part.add = append(part.add, again)
			}
		}
		if err := t.commit(part); err != nil {
			return err
		}
	}
	for batch := range slices.Chunk(c.unknown, maxOperations) {
		if err := t.commit(change{unknown: batch}); err != nil {
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
	if t.foreign {
		t.Stats.Repaired += len(c.remove)
	}
	if err := t.commitInParts(c); err != nil {
		t.known = false
		return fmt.Errorf("remove unused elements: %w", err)
	}
	d.happened(t.have, t.users)
	return nil
}

// forget makes the kernel forget clients whose backend their frontend no longer has for them.
func (t *table) forget() error {
	if !t.stale || !t.known {
		return nil
	}
	clients, err := t.kernel.clients()
	if err != nil {
		return fmt.Errorf("read the clients with session affinity: %w", err)
	}
	valid := map[frontend]affinity{}
	var gone []client
	for _, c := range clients {
		backends, ok := valid[c.frontend]
		if !ok {
			backends = t.affine(t.have.parts[c.frontend])
			valid[c.frontend] = backends
		}
		if !backends.all[c.to] || backends.local != nil && !backends.local[c.to] && !t.isPod(c.addr) {
			gone = append(gone, c)
		}
	}
	for batch := range slices.Chunk(gone, maxOperations) {
		if t.commit(change{forget: batch}) == nil {
			continue
		}
		for _, c := range batch { // one of them may have timed out in the meantime
			if err := t.commit(change{forget: []client{c}}); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove a client from session affinity: %w", err)
			}
		}
	}
	t.stale = false
	return nil
}

// affinity are the backends to which a frontend's clients may be remembered; without session
// affinity there are none.
type affinity struct {
	all map[target]bool
	// local are those for clients from outside when the policy is Local; nil when it is not.
	local map[target]bool
}

// affine returns the backends in the form in which clients are remembered with them.
func (t *table) affine(entries []entry) affinity {
	backends, local := map[target]bool{}, map[target]bool{}
	sticky, isLocal := false, false
	for _, e := range entries {
		switch e.set {
		case setAffinity:
			sticky = true
		case setLocal:
			isLocal = true
		case setBackends:
			if t.family == lb.IPv6 {
				e.to.port = 0
			}
			backends[e.to] = true
			if e.number%methodNumbers >= localNumbers {
				local[e.to] = true
			}
		}
	}
	switch {
	case !sticky:
		return affinity{}
	case !isLocal:
		local = nil
	}
	return affinity{backends, local}
}

// isPod reports whether a client is known to be a pod. One that is not may be taken for one from
// outside, as all IPv6 clients are, of which only a hash is known: it is sent anywhere once more.
func (t *table) isPod(client address) bool {
	return slices.ContainsFunc(t.config.Pods.Prefixes,
		func(p netip.Prefix) bool { return p.Contains(client.ip(t.family)) })
}
