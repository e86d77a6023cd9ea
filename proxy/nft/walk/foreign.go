package walk

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// Foreign walks a packet through a chain of another program that the kernel enters, where drops is the
// policy of the chain. Such a chain may have any rules: why says where the walk cannot tell what the kernel
// does, and then the packet goes on as if the chain were not there.
func (w *Walker) Foreign(hook uint32, priority int32, drops bool, chain string, p trace.Way) (out []trace.Way,
	why string) {
	w.foreign = true
	before := p
	// Ahead of connection tracking, no packet has a connection.
	const tracking = -200
	p.Invalid = p.Invalid || priority < tracking
	out = w.Hook(hook, chain, p)
	for i := range out {
		out[i].Invalid = before.Invalid
		switch {
		case out[i].Verdict == trace.Unknown:
			steps := out[i].Steps()
			last := steps[len(steps)-1]
			return []trace.Way{before}, fmt.Sprintf("rule %d of chain %s: %s", last.Rule, last.Chain, last.Text)
		case out[i].Verdict == trace.Undecided && drops:
			out[i].Verdict = trace.Drop
			table := w.family() + " " + w.Name
			out[i].Step(lb.TraceStep{Hook: w.hook, Table: table, Chain: chain, Foreign: true,
				Text:    "drop, as no rule accepts it",
				Comment: fmt.Sprintf("the policy of the chain %s %s, which another program has", table, chain)})
		}
	}
	return out, ""
}

// passive are expressions that only match or note something, by the kernel's names.
var passive = []string{"match", "log", "fib", "socket", "osf", "exthdr", "quota", "connlimit", "objref", "rt", "last",
	"limit"}

// onlyDrops reports whether a rule does nothing to a packet but let it go on or end its way. Where such a
// rule cannot be evaluated, rules behind it still hold for a packet that goes on.
func onlyDrops(r nft.Listed) bool {
	return !slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Unknown:
			return !slices.Contains(passive, e.Name)
		case *expr.Verdict:
			return e.Kind != expr.VerdictDrop
		case *expr.Lookup:
			return e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT
		case *expr.Meta:
			return e.SourceRegister
		case *expr.Payload:
			return e.Write
		case *expr.Reject, *expr.Cmp, *expr.Range, *expr.Bitwise, *expr.Counter, *expr.Limit, *expr.Ct, *expr.Immediate,
			*expr.Fib, *expr.Hash, *expr.Numgen, *expr.Dynset, *expr.FlowOffload:
			return false
		}
		return true
	})
}

// certain reports whether what an expression of another program's rule finds does not rest on what the walk
// has made up: rules of Landfall ask for less.
func (w *Walker) certain(e expr.Any, p way) bool {
	switch e := e.(type) {
	case *expr.Payload:
		return !e.Write && w.given(e, p)
	case *expr.Meta:
		arrived := e.Key == expr.MetaKeyIIF || e.Key == expr.MetaKeyIIFNAME || e.Key == expr.MetaKeyIIFTYPE
		return !arrived || w.Link != 0 || p.Interface == ""
	case *expr.Limit:
		return e.Over
	case *expr.Dynset, *expr.Numgen, *expr.Hash, *expr.DNAT, *expr.Redir, *expr.Masq, *expr.Dup:
		return false
	}
	return true
}

// given reports whether the packet has what is read of its headers: addresses, TTL, protocol, ports and
// TCP's flags.
func (w *Walker) given(e *expr.Payload, p way) bool {
	const flags = 13
	end := e.Offset + e.Len
	switch e.Base {
	case expr.PayloadBaseNetworkHeader:
		source, destination := w.addresses()
		return e.Len > 0 && (int(e.Offset) >= source && int(end) <= destination+nft.AddressBytes(w.Family) ||
			w.Family == lb.IPv4 && e.Offset >= 8 && end <= 10 || w.Family == lb.IPv6 && e.Offset >= 6 && end <= 8)
	case expr.PayloadBaseTransportHeader:
		return end <= 4 || p.Protocol == unix.IPPROTO_TCP && e.Offset == flags && e.Len == 1
	}
	return false
}

// quiet reports whether an expression of another program does nothing that matters to the packet.
func quiet(e expr.Any) bool {
	unknown, is := e.(*expr.Unknown)
	return is && (unknown.Name == "log" || unknown.Name == "last")
}
