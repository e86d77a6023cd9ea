package iptables

import (
	"fmt"
	"math"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// rule is one rule in parts. Its String has them in the order in which iptables-save prints them.
type rule struct {
	src, dst       netip.Prefix
	notSrc, notDst bool
	in             string // interface; a + at its end stands for any rest
	notIn          bool
	protocol       lb.Protocol
	comment        string
	match          string // further matches, as iptables-save prints them
	port           uint16
	portless       bool // the protocol's module is named although no port is matched
	target         string
}

// String returns the rule without the leading -A and chain.
func (r rule) String() string {
	b := make([]byte, 0, 512) // more than a rule has: what is returned is kept, and takes no more than its length
	b = appendPrefix(b, "-s", r.src, r.notSrc)
	b = appendPrefix(b, "-d", r.dst, r.notDst)
	if r.in != "" {
		if r.notIn {
			b = append(b, "! "...)
		}
		b = fmt.Appendf(b, "-i %s ", r.in)
	}
	if r.protocol != "" {
		b = fmt.Appendf(b, "-p %s ", r.protocol.Lower())
	}
	if r.comment != "" {
		b = fmt.Appendf(b, "-m comment --comment %q ", r.comment)
	}
	if r.match != "" {
		b = append(append(b, r.match...), ' ')
	}
	switch {
	case r.port != 0:
		b = fmt.Appendf(b, "-m %s --dport %d ", r.protocol.Lower(), r.port)
	case r.portless:
		b = fmt.Appendf(b, "-m %s ", r.protocol.Lower())
	}
	return string(append(append(b, "-j "...), r.target...))
}

func appendPrefix(b []byte, flag string, p netip.Prefix, not bool) []byte {
	if !p.IsValid() {
		return b
	}
	if not {
		b = append(b, "! "...)
	}
	return append(p.AppendTo(append(append(b, flag...), ' ')), ' ')
}

// host returns the prefix that contains only addr.
func host(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }

// Matches that rules share.
const (
	toLocalAddress = "-m addrtype --dst-type LOCAL"
	// Not LOCAL.
	notToLocalAddress = "-m addrtype ! --dst-type LOCAL"
	fromLocalAddress  = "-m addrtype --src-type LOCAL"
)

// oneIn matches one of n packets at random. The kernel keeps the probability as a fraction of 2^31,
// which is what is printed.
func oneIn(n int) string {
	const unit = 1 << 31
	return fmt.Sprintf("-m statistic --mode random --probability %.11f", math.Round(unit/float64(n))/unit)
}
