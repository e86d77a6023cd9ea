package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// kernel is where our table of one family is.
type kernel interface {
	// load reads all that the table holds. A listing that was interrupted is an error.
	load() (state, error)
	// commit makes a change happen as a whole, or not at all. After errUnanswered it is not known
	// which.
	commit(change) error
	// clients reads who is remembered.
	clients() ([]client, error)
}

// state is what the kernel holds in our table.
type state struct {
	exists   bool
	sets     map[string]shape
	chains   map[string]chainState
	elements map[element]target
	// strays are elements in our sets that we cannot have put there.
	strays []stray
}

// shape is what has to be right about a set.
type shape struct{ flags, keyType, keyLength, valueType, valueLength uint32 }

// chainState is a chain as the kernel has it; rules are told by what we keep with them.
type chainState struct {
	hook  hook // zero for one that is only jumped to
	rules []string
}

// stray is an element by its key alone.
type stray struct {
	set       string
	key, last []byte
}

// client is who a map for session affinity remembers, by the key there, and where it sends him. In
// IPv6 the target has no port and the client no address.
type client struct {
	key      string
	addr     address
	frontend frontend
	to       target
}

// change is a transaction. Elements are removed before others are added.
type change struct {
	rules       *ruleset // when the rules have to be written
	have        state    // what they are written over
	replace     bool     // write the rules over nothing: what there is cannot be kept
	add, remove []entry
	strays      []stray
	forget      []client
}

func (c change) empty() bool {
	return c.rules == nil && len(c.add)+len(c.remove)+len(c.strays)+len(c.forget) == 0
}

// netlinkKernel is the kernel of the namespace in which its socket was opened.
type netlinkKernel struct {
	family lb.Family
	socket *socket
}

func (k netlinkKernel) commit(c change) error {
	m := messages{family: k.family, table: TableName}
	m.begin()
	if c.rules != nil {
		if err := m.install(c); err != nil {
			return err
		}
	}
	for _, s := range c.strays {
		m.removeKey(s.set, s.key, s.last)
	}
	for _, f := range c.forget {
		m.removeKey(stickyMap(f.frontend.protocol), []byte(f.key), nil)
	}
	m.removeElements(c.remove)
	m.addElements(c.add)
	m.end()
	if len(m.about) == 2 {
		return nil
	}
	return k.socket.transact(&m)
}

// install writes sets, chains and rules over what there is.
func (m *messages) install(c change) error {
	have := c.have
	if c.replace {
		if have.exists {
			m.removeTable()
		}
		have = state{}
	}
	if !have.exists {
		m.addTable()
	}
	for _, s := range c.rules.sets {
		if _, ok := have.sets[s.name]; !ok {
			m.addSet(s)
		}
	}
	if len(have.chains) > 0 {
		m.removeRules()
	}
	for name, chain := range have.chains {
		if want, ok := c.rules.chain(name); !ok || !want.hooked(chain.hook) {
			m.removeChain(name)
		}
	}
	for _, chain := range c.rules.chains {
		if old, ok := have.chains[chain.name]; !ok || !chain.hooked(old.hook) {
			m.addChain(chain)
		}
	}
	for _, chain := range c.rules.chains {
		for _, r := range chain.rules {
			if err := m.addRule(chain.name, r); err != nil {
				return fmt.Errorf("chain %s: %w", chain.name, err)
			}
		}
	}
	for name := range have.sets {
		if _, ok := c.rules.set(name); !ok {
			m.removeSet(name)
		}
	}
	return nil
}

func (m *messages) removeKey(set string, key, last []byte) {
	m.message(subsystem|unix.NFT_MSG_DELSETELEM, 0, "remove from "+set, func() {
		m.text(unix.NFTA_SET_ELEM_LIST_TABLE, m.table)
		m.text(unix.NFTA_SET_ELEM_LIST_SET, set)
		m.nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
			m.nested(unix.NFTA_LIST_ELEM, func() {
				m.value(unix.NFTA_SET_ELEM_KEY, func() { m.buf = append(m.buf, key...) })
				if last != nil {
					m.value(keyEnd, func() { m.buf = append(m.buf, last...) })
				}
			})
		})
	})
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

// hooked tells whether the chain is entered from there.
func (c chain) hooked(h hook) bool {
	if c.hook == nil {
		return h == hook{}
	}
	return *c.hook == h
}

// get is a message that asks for a listing of what is in our table.
func (k netlinkKernel) list(kind uint16, body func(*messages)) *messages {
	m := &messages{family: k.family, table: TableName}
	m.message(subsystem|kind, unix.NLM_F_DUMP, "list", func() { body(m) })
	return m
}

// loadTries is how often a listing that was interrupted is repeated before the loop's backoff takes
// over. Every transaction on the machine interrupts.
const loadTries = 10

func (k netlinkKernel) load() (st state, err error) {
	for range loadTries {
		if st, err = k.read(); !errors.Is(err, errInterrupted) {
			return st, err
		}
	}
	return st, err
}

func (k netlinkKernel) read() (state, error) {
	st := state{sets: map[string]shape{}, chains: map[string]chainState{}, elements: map[element]target{}}
	inTable := func(kind uint16) func(*messages) { return func(m *messages) { m.text(kind, TableName) } }
	// Every listing passes each object's table on, as not every kernel sorts out those of others.
	ours := func(data []byte) bool { return string(attribute(data, 1)) == TableName+"\x00" }
	err := k.socket.dump(k.list(unix.NFT_MSG_GETTABLE, func(*messages) {}), func(data []byte) error {
		st.exists = st.exists || ours(data)
		return nil
	})
	if err != nil || !st.exists {
		return st, err
	}
	err = k.socket.dump(k.list(unix.NFT_MSG_GETSET, inTable(unix.NFTA_SET_TABLE)), func(data []byte) error {
		if ours(data) {
			st.sets[text(attribute(data, unix.NFTA_SET_NAME))] = readShape(data)
		}
		return nil
	})
	if err != nil {
		return st, fmt.Errorf("list the sets: %w", err)
	}
	err = k.socket.dump(k.list(unix.NFT_MSG_GETCHAIN, inTable(unix.NFTA_CHAIN_TABLE)), func(data []byte) error {
		if ours(data) {
			st.chains[text(attribute(data, unix.NFTA_CHAIN_NAME))] = chainState{hook: readHook(data)}
		}
		return nil
	})
	if err != nil {
		return st, fmt.Errorf("list the chains: %w", err)
	}
	err = k.socket.dump(k.list(unix.NFT_MSG_GETRULE, inTable(unix.NFTA_RULE_TABLE)), func(data []byte) error {
		if ours(data) {
			name := text(attribute(data, unix.NFTA_RULE_CHAIN))
			c := st.chains[name]
			c.rules = append(c.rules, string(attribute(data, unix.NFTA_RULE_USERDATA)))
			st.chains[name] = c
		}
		return nil
	})
	if err != nil {
		return st, fmt.Errorf("list the rules: %w", err)
	}
	for name := range st.sets {
		of, ok := setOf(name)
		if !ok {
			continue
		}
		err := k.elements(name, func(key, last, value []byte) {
			if e, err := decode(of, k.family, key, last, value); err == nil {
				st.elements[e.element] = e.to
			} else {
				st.strays = append(st.strays, stray{set: name, key: clone(key), last: clone(last)})
			}
		})
		if err != nil {
			return st, fmt.Errorf("list the elements of %s: %w", name, err)
		}
	}
	return st, nil
}

// elements lists the elements of a set.
func (k netlinkKernel) elements(name string, each func(key, last, value []byte)) error {
	request := k.list(unix.NFT_MSG_GETSETELEM, func(m *messages) {
		m.text(unix.NFTA_SET_ELEM_LIST_TABLE, m.table)
		m.text(unix.NFTA_SET_ELEM_LIST_SET, name)
	})
	return k.socket.dump(request, func(data []byte) error {
		for _, elem := range attributes(attribute(data, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			var key, last, value []byte
			for kind, nested := range attributes(elem) {
				switch kind {
				case unix.NFTA_SET_ELEM_KEY:
					key = attribute(nested, unix.NFTA_DATA_VALUE)
				case keyEnd:
					last = attribute(nested, unix.NFTA_DATA_VALUE)
				case unix.NFTA_SET_ELEM_DATA:
					value = attribute(nested, unix.NFTA_DATA_VALUE)
				}
			}
			each(key, last, value)
		}
		return nil
	})
}

func (k netlinkKernel) clients() ([]client, error) {
	var all []client
	for _, p := range protocols {
		err := k.elements(stickyMap(p), func(key, _, value []byte) {
			if c, ok := decodeClient(k.family, p, key, value); ok {
				all = append(all, c)
			}
		})
		if errors.Is(err, unix.ENOENT) {
			continue // no table, so nobody is remembered
		}
		if err != nil {
			return nil, fmt.Errorf("list the elements of %s: %w", stickyMap(p), err)
		}
	}
	return all, nil
}

func readShape(data []byte) shape {
	number := func(kind uint16) uint32 {
		if v := attribute(data, kind); len(v) == 4 {
			return binary.BigEndian.Uint32(v)
		}
		return 0
	}
	return shape{
		flags: number(unix.NFTA_SET_FLAGS), keyType: number(unix.NFTA_SET_KEY_TYPE), keyLength: number(unix.NFTA_SET_KEY_LEN),
		valueType: number(unix.NFTA_SET_DATA_TYPE), valueLength: number(unix.NFTA_SET_DATA_LEN),
	}
}

func (s set) shape(family lb.Family) shape {
	sh := shape{flags: s.flags, keyType: typeNumber(family, s.key), keyLength: length(family, s.key)}
	if len(s.value) > 0 {
		sh.valueType, sh.valueLength = typeNumber(family, s.value), length(family, s.value)
	}
	return sh
}

func readHook(data []byte) hook {
	nested := attribute(data, unix.NFTA_CHAIN_HOOK)
	number, priority := attribute(nested, unix.NFTA_HOOK_HOOKNUM), attribute(nested, unix.NFTA_HOOK_PRIORITY)
	if len(number) != 4 || len(priority) != 4 {
		return hook{}
	}
	return hook{
		kind: text(attribute(data, unix.NFTA_CHAIN_TYPE)), number: binary.BigEndian.Uint32(number),
		priority: int32(binary.BigEndian.Uint32(priority)),
	}
}

// text returns an attribute that ends with a zero byte.
func text(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	return string(b[:len(b)-1])
}

func clone(b []byte) []byte {
	if b == nil {
		return nil
	}
	return append([]byte{}, b...)
}

// compare tells whether the kernel has these rules, and if not, whether its sets can stay.
func (r *ruleset) compare(have state) (right, keep bool) {
	if !have.exists {
		return false, false
	}
	right, keep = len(have.sets) == len(r.sets) && len(have.chains) == len(r.chains), true
	for _, s := range r.sets {
		switch sh, ok := have.sets[s.name]; {
		case !ok:
			right = false
		case sh != s.shape(r.family):
			return false, false
		}
	}
	for _, c := range r.chains {
		right = right && c.same(have.chains[c.name], builder{r.family}.nfproto())
	}
	return right, keep
}

func (c chain) same(have chainState, nfproto byte) bool {
	if !c.hooked(have.hook) || len(c.rules) != len(have.rules) {
		return false
	}
	for i, r := range c.rules {
		body, err := r.encode(nfproto)
		if err != nil || string(r.userdata(body)) != have.rules[i] {
			return false
		}
	}
	return true
}
