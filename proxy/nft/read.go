package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// Listed is a rule as the kernel has it.
type Listed struct {
	Rule
	// Handle is the number of the rule in its table.
	Handle uint64
}

// ListedChain is a chain with all that its rules do. Its hook is zero if it is only jumped to.
type ListedChain struct {
	Hook  Hook
	Rules []Listed
}

// Rules returns the chains with their rules by name.
func (l Listing) Rules() (map[string]ListedChain, error) {
	chains := map[string]ListedChain{}
	err := l.dump(unix.NFT_MSG_GETCHAIN, nil, func(attributes []byte) {
		chains[nfnetlink.GetText(attributes, unix.NFTA_CHAIN_NAME)] = ListedChain{Hook: readHook(attributes)}
	})
	if err != nil {
		return nil, err
	}
	err = l.dump(unix.NFT_MSG_GETRULE, nil, func(attributes []byte) {
		name := nfnetlink.GetText(attributes, unix.NFTA_RULE_CHAIN)
		c := chains[name]
		r := Listed{Rule: Rule{Comment: comment(nfnetlink.Get(attributes, unix.NFTA_RULE_USERDATA)),
			Exprs: expr.Decode(bytes.Clone(nfnetlink.Get(attributes, unix.NFTA_RULE_EXPRESSIONS)))}}
		if n := nfnetlink.Get(attributes, unix.NFTA_RULE_HANDLE); len(n) == 8 {
			r.Handle = binary.BigEndian.Uint64(n)
		}
		c.Rules = append(c.Rules, r)
		chains[name] = c
	})
	return chains, err
}

// comment returns the comment in a rule's user data.
func comment(data []byte) string {
	const commentType = 0
	for len(data) >= 2 && len(data) >= 2+int(data[1]) {
		kind, value := data[0], data[2:2+int(data[1])]
		if kind == commentType {
			return string(bytes.TrimRight(value, "\x00"))
		}
		data = data[2+len(value):]
	}
	return ""
}

// maxKeys is how many keys one datagram asks for: the answers have to fit into the receive buffer.
const maxKeys = 128

// Get looks keys up in a set, without listing it, and returns what it has for each: nil for a key
// that it does not have, and an element without a value in a set that is no map.
func (l Listing) Get(set string, keys ...[]byte) (found []*Element, err error) {
	found = make([]*Element, len(keys))
	first := 0
	for part := range slices.Chunk(keys, maxKeys) {
		var m nfnetlink.Messages
		for _, key := range part {
			m.Add(subsystem<<8|unix.NFT_MSG_GETSETELEM, 0, l.Table.number(), "get an element", func() {
				m.Text(unix.NFTA_SET_ELEM_LIST_TABLE, l.Table.Name)
				m.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
				m.Nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
					m.Nested(unix.NFTA_LIST_ELEM, func() {
						m.Nested(unix.NFTA_SET_ELEM_KEY, func() { m.Bytes(unix.NFTA_DATA_VALUE, key) })
					})
				})
			})
		}
		var failure error
		err := l.Conn.Ask(&m, func(place int, msg nfnetlink.Message) {
			if !msg.Is(subsystem) {
				return
			}
			for e := range elements(msg.Attributes()) {
				found[first+place] = &Element{Key: bytes.Clone(e.Key), Value: bytes.Clone(e.Value)}
			}
		}, func(_ int, err error) {
			if failure == nil && !errors.Is(err, unix.ENOENT) {
				failure = err
			}
		})
		if err = errors.Join(err, failure); err != nil {
			return nil, fmt.Errorf("look up in set %s: %w", set, err)
		}
		first += len(part)
	}
	return found, nil
}

// BaseChain is a chain of any table that the kernel enters.
type BaseChain struct {
	// Family is netfilter's number of it.
	Family      byte
	Table, Name string
	Hook        Hook
	// Drops is set if the policy of the chain is drop, Rules is how many rules it has itself.
	Drops bool
	Rules int
}

// BaseChains returns the chains of all tables that the kernel enters, with IP packets or without,
// and reports which of the named chains there are, as "family table chain". It may return
// nfnetlink.ErrInterrupted.
func BaseChains(c *nfnetlink.Conn, named ...string) (chains []BaseChain, there []string, err error) {
	var m nfnetlink.Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.NFPROTO_UNSPEC, "list chains", func() {})
	err = c.Dump(&m, func(msg nfnetlink.Message) error {
		b := msg.Attributes()
		chain := BaseChain{Family: msg.Family(), Table: nfnetlink.GetText(b, unix.NFTA_CHAIN_TABLE),
			Name: nfnetlink.GetText(b, unix.NFTA_CHAIN_NAME), Hook: readHook(b)}
		if full := forwardFamilies[chain.Family] + " " + chain.Table + " " + chain.Name; slices.Contains(named, full) {
			there = append(there, full)
		}
		if !has(b, unix.NFTA_CHAIN_HOOK) {
			return nil
		}
		policy, set := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_POLICY)
		chain.Drops = set && policy == dropVerdict
		chains = append(chains, chain)
		return nil
	})
	for i, chain := range chains {
		if err == nil && forwardFamilies[chain.Family] != "" {
			err = listRules(c, chain.Family, chain.Table, chain.Name, func([]byte) { chains[i].Rules++ })
		}
	}
	return chains, there, err
}

func has(b []byte, kind uint16) bool { return nfnetlink.Get(b, kind) != nil }

// String names the chain for people; FamilyName returns its family as nft writes it, "" for one
// without IP packets.
func (c BaseChain) String() string { return c.FamilyName() + " " + c.Table + " " + c.Name }

// FamilyName returns the chain's family as nft writes it; "" for one that IP packets do not pass.
func (c BaseChain) FamilyName() string { return forwardFamilies[c.Family] }
