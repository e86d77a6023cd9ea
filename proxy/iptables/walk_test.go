package iptables

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// packet is the first one of a connection on its way through the node's rules.
type packet struct {
	src, dst netip.AddrPort
	in       string // interface; "" for packets of the node itself
	protocol lb.Protocol
	invalid  bool // conntrack finds it so, and nat does not see it
}

// walker walks packets through rules that are not in a kernel. It stops the test at anything that it
// does not know.
type walker struct {
	t     *testing.T
	rules tables
	hooks tables
	local []netip.Addr // the node's own addresses
}

var protocolNumbers = map[lb.Protocol]uint8{lb.TCP: unix.IPPROTO_TCP, lb.UDP: unix.IPPROTO_UDP, lb.SCTP: unix.IPPROTO_SCTP}

// fate walks a new connection through all hooks and returns where it may end: a backend, "reject",
// "drop" or "none" when nothing matched; and whether it is masqueraded.
func (w walker) fate(p packet) (ends []string, masqueraded bool) { return w.through(w, p) }

// through is fate with rules whose lists are as another says.
func (w walker) through(rules WalkedRules, p packet) (ends []string, masqueraded bool) {
	isLocal := func(addr netip.Addr) bool { return slices.Contains(w.local, addr) || addr.IsLoopback() }
	walk := Walker{Family: lb.FamilyOf(p.dst.Addr()), Rules: rules, Local: isLocal, Foreign: map[string]int{}}
	host := trace.Host{Chains: walk.Hooks(), Route: func(addr netip.Addr) trace.Route {
		if isLocal(addr) {
			return trace.RouteLocal
		}
		return trace.RouteOn
	}}
	total := 0.0
	for _, end := range host.Walk(trace.Packet{Source: p.src, Destination: p.dst, Interface: p.in,
		Protocol: protocolNumbers[p.protocol], Invalid: p.invalid}) {
		total += end.Chance
		switch {
		case end.Verdict == trace.Unknown:
			w.t.Fatalf("unknown: %+v", end.Steps())
		case end.Verdict == trace.Drop, end.Verdict == trace.Reject:
			ends = append(ends, string(end.Verdict))
		case !end.Translated:
			ends = append(ends, "none")
		default:
			ends = append(ends, end.Destination.String())
			masqueraded = masqueraded || end.Masqueraded
		}
	}
	if total < 0.999 || total > 1.001 {
		w.t.Errorf("the ways have a probability of %v", total)
	}
	slices.Sort(ends)
	return slices.Compact(ends), masqueraded
}

// Chain implements WalkedRules.
func (w walker) Chain(table, chain string) ([]string, error) {
	rules, hooks := w.rules.nat, w.hooks.nat
	if table == "filter" {
		rules, hooks = w.rules.filter, w.hooks.filter
	}
	list, ok := rules[chain]
	if !ok {
		list, ok = hooks[chain]
	}
	if ok && list == nil {
		list = []string{}
	}
	return list, nil
}

// Recent implements WalkedRules: the client may be known.
func (w walker) Recent(string, netip.Addr) (float64, error) { return 0.5, nil }
