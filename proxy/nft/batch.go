package nft

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

const subsystem = unix.NFNL_SUBSYS_NFTABLES

// Batch is a transaction on one table: all of it happens, or nothing.
type Batch struct {
	table    Table
	messages nfnetlink.Messages
}

// NewBatch begins a transaction.
func NewBatch(t Table) *Batch {
	b := &Batch{table: t}
	b.messages.Begin(subsystem)
	return b
}

// Size is how many bytes the transaction has so far.
func (b *Batch) Size() int { return len(b.messages.Attributes) }

// Commit makes the transaction. The error of a refusal says which change the kernel refused first.
// After nfnetlink.ErrUnanswered it is not known whether the transaction has happened. b must not be
// used after.
func (b *Batch) Commit(c *nfnetlink.Conn) error {
	b.messages.End(subsystem)
	return c.Transact(&b.messages)
}

func (b *Batch) add(kind, flags uint16, about string, body func(*nfnetlink.Attributes)) {
	m := &b.messages
	m.Add(subsystem<<8|kind, flags, Family(b.table.Family), about, func() { body(&m.Attributes) })
}

// AddTable adds the table if it is not there.
func (b *Batch) AddTable() {
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add the table", func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_TABLE_NAME, b.table.Name)
	})
}

// RemoveTable removes the table with all that it holds.
func (b *Batch) RemoveTable() {
	b.add(unix.NFT_MSG_DELTABLE, 0, "remove the table", func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_TABLE_NAME, b.table.Name)
	})
}

// AddSet adds a set if it is not there.
func (b *Batch) AddSet(s Set) {
	b.add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, "add set "+s.Name, func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_SET_TABLE, b.table.Name)
		a.Text(unix.NFTA_SET_NAME, s.Name)
		a.Number(unix.NFTA_SET_ID, uint32(b.messages.Len()))
		a.Number(unix.NFTA_SET_FLAGS, s.Flags)
		a.Number(unix.NFTA_SET_KEY_TYPE, s.KeyType)
		a.Number(unix.NFTA_SET_KEY_LEN, s.KeyLength)
		if s.ValueLength > 0 {
			a.Number(unix.NFTA_SET_DATA_TYPE, s.ValueType)
			a.Number(unix.NFTA_SET_DATA_LEN, s.ValueLength)
		}
		if s.Timeout > 0 {
			a.Number64(unix.NFTA_SET_TIMEOUT, s.Timeout)
		}
		if s.Size > 0 {
			a.Nested(unix.NFTA_SET_DESC, func() { a.Number(unix.NFTA_SET_DESC_SIZE, s.Size) })
		}
		if s.UserData != nil {
			a.Bytes(unix.NFTA_SET_USERDATA, s.UserData)
		}
		if s.Counted {
			counter := nfnetlink.Get(expr.Encode(expr.List{&expr.Counter{}}), unix.NFTA_LIST_ELEM)
			a.Bytes(unix.NLA_F_NESTED|setExpression, counter)
		}
	})
}

// setExpression is NFTA_SET_EXPR of linux/netfilter/nf_tables.h: what each element of a set has one of.
const setExpression = 17

// RemoveSet removes a set that no rule uses.
func (b *Batch) RemoveSet(name string) {
	b.add(unix.NFT_MSG_DELSET, 0, "remove set "+name, func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_SET_TABLE, b.table.Name)
		a.Text(unix.NFTA_SET_NAME, name)
	})
}

// AddChain adds a chain if it is not there.
func (b *Batch) AddChain(name string, h Hook) {
	b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "add chain "+name, func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_CHAIN_TABLE, b.table.Name)
		a.Text(unix.NFTA_CHAIN_NAME, name)
		if h == (Hook{}) {
			return
		}
		a.Nested(unix.NFTA_CHAIN_HOOK, func() {
			a.Number(unix.NFTA_HOOK_HOOKNUM, h.Number)
			a.Number(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority))
		})
		a.Number(unix.NFTA_CHAIN_POLICY, uint32(expr.VerdictAccept))
		a.Text(unix.NFTA_CHAIN_TYPE, h.Kind)
	})
}

// RemoveChain removes a chain that has no rules and that no rule uses.
func (b *Batch) RemoveChain(name string) {
	b.add(unix.NFT_MSG_DELCHAIN, 0, "remove chain "+name, func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_CHAIN_TABLE, b.table.Name)
		a.Text(unix.NFTA_CHAIN_NAME, name)
	})
}

// RemoveRules removes all rules of a chain, or, without a name, of the table.
func (b *Batch) RemoveRules(chain string) {
	about := "remove the rules"
	if chain != "" {
		about += " of chain " + chain
	}
	b.add(unix.NFT_MSG_DELRULE, 0, about, func(a *nfnetlink.Attributes) {
		a.Text(unix.NFTA_RULE_TABLE, b.table.Name)
		if chain != "" {
			a.Text(unix.NFTA_RULE_CHAIN, chain)
		}
	})
}

// AddRule adds a rule at the end of a chain.
func (b *Batch) AddRule(chain string, r Rule) {
	const flags = unix.NLM_F_CREATE | unix.NLM_F_APPEND
	b.add(unix.NFT_MSG_NEWRULE, flags, "add a rule to chain "+chain, func(a *nfnetlink.Attributes) {
		body := expr.Encode(r.Exprs)
		a.Text(unix.NFTA_RULE_TABLE, b.table.Name)
		a.Text(unix.NFTA_RULE_CHAIN, chain)
		a.Bytes(unix.NLA_F_NESTED|unix.NFTA_RULE_EXPRESSIONS, body)
		a.Bytes(unix.NFTA_RULE_USERDATA, r.userData(body))
	})
}

// listLimit keeps a list of elements below what the 16 bits of an attribute's length can say.
const listLimit = 60_000

// Element is what a set holds. Value is nil in a set, and Count is what an element of a counted set
// has counted when it was read.
type Element struct {
	Key, Value []byte
	// Timeout is how long the element stays from when it is added, in whole milliseconds; 0 for ever. It
	// is for sets with unix.NFT_SET_TIMEOUT, and is not read back.
	Timeout time.Duration
	Count   Count
}

// Keys passes on keys as elements without values.
func Keys(all ...string) func(*Element) bool {
	return func(next *Element) bool {
		if len(all) == 0 {
			return false
		}
		next.Key, all = append(next.Key[:0], all[0]...), all[1:]
		return true
	}
}

// AddElements adds elements to a set, which must not have them. next fills in an element, whose
// parts it may use again for the one after, and returns false when there are no more.
func (b *Batch) AddElements(set string, next func(*Element) bool) {
	b.elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add to "+set, set, next)
}

// RemoveElements removes elements from a set, which must have them.
func (b *Batch) RemoveElements(set string, next func(*Element) bool) {
	b.elements(unix.NFT_MSG_DELSETELEM, 0, "remove from "+set, set, next)
}

func (b *Batch) elements(kind, flags uint16, about, set string, next func(*Element) bool) {
	var e Element
	for more := next(&e); more; {
		b.add(kind, flags, about, func(a *nfnetlink.Attributes) {
			a.Text(unix.NFTA_SET_ELEM_LIST_TABLE, b.table.Name)
			a.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
			list := a.Open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			for more && len(*a)-list < listLimit {
				e.append(a)
				more = next(&e)
			}
			a.Close(list)
		})
	}
}

func (e Element) append(a *nfnetlink.Attributes) {
	elem := a.Open(unix.NFTA_LIST_ELEM)
	value(a, unix.NFTA_SET_ELEM_KEY, e.Key)
	if e.Value != nil {
		value(a, unix.NFTA_SET_ELEM_DATA, e.Value)
	}
	if e.Timeout > 0 {
		a.Number64(unix.NFTA_SET_ELEM_TIMEOUT, uint64(e.Timeout.Milliseconds()))
	}
	a.Close(elem)
}

func value(a *nfnetlink.Attributes, kind uint16, data []byte) {
	outer := a.Open(kind)
	a.Bytes(unix.NFTA_DATA_VALUE, data)
	a.Close(outer)
}
