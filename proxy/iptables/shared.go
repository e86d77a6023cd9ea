package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Rules of many Services stand in short chains of their own, so that a packet meets few of them,
// and a change makes iptables-restore read few of them: it fetches each chain of which it removes a
// rule. Addresses are told apart by their last bits, which a mask can match in both families, and
// node ports by their first ones, which a range can.
const (
	addressBuckets = 128
	portBucket     = 32 // node ports of one chain
)

// place names a chain of one of the tables.
type place struct {
	filter bool // the table: filter, else nat
	chain  string
}

func (p place) in(t tables) chains {
	if p.filter {
		return t.filter
	}
	return t.nat
}

// byAddress returns the chain for rules about addr that is reached from chain, and the jump to it.
func byAddress(chain string, addr netip.Addr) (bucket, jump string) {
	bits := addr.As16()
	n := bits[15] % addressBuckets
	at, mask := netip.AddrFrom4([4]byte{3: n}), netip.AddrFrom4([4]byte{3: addressBuckets - 1})
	if addr.Is6() {
		at, mask = netip.AddrFrom16([16]byte{15: n}), netip.AddrFrom16([16]byte{15: addressBuckets - 1})
	}
	bucket = fmt.Sprintf("%s-%02X", chain, n)
	return bucket, fmt.Sprintf("-d %s/%s -j %s", at, mask, bucket)
}

// byPort is byAddress for rules about a port.
func byPort(chain string, protocol lb.Protocol, port uint16) (bucket, jump string) {
	first := port - port%portBucket
	bucket = fmt.Sprintf("%s-%d", chain, first)
	return bucket,
		fmt.Sprintf("-p %s -m %s --dport %d:%d -j %s", protocol.Lower(), protocol.Lower(), first, first+portBucket-1, bucket)
}

// shared counts, for each chain in which several Services have rules, how many ask for each rule.
type shared map[place]map[string]int

// add counts the entries of a Service n times, and notes the chains that change.
func (s shared) add(entries []entry, n int, changed map[place]bool) {
	for _, e := range entries {
		rules := s[e.place]
		before := rules[e.rule]
		switch {
		case rules == nil:
			s[e.place] = map[string]int{e.rule: n}
		case before+n == 0:
			delete(rules, e.rule)
			if len(rules) == 0 {
				delete(s, e.place)
			}
		default:
			rules[e.rule] = before + n
		}
		if before == 0 || before+n == 0 {
			changed[e.place] = true
		}
	}
}

// rules returns the rules of a chain in an order that depends on nothing else.
func (s shared) rules(at place) []string { return slices.Sorted(maps.Keys(s[at])) }
