package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"iter"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// messages are netlink messages in the form in which they are sent (RFC 3549;
// linux/netfilter/nfnetlink.h and nf_tables.h).
type messages struct {
	family lb.Family
	table  string
	buf    []byte
	// about says of each message what it is for, by its place.
	about []string
}

// listLimit keeps a list of elements below what the 16 bits of an attribute's length can say.
const listLimit = 60_000

// Message types that unix lacks the subsystem for.
const subsystem = unix.NFNL_SUBSYS_NFTABLES << 8

// message appends one message; body appends its attributes.
func (m *messages) message(kind, flags uint16, about string, body func()) {
	start := len(m.buf)
	m.header(kind, flags, m.nfproto(), 0)
	body()
	m.finish(start)
	m.about = append(m.about, about)
}

func (m *messages) header(kind, flags uint16, family byte, resource uint16) {
	seq := uint32(len(m.about)) // made unique by the sender
	m.buf = binary.NativeEndian.AppendUint32(m.buf, 0)
	m.buf = binary.NativeEndian.AppendUint16(m.buf, kind)
	m.buf = binary.NativeEndian.AppendUint16(m.buf, unix.NLM_F_REQUEST|flags)
	m.buf = binary.NativeEndian.AppendUint32(m.buf, seq)
	m.buf = binary.NativeEndian.AppendUint32(m.buf, 0)
	m.buf = append(m.buf, family, unix.NFNETLINK_V0)
	m.buf = binary.BigEndian.AppendUint16(m.buf, resource)
}

func (m *messages) finish(start int) {
	binary.NativeEndian.PutUint32(m.buf[start:], uint32(len(m.buf)-start))
}

func (m *messages) nfproto() byte { return builder{m.family}.nfproto() }

// begin and end make what is between them one transaction: all of it happens, or nothing.
func (m *messages) begin() { m.frame(unix.NFNL_MSG_BATCH_BEGIN) }
func (m *messages) end()   { m.frame(unix.NFNL_MSG_BATCH_END) }

func (m *messages) frame(kind uint16) {
	start := len(m.buf)
	m.header(kind, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	m.finish(start)
	m.about = append(m.about, "transaction")
}

func (m *messages) attr(kind uint16, data []byte) {
	m.buf = binary.NativeEndian.AppendUint16(m.buf, uint16(4+len(data)))
	m.buf = binary.NativeEndian.AppendUint16(m.buf, kind)
	m.buf = append(m.buf, data...)
	m.pad()
}

func (m *messages) pad() {
	for len(m.buf)%unix.NLA_ALIGNTO != 0 {
		m.buf = append(m.buf, 0)
	}
}

func (m *messages) text(kind uint16, s string) { m.attr(kind, append([]byte(s), 0)) }

func (m *messages) number(kind uint16, n uint32) {
	m.attr(kind, binary.BigEndian.AppendUint32(nil, n))
}

// nest opens an attribute that holds others and returns where it starts, for close.
func (m *messages) nest(kind uint16) int {
	start := len(m.buf)
	m.buf = binary.NativeEndian.AppendUint16(m.buf, 0)
	m.buf = binary.NativeEndian.AppendUint16(m.buf, unix.NLA_F_NESTED|kind)
	return start
}

func (m *messages) close(start int) {
	binary.NativeEndian.PutUint16(m.buf[start:], uint16(len(m.buf)-start))
}

func (m *messages) nested(kind uint16, body func()) {
	start := m.nest(kind)
	body()
	m.close(start)
}

func (m *messages) addTable() {
	m.message(subsystem|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add the table",
		func() { m.text(unix.NFTA_TABLE_NAME, m.table) })
}

func (m *messages) removeTable() {
	m.message(subsystem|unix.NFT_MSG_DELTABLE, 0, "remove the table", func() { m.text(unix.NFTA_TABLE_NAME, m.table) })
}

func (m *messages) addSet(s set) {
	m.message(subsystem|unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, "add set "+s.name, func() {
		m.text(unix.NFTA_SET_TABLE, m.table)
		m.text(unix.NFTA_SET_NAME, s.name)
		m.number(unix.NFTA_SET_ID, uint32(len(m.about)))
		m.number(unix.NFTA_SET_FLAGS, s.flags)
		m.number(unix.NFTA_SET_KEY_TYPE, typeNumber(m.family, s.key))
		m.number(unix.NFTA_SET_KEY_LEN, length(m.family, s.key))
		if len(s.value) > 0 {
			m.number(unix.NFTA_SET_DATA_TYPE, typeNumber(m.family, s.value))
			m.number(unix.NFTA_SET_DATA_LEN, length(m.family, s.value))
		}
		m.setDescription(s)
		if data := s.userdata(m.family); data != nil {
			m.attr(unix.NFTA_SET_USERDATA, data)
		}
	})
}

// setDescription adds the limit of a set, and for one with ranges the lengths of its key's fields.
func (m *messages) setDescription(s set) {
	if s.size == 0 && s.flags&setConcat == 0 {
		return
	}
	m.nested(unix.NFTA_SET_DESC, func() {
		if s.size > 0 {
			m.number(unix.NFTA_SET_DESC_SIZE, s.size)
		}
		if s.flags&setConcat == 0 {
			return
		}
		const setDescConcat, setFieldLen = 2, 1
		m.nested(setDescConcat, func() {
			for _, f := range s.key {
				m.nested(unix.NFTA_LIST_ELEM, func() { m.number(setFieldLen, fieldBytes(m.family, f)) })
			}
		})
	})
}

// fieldBytes is the length of a field without padding.
func fieldBytes(family lb.Family, f field) uint32 {
	switch f {
	case fieldProtocol:
		return 1
	case fieldPort, fieldSourcePort:
		return 2
	}
	return 4 * builder{family}.words(f)
}

func (m *messages) removeSet(name string) {
	m.message(subsystem|unix.NFT_MSG_DELSET, 0, "remove set "+name, func() {
		m.text(unix.NFTA_SET_TABLE, m.table)
		m.text(unix.NFTA_SET_NAME, name)
	})
}

func (m *messages) addChain(c chain) {
	m.message(subsystem|unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "add chain "+c.name, func() {
		m.text(unix.NFTA_CHAIN_TABLE, m.table)
		m.text(unix.NFTA_CHAIN_NAME, c.name)
		if c.hook == nil {
			return
		}
		m.nested(unix.NFTA_CHAIN_HOOK, func() {
			m.number(unix.NFTA_HOOK_HOOKNUM, c.hook.number)
			m.number(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority))
		})
		const policyAccept = 1 // NF_ACCEPT
		m.number(unix.NFTA_CHAIN_POLICY, policyAccept)
		m.text(unix.NFTA_CHAIN_TYPE, c.hook.kind)
	})
}

func (m *messages) removeChain(name string) {
	m.message(subsystem|unix.NFT_MSG_DELCHAIN, 0, "remove chain "+name, func() {
		m.text(unix.NFTA_CHAIN_TABLE, m.table)
		m.text(unix.NFTA_CHAIN_NAME, name)
	})
}

// removeRules removes all rules of the table.
func (m *messages) removeRules() {
	m.message(subsystem|unix.NFT_MSG_DELRULE, 0, "remove the rules", func() { m.text(unix.NFTA_RULE_TABLE, m.table) })
}

func (m *messages) addRule(chain string, r rule) error {
	var err error
	m.message(subsystem|unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "add a rule to chain "+chain, func() {
		m.text(unix.NFTA_RULE_TABLE, m.table)
		m.text(unix.NFTA_RULE_CHAIN, chain)
		var body []byte
		if body, err = r.encode(m.nfproto()); err != nil {
			return
		}
		m.attr(unix.NLA_F_NESTED|unix.NFTA_RULE_EXPRESSIONS, body)
		m.attr(unix.NFTA_RULE_USERDATA, r.userdata(body))
	})
	return err
}

// encode returns the rule's expressions as the list that the kernel takes.
func (r rule) encode(nfproto byte) ([]byte, error) {
	var list messages
	for _, e := range r.exprs {
		data, err := encodeExpr(nfproto, e)
		if err != nil {
			return nil, fmt.Errorf("encode %T: %w", e, err)
		}
		list.attr(unix.NLA_F_NESTED|unix.NFTA_LIST_ELEM, data)
	}
	return list.buf, nil
}

// encodeExpr is expr.Marshal, but for the addresses of a flow: that leaves out their direction,
// without which the kernel refuses them.
func encodeExpr(nfproto byte, e expr.Any) ([]byte, error) {
	ct, ok := e.(*expr.Ct)
	if !ok || ct.Key < unix.NFT_CT_SRC_IP || ct.Key > unix.NFT_CT_DST_IP6 {
		return expr.Marshal(nfproto, e)
	}
	var m messages
	m.text(unix.NFTA_EXPR_NAME, "ct")
	m.nested(unix.NFTA_EXPR_DATA, func() {
		m.number(unix.NFTA_CT_KEY, uint32(ct.Key))
		m.number(unix.NFTA_CT_DREG, ct.Register)
		m.attr(unix.NFTA_CT_DIRECTION, []byte{byte(ct.Direction)})
	})
	return m.buf, nil
}

// userdata is what the kernel keeps with a rule for us and for nft: the comment that nft prints,
// and, under a type that nft passes over, a hash of the rule, by which it is recognised when read
// back.
func (r rule) userdata(body []byte) []byte {
	const commentType, hashType = 0, 0x4c
	h := fnv.New64a()
	h.Write(body)
	data := tlv(hashType, h.Sum(nil))
	if r.comment != "" {
		data = append(tlv(commentType, append([]byte(r.comment), 0)), data...)
	}
	return data
}

// addElements and removeElements take entries ordered by set.
func (m *messages) addElements(entries []entry) {
	m.elements(subsystem|unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "add to ", entries, true)
}

func (m *messages) removeElements(entries []entry) {
	m.elements(subsystem|unix.NFT_MSG_DELSETELEM, 0, "remove from ", entries, false)
}

func (m *messages) elements(kind, flags uint16, about string, entries []entry, values bool) {
	for len(entries) > 0 {
		name := entries[0].setName()
		n := 0
		m.message(kind, flags, about+name, func() {
			m.text(unix.NFTA_SET_ELEM_LIST_TABLE, m.table)
			m.text(unix.NFTA_SET_ELEM_LIST_SET, name)
			list := m.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			for n < len(entries) && entries[n].sameSet(entries[0].element) && len(m.buf)-list < listLimit {
				m.element(entries[n], values)
				n++
			}
			m.close(list)
		})
		entries = entries[n:]
	}
}

// sameSet tells whether two elements are of the same set of the kernel.
func (e element) sameSet(other element) bool {
	switch {
	case e.set != other.set:
		return false
	case e.set == setAffinity:
		return e.protocol == other.protocol && e.number == other.number
	}
	return !e.perProtocol() || e.protocol == other.protocol
}

func (m *messages) element(e entry, values bool) {
	elem := m.nest(unix.NFTA_LIST_ELEM)
	m.value(unix.NFTA_SET_ELEM_KEY, func() { m.buf = e.appendKey(m.buf, m.family, e.source) })
	if e.set == setSourceRanges {
		m.value(keyEnd, func() { m.buf = e.appendKey(m.buf, m.family, e.lastSource(m.family)) })
	}
	if values && (e.set == setBackends || e.set == setPorts) {
		m.value(unix.NFTA_SET_ELEM_DATA, func() { m.buf = e.appendValue(m.buf, m.family) })
	}
	m.close(elem)
}

// keyEnd is NFTA_SET_ELEM_KEY_END.
const keyEnd = 10

func (m *messages) value(kind uint16, body func()) {
	outer := m.nest(kind)
	inner := m.nest(unix.NFTA_DATA_VALUE)
	binary.NativeEndian.PutUint16(m.buf[inner+2:], unix.NFTA_DATA_VALUE) // it holds bytes, no attributes
	body()
	m.close(inner)
	m.pad()
	m.close(outer)
}

// attributes goes through attributes without their flags.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			size := int(binary.NativeEndian.Uint16(b))
			if size < 4 || size > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:size]) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}

// attribute returns the first attribute of a kind, nil if there is none.
func attribute(b []byte, kind uint16) []byte {
	for k, data := range attributes(b) {
		if k == kind {
			return data
		}
	}
	return nil
}
