package nft

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Listing reads a table. Each method may return nfnetlink.ErrInterrupted; nfnetlink.Complete
// repeats what was.
type Listing struct {
	Conn  *nfnetlink.Conn
	Table Table
}

// tableName is the attribute for the name of the table, the same number in all messages.
const tableName = unix.NFTA_TABLE_NAME

// dump lists objects of the table. body appends what narrows it. Not every kernel leaves out the
// objects of other tables.
func (l Listing) dump(kind uint16, body func(*nfnetlink.Attributes), each func(attributes []byte)) error {
	var m nfnetlink.Messages
	m.Add(subsystem<<8|kind, unix.NLM_F_DUMP, l.Table.number(), "list", func() {
		if kind != unix.NFT_MSG_GETTABLE {
			m.Text(tableName, l.Table.Name)
		}
		if body != nil {
			body(&m.Attributes)
		}
	})
	return l.Conn.Dump(&m, func(msg nfnetlink.Message) error {
		if nfnetlink.GetText(msg.Attributes(), tableName) == l.Table.Name {
			each(msg.Attributes())
		}
		return nil
	})
}

// Exists reports whether the table is there.
func (l Listing) Exists() (exists bool, err error) {
	err = l.dump(unix.NFT_MSG_GETTABLE, nil, func([]byte) { exists = true })
	return exists, err
}

// Sets returns the sets' shapes by their names.
func (l Listing) Sets() (map[string]Shape, error) {
	sets := map[string]Shape{}
	err := l.dump(unix.NFT_MSG_GETSET, nil, func(attributes []byte) {
		sets[nfnetlink.GetText(attributes, unix.NFTA_SET_NAME)] = readShape(attributes)
	})
	return sets, err
}

func readShape(b []byte) (s Shape) {
	s.Flags, _ = nfnetlink.GetNumber(b, unix.NFTA_SET_FLAGS)
	s.KeyType, _ = nfnetlink.GetNumber(b, unix.NFTA_SET_KEY_TYPE)
	s.KeyLength, _ = nfnetlink.GetNumber(b, unix.NFTA_SET_KEY_LEN)
	s.ValueType, _ = nfnetlink.GetNumber(b, unix.NFTA_SET_DATA_TYPE)
	s.ValueLength, _ = nfnetlink.GetNumber(b, unix.NFTA_SET_DATA_LEN)
	return s
}

// Chain is a chain as the kernel has it. A rule is recognised by its UserData.
type Chain struct {
	Hook  Hook
	Rules []string
	// Packets is the sum of the counters in the rules.
	Packets uint64
}

// Chains returns the chains with their rules by name.
func (l Listing) Chains() (map[string]Chain, error) {
	chains := map[string]Chain{}
	err := l.dump(unix.NFT_MSG_GETCHAIN, nil, func(attributes []byte) {
		chains[nfnetlink.GetText(attributes, unix.NFTA_CHAIN_NAME)] = Chain{Hook: readHook(attributes)}
	})
	if err != nil {
		return nil, err
	}
	err = l.dump(unix.NFT_MSG_GETRULE, nil, func(attributes []byte) {
		name := nfnetlink.GetText(attributes, unix.NFTA_RULE_CHAIN)
		c := chains[name]
		c.Rules = append(c.Rules, string(nfnetlink.Get(attributes, unix.NFTA_RULE_USERDATA)))
		c.Packets += readCounters(attributes)
		chains[name] = c
	})
	return chains, err
}

func readHook(b []byte) Hook {
	number, ok := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_HOOKNUM)
	priority, also := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_PRIORITY)
	if !ok || !also {
		return Hook{}
	}
	return Hook{Kind: nfnetlink.GetText(b, unix.NFTA_CHAIN_TYPE), Number: number, Priority: int32(priority)}
}

func readCounters(b []byte) (packets uint64) {
	for _, e := range nfnetlink.All(nfnetlink.Get(b, unix.NFTA_RULE_EXPRESSIONS)) {
		if nfnetlink.GetText(e, unix.NFTA_EXPR_NAME) != "counter" {
			continue
		}
		if n := nfnetlink.Get(e, unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_PACKETS); len(n) == 8 {
			packets += binary.BigEndian.Uint64(n)
		}
	}
	return packets
}

// Elements passes on the elements of a set. They are valid only until each returns.
func (l Listing) Elements(set string, each func(Element)) error {
	name := func(a *nfnetlink.Attributes) { a.Text(unix.NFTA_SET_ELEM_LIST_SET, set) }
	return l.dump(unix.NFT_MSG_GETSETELEM, name, func(attributes []byte) {
		for e := range elements(attributes) {
			each(e)
		}
	})
}

// elements goes through the elements of a message.
func elements(attributes []byte) iter.Seq[Element] {
	return func(yield func(Element) bool) {
		for _, elem := range nfnetlink.All(nfnetlink.Get(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			var e Element
			for kind, nested := range nfnetlink.All(elem) {
				switch kind {
				case unix.NFTA_SET_ELEM_KEY:
					e.Key = nfnetlink.Get(nested, unix.NFTA_DATA_VALUE)
				case unix.NFTA_SET_ELEM_DATA:
					e.Value = nfnetlink.Get(nested, unix.NFTA_DATA_VALUE)
				case unix.NFTA_SET_ELEM_EXPR:
					e.Count = readCount(nfnetlink.Get(nested, unix.NFTA_EXPR_DATA))
				}
			}
			if !yield(e) {
				return
			}
		}
	}
}

// Changed returns the table that an event is about, and the set if it is about elements; ok is
// false for an event that is about no table, about an object that this package does not write, or about a
// flowtable, which nobody can remove while a rule uses it.
func Changed(m nfnetlink.Message) (t Table, set string, ok bool) {
	if !m.Is(subsystem) {
		return t, "", false
	}
	switch m.Family() {
	case unix.NFPROTO_IPV4:
		t.Family = lb.IPv4
	case unix.NFPROTO_IPV6:
		t.Family = lb.IPv6
	default:
		return t, "", false
	}
	switch m.Kind & 0xff {
	case unix.NFT_MSG_NEWGEN, unix.NFT_MSG_NEWOBJ, unix.NFT_MSG_DELOBJ, unix.NFT_MSG_NEWFLOWTABLE,
		unix.NFT_MSG_DELFLOWTABLE:
		return t, "", false
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		set = nfnetlink.GetText(m.Attributes(), unix.NFTA_SET_ELEM_LIST_SET)
	}
	t.Name = nfnetlink.GetText(m.Attributes(), tableName)
	return t, set, true
}
