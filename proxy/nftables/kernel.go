package nftables

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// kernel is where our table of one family is.
type kernel interface {
	// load reads all that the table holds. A listing that was interrupted is an error.
	load() (state, error)
	// commit makes a change happen as a whole, or not at all. After errUnanswered it is not known
	// which.
	commit(change) error
}

// state is what the kernel holds in our table.
type state struct {
	exists   bool
	sets     map[string]nft.Shape
	chains   map[string]nft.Chain
	elements map[element]target
	offload  bool // there is a flowtable
	// unknown are elements in our sets that no version of the proxy writes.
	unknown []unknownElement
}

// unknownElement is an element by its key alone.
type unknownElement struct {
	set string
	key []byte
}

// change is a transaction. Elements are removed before others are added.
type change struct {
	rules       *ruleset // when the rules have to be written
	have        state    // what they are written over
	replace     bool     // write the rules over nothing: what there is cannot be kept
	add, remove []entry
	unknown     []unknownElement
}

func (c change) empty() bool {
	return c.rules == nil && len(c.add)+len(c.remove)+len(c.unknown) == 0
}

// netlinkKernel is the kernel of the namespace in which its socket was opened.
type netlinkKernel struct {
	family lb.Family
	socket *nfnetlink.Conn
}

// errUnanswered means that it is not known whether a transaction has happened.
var errUnanswered = nfnetlink.ErrUnanswered

func (k netlinkKernel) table() nft.Table { return nft.Table{Family: k.family, Name: TableName} }

func (k netlinkKernel) commit(c change) error {
	if c.empty() {
		return nil
	}
	b := nft.NewBatch(k.table())
	if c.rules != nil {
		c.install(b)
	}
	for _, s := range c.unknown {
		b.RemoveElements(s.set, one(nft.Element{Key: s.key}))
	}
	for _, entries := range bySet(c.remove) {
		b.RemoveElements(entries[0].setName(), k.each(entries, false))
	}
	for _, entries := range bySet(c.add) {
		b.AddElements(entries[0].setName(), k.each(entries, true))
	}
	return b.Commit(k.socket)
}

// one passes on a single element.
func one(e nft.Element) func(*nft.Element) bool {
	passed := false
	return func(next *nft.Element) bool {
		*next, passed = e, !passed
		return passed
	}
}

// bySet splits entries, which are ordered by set.
func bySet(entries []entry) (parts [][]entry) {
	for len(entries) > 0 {
		n := 1
		for n < len(entries) && entries[n].sameSet(entries[0].element) {
			n++
		}
		parts, entries = append(parts, entries[:n]), entries[n:]
	}
	return parts
}

// each passes on entries of one set as the kernel has them.
func (k netlinkKernel) each(entries []entry, values bool) func(*nft.Element) bool {
	return func(next *nft.Element) bool {
		if len(entries) == 0 {
			return false
		}
		e := entries[0]
		entries = entries[1:]
		next.Key = e.appendKey(next.Key[:0], k.family)
		if values && e.set.isMap() {
			next.Value = e.appendValue(next.Value[:0], k.family)
		}
		return true
	}
}

// sameSet reports whether two elements are of the same set of the kernel.
func (e element) sameSet(other element) bool {
	return e.set == other.set && (!e.set.isNumbered() || e.number == other.number)
}

// install writes sets, chains and rules over what there is. Chains that are right stay as they are.
func (c change) install(b *nft.Batch) {
	have := c.have
	if c.replace {
		if have.exists {
			b.RemoveTable()
		}
		have = state{}
	}
	if !have.exists {
		b.AddTable()
	}
	if c.rules.offload && !have.offload {
		b.AddFlowtable(flowtable)
	}
	for _, s := range c.rules.sets {
		if _, ok := have.sets[s.name]; !ok {
			b.AddSet(s.definition(c.rules.family))
		}
	}
	right := map[string]bool{} // chains that can stay
	for name, chain := range have.chains {
		want, ok := c.rules.chain(name)
		if right[name] = ok && want.same(chain); !right[name] && len(chain.Rules) > 0 {
			b.RemoveRules(name)
		}
	}
	for name, chain := range have.chains {
		if want, ok := c.rules.chain(name); !ok || want.hook != chain.Hook {
			b.RemoveChain(name)
		}
	}
	for _, chain := range c.rules.chains {
		if old, ok := have.chains[chain.name]; !ok || chain.hook != old.Hook {
			b.AddChain(chain.name, chain.hook)
		}
	}
	for _, chain := range c.rules.chains {
		if right[chain.name] {
			continue
		}
		for _, r := range chain.rules {
			b.AddRule(chain.name, r)
		}
	}
	for name := range have.sets {
		if _, ok := c.rules.set(name); !ok {
			b.RemoveSet(name)
		}
	}
	if have.offload && !c.rules.offload {
		b.RemoveFlowtable(flowtable.Name)
	}
}

func (r *ruleset) chain(name string) (chain, bool) {
	for _, c := range r.chains {
		if c.name == name {
			return c, true
		}
	}
	return chain{}, false
}

func (r *ruleset) set(name string) (set, bool) {
	for _, s := range r.sets {
		if s.name == name {
			return s, true
		}
	}
	return set{}, false
}

func (k netlinkKernel) listing() nft.Listing { return nft.Listing{Conn: k.socket, Table: k.table()} }

func (k netlinkKernel) load() (st state, err error) {
	err = nfnetlink.Complete(func() (err error) {
		st, err = k.read()
		return err
	})
	return st, err
}

func (k netlinkKernel) read() (st state, err error) {
	l := k.listing()
	if st.exists, err = l.Exists(); err != nil || !st.exists {
		return st, err
	}
	if st.sets, err = l.Sets(); err != nil {
		return st, fmt.Errorf("list the sets: %w", err)
	}
	if st.chains, err = l.Chains(); err != nil {
		return st, fmt.Errorf("list the chains: %w", err)
	}
	flowtables, err := l.Flowtables()
	if err != nil {
		return st, fmt.Errorf("list the flowtables: %w", err)
	}
	_, st.offload = flowtables[flowtable.Name]
	st.elements = map[element]target{}
	for name := range st.sets {
		of, ok := setOf(name)
		if !ok {
			continue
		}
		err := l.Elements(name, func(e nft.Element) {
			if found, err := decode(of, k.family, e); err == nil {
				st.elements[found.element] = found.to
			} else {
				st.unknown = append(st.unknown, unknownElement{set: name, key: bytes.Clone(e.Key)})
			}
		})
		if err != nil {
			return st, fmt.Errorf("list the elements of %s: %w", name, err)
		}
	}
	return st, nil
}

// compare reports whether the kernel has these rules, and if not, whether its sets can stay.
func (r *ruleset) compare(have state) (right, keep bool) {
	if !have.exists {
		return false, false
	}
	right, keep = len(have.sets) == len(r.sets) && len(have.chains) == len(r.chains) && have.offload == r.offload, true
	for _, s := range r.sets {
		switch shape, ok := have.sets[s.name]; {
		case !ok:
			right = false
		case shape != s.definition(r.family).Shape():
			return false, false
		}
	}
	for _, c := range r.chains {
		right = right && c.same(have.chains[c.name])
	}
	return right, keep
}

// state returns what the kernel holds once it has these rules, but for the elements.
func (r *ruleset) state() state {
	st := state{exists: true, sets: map[string]nft.Shape{}, chains: map[string]nft.Chain{}, offload: r.offload}
	for _, s := range r.sets {
		st.sets[s.name] = s.definition(r.family).Shape()
	}
	for _, c := range r.chains {
		held := nft.Chain{Hook: c.hook}
		for _, rule := range c.rules {
			held.Rules = append(held.Rules, rule.UserData())
		}
		st.chains[c.name] = held
	}
	return st
}

// leaveOut takes from what was read the elements of sets that the rules do not have: they went with
// their set.
func (r *ruleset) leaveOut(have *state) {
	sets := map[string]bool{}
	for _, s := range r.sets {
		sets[s.name] = true
	}
	maps.DeleteFunc(have.elements, func(e element, _ target) bool { return !sets[e.setName()] })
	have.unknown = slices.DeleteFunc(have.unknown, func(e unknownElement) bool { return !sets[e.set] })
}

func (c chain) same(have nft.Chain) bool {
	if c.hook != have.Hook || len(c.rules) != len(have.Rules) {
		return false
	}
	for i, r := range c.rules {
		if r.UserData() != have.Rules[i] {
			return false
		}
	}
	return true
}
