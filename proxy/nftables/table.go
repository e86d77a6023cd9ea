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
	"github.com/landfall-lb/landfall/proxy/plan"
)

// maxOperations is how many elements one transaction adds and removes, unless a single Service
// needs more: the kernel works through them in a few milliseconds, and they fit into the smallest
// send buffer.
const maxOperations = 1500

// table keeps the table of one family. One goroutine owns it.
type table struct {
	claims
	kernel kernel
	// unusable says why this family has no kernel on this node; nil when it has one.
	unusable error
	// config is what the rules depend on.
	config     plan.Config
	configured bool

	// applied are the Services whose elements the kernel has confirmed, users how many of them share
	// an element.
	applied map[lb.Key]*service
	users   map[common]int
	// failed says why what is wanted for a Service is not applied.
	failed map[lb.Key]failure
	// have is what the kernel holds, when known is set.
	have  held
	known bool
	// rules are those that the kernel holds; nil when they are not known or not right.
	rules *ruleset
	// tried is set once what the kernel holds was known, and all that was wanted then has been tried.
	tried bool
	// unpruned is set while the kernel may hold elements of frontends that nobody wants.
	unpruned bool
	// stale is set while clients may be remembered for backends that are gone.
	stale bool
	// reported is set for Services whose outcome has to be told.
	reported map[lb.Key]bool
}

// failure is why a Service is not applied.
type failure struct {
	err   error
	alone bool // others can be applied
}

func newTable(family lb.Family, k kernel) *table {
	return &table{
		claims: newClaims(family), kernel: k, applied: map[lb.Key]*service{}, users: map[common]int{},
		failed: map[lb.Key]failure{}, reported: map[lb.Key]bool{}, stale: true,
	}
}

// configure takes what all rules depend on. What concerns node ports concerns elements alone.
func (t *table) configure(config plan.Config) {
	rules := config
	rules.NodePortAddresses, rules.LoopbackNodePorts = nil, false
	if !t.configured || !reflect.DeepEqual(t.config, rules) {
		t.config, t.configured, t.rules = rules, true, nil
	}
	if r := newRenderer(t.family, config); !slices.Equal(r.nodeAddresses, t.nodeAddresses) {
		t.render(r)
	}
}

// stats say what a sync did.
type stats struct {
	transactions int
	operations   int // elements added and removed
	failures     int // of transactions
	repaired     int // elements, and rulesets, that others had changed
	verified     bool
	// foreign is set when what was found to differ was changed by others.
	foreign bool
}

// sync makes the kernel hold what is wanted. With verify, or when it is not known, it reads what
// the kernel holds first.
func (t *table) sync(ctx context.Context, verify bool) (stats, error) {
	var st stats
	if t.unusable != nil {
		t.refuseAll()
		t.tried = true
		return st, nil
	}
	if err := t.prepare(verify, &st); err != nil {
		t.fail(slices.Collect(maps.Keys(t.dirty)), err)
		return st, err
	}
	var fresh, failing []lb.Key
	for _, key := range slices.SortedFunc(maps.Keys(t.dirty), lb.Key.Compare) {
		if t.failed[key].alone {
			failing = append(failing, key)
		} else {
			fresh = append(fresh, key)
		}
	}
	errs := []error{t.attempt(ctx, fresh, &st)}
	// Those that failed alone are tried one by one, so that they hold nobody back.
	for _, key := range failing {
		errs = append(errs, t.attempt(ctx, []lb.Key{key}, &st))
	}
	if len(t.dirty) == 0 {
		t.dirty = map[lb.Key]bool{} // going through a map costs what it once held
	}
	if ctx.Err() == nil {
		t.tried = true
		errs = append(errs, t.prune(&st), t.prepare(false, &st), t.forget(&st))
	}
	return st, errors.Join(errs...)
}

// refuseAll is for a family that the node does not have: nothing is applied, and nothing will be.
func (t *table) refuseAll() {
	for key := range t.dirty {
		t.reported[key] = true
		if _, ok := t.want[key]; ok {
			t.failed[key] = failure{err: t.unusable}
		} else {
			delete(t.failed, key)
		}
	}
	t.dirty = map[lb.Key]bool{}
}

func (t *table) fail(keys []lb.Key, err error) {
	for _, key := range keys {
		t.failed[key], t.reported[key] = failure{err: err}, true
	}
}

// prepare makes sure that it is known what the kernel holds, and that it holds the right rules.
func (t *table) prepare(verify bool, st *stats) error {
	if !verify && t.known && t.rules != nil && !t.retimed() {
		return nil
	}
	loaded, err := t.kernel.load()
	if err != nil {
		t.known = false
		return fmt.Errorf("read the table %s: %w", TableName, err)
	}
	st.verified = true
	st.foreign = t.known && verify
	wanted := newRuleset(t.family, t.config, slices.Sorted(maps.Keys(t.timeouts)))
	right, keep := wanted.compare(loaded)
	if !right {
		if err := t.commit(change{rules: &wanted, have: loaded, replace: !keep}, st); err != nil {
			t.known = false
			if st.foreign || !loaded.exists { // else the rules of before are still there
				t.withdraw(err)
			}
			return fmt.Errorf("write the rules: %w", err)
		}
		if !keep {
			loaded.elements, loaded.strays = nil, nil
		}
	}
	if st.foreign && !right && t.rules != nil {
		st.repaired++
	}
	t.rules, t.known, t.unpruned, t.have = &wanted, true, true, newHeld(loaded.elements)
	if err := t.repair(loaded.strays, st); err != nil {
		t.withdraw(err)
		return fmt.Errorf("repair what is applied: %w", err)
	}
	return nil
}

// retimed tells whether other affinity timeouts are needed than the rules have.
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
func (t *table) repair(strays []stray, st *stats) error {
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
	c.strays = strays
	if c.empty() {
		return nil
	}
	if st.foreign {
		st.repaired += len(c.add) + len(c.remove) + len(c.strays)
	}
	if err := t.commitInParts(c, st); err != nil {
		t.known = false
		return err
	}
	d.happened(t.have, t.users)
	t.stale = true
	return nil
}

// withdraw notes that nothing is confirmed any more.
func (t *table) withdraw(err error) {
	for key := range t.applied {
		t.dirty[key] = true
	}
	t.fail(slices.Collect(maps.Keys(t.applied)), err)
	for _, s := range t.applied {
		t.count(s, -1)
	}
	clear(t.applied)
	clear(t.users)
}

func (t *table) newDiff() *diff { return newDiff(t.have, t.users) }

// attempt applies the named Services. When a transaction fails it finds out which of them are to
// blame, and applies the others.
func (t *table) attempt(ctx context.Context, keys []lb.Key, st *stats) error {
	var errs []error
	for len(keys) > 0 && ctx.Err() == nil {
		d := t.newDiff()
		n := 0
		for n < len(keys) && (n == 0 || d.operations() < maxOperations) {
			d.service(keys[n], t.applied[keys[n]], t.want[keys[n]], &t.claims)
			n++
		}
		if err := t.apply(d, st); err != nil {
			errs = append(errs, t.recover(ctx, keys[:n], err, st))
		}
		keys = keys[n:]
	}
	return errors.Join(append(errs, ctx.Err())...)
}

// apply makes one transaction, and records what it did.
func (t *table) apply(d *diff, st *stats) error {
	if c := d.change(); !c.empty() {
		if err := t.commit(c, st); err != nil {
			return err
		}
	}
	d.happened(t.have, t.users)
	t.stale = t.stale || d.loses
	for key, s := range d.services {
		t.count(t.applied[key], -1)
		t.count(s, 1)
		if _, failed := t.failed[key]; failed {
			t.unpruned = true // what a predecessor left for it was kept
		}
		if s != nil {
			t.applied[key] = s
		} else {
			delete(t.applied, key)
		}
		delete(t.failed, key)
		delete(t.dirty, key)
		t.reported[key] = true
	}
	return nil
}

// recover is for Services whose common transaction has failed: the table may not be as it is
// believed to be, or one of them cannot be applied.
func (t *table) recover(ctx context.Context, keys []lb.Key, cause error, st *stats) error {
	if err := t.prepare(true, st); err != nil {
		t.fail(keys, err)
		return errors.Join(cause, err)
	}
	return t.bisect(ctx, keys, st)
}

// bisect applies what can be applied of the named Services.
func (t *table) bisect(ctx context.Context, keys []lb.Key, st *stats) error {
	if !t.known {
		err := fmt.Errorf("not tried, as it is not known what the table holds: %w", errUnanswered)
		t.fail(keys, err)
		return err
	}
	d := t.newDiff()
	for _, key := range keys {
		d.service(key, t.applied[key], t.want[key], &t.claims)
	}
	err := t.apply(d, st)
	switch {
	case err == nil || ctx.Err() != nil:
		return err
	case len(keys) == 1:
		t.failed[keys[0]], t.reported[keys[0]] = failure{err: err, alone: true}, true
		return fmt.Errorf("elements of %s: %w", keys[0], err)
	}
	return errors.Join(t.bisect(ctx, keys[:len(keys)/2], st), t.bisect(ctx, keys[len(keys)/2:], st))
}

// commit makes one transaction.
func (t *table) commit(c change, st *stats) error {
	st.transactions++
	if err := t.kernel.commit(c); err != nil {
		st.failures++
		t.known = t.known && !errors.Is(err, errUnanswered)
		return err
	}
	st.operations += len(c.add) + len(c.remove) + len(c.strays)
	return nil
}

// commitInParts adds and removes elements in several transactions, what is replaced in the same
// one.
func (t *table) commitInParts(c change, st *stats) error {
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
		if err := t.commit(change{add: batch}, st); err != nil {
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
		if err := t.commit(part, st); err != nil {
			return err
		}
	}
	for batch := range slices.Chunk(c.strays, maxOperations) {
		if err := t.commit(change{strays: batch}, st); err != nil {
			return err
		}
	}
	return nil
}

// prune removes what nobody wants, now that all that is wanted has been tried.
func (t *table) prune(st *stats) error {
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
	for key := range t.dirty {
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
	if st.foreign {
		st.repaired += len(c.remove)
	}
	if err := t.commitInParts(c, st); err != nil {
		t.known = false
		return fmt.Errorf("remove what nobody wants: %w", err)
	}
	d.happened(t.have, t.users)
	return nil
}

// forget makes the kernel forget clients whose backend their frontend no longer has for them.
func (t *table) forget(st *stats) error {
	if !t.stale || !t.known {
		return nil
	}
	clients, err := t.kernel.clients()
	if err != nil {
		return fmt.Errorf("read who is remembered: %w", err)
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
		if t.commit(change{forget: batch}, st) == nil {
			continue
		}
		for _, c := range batch { // one of them may have timed out in the meantime
			if err := t.commit(change{forget: []client{c}}, st); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("forget a client: %w", err)
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

// isPod tells whether a client is known to be a pod. One that is not may be taken for one from
// outside, as all IPv6 clients are, of which only a hash is known: it is sent anywhere once more.
func (t *table) isPod(client address) bool {
	return slices.ContainsFunc(t.config.Pods.Prefixes,
		func(p netip.Prefix) bool { return p.Contains(client.ip(t.family)) })
}
