// Package trace walks the first packet of a connection through the rules of a node, hook by hook, as
// the kernel does. What the rules of a chain do is for others: proxy/nft/walk knows those of
// nftables, proxy/iptables those of iptables.
package trace

import (
	"cmp"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Packet is a packet on its way through the rules.
type Packet struct {
	Source, Destination netip.AddrPort
	// Sent is where the client sent the packet: the original destination of conntrack. Host.Walk sets it.
	Sent netip.AddrPort
	// Interface is where the packet came in; "" for packets of the node itself.
	Interface string
	Protocol  uint8 // IANA protocol number; that of ICMP stands for the question of a ping
	// TTL is the packet's, or its hop limit; 0 stands for 64. Sender is the MAC address of the frame.
	TTL    uint8
	Sender [6]byte
	// Mark is the packet's, Priority its class for queueing disciplines.
	Mark, Priority uint32
	// Translated is set once the destination has been translated, Masqueraded once the source has.
	Translated, Masqueraded bool
	// Established is set for a connection that has been answered and whose handshake is over. Invalid
	// is set for a packet that conntrack finds so: chains of type nat do not see it.
	Established, Invalid bool
}

// Verdict is how rules end a packet's way through a hook.
type Verdict string

// The verdicts.
const (
	Undecided  Verdict = ""
	Return     Verdict = "return" // to the chain that jumped to this one
	Accept     Verdict = "accept"
	Translate  Verdict = "translate" // the destination was translated
	Masquerade Verdict = "masquerade"
	Drop       Verdict = "drop"
	Reject     Verdict = "reject"
	Redirect   Verdict = "redirect" // to the node itself
	Unroutable Verdict = "unroutable"
	Unknown    Verdict = "unknown"
)

// Way is one way that a packet may take, with its probability. Ways part where rules draw.
type Way struct {
	Packet
	Verdict Verdict
	Chance  float64

	last *step
}

// step is a rule that did something, and those before it. Ways share the steps before they part.
type step struct {
	lb.TraceStep
	before *step
}

// Step adds a rule that did something.
func (w *Way) Step(s lb.TraceStep) { w.last = &step{s, w.last} }

// Steps returns the rules that did something, in their order.
func (w Way) Steps() (all []lb.TraceStep) {
	for s := w.last; s != nil; s = s.before {
		all = append(all, s.TraceStep)
	}
	slices.Reverse(all)
	return all
}

// Why returns the comment of the last rule that has one; "" if none has.
func (w Way) Why() string {
	for s := w.last; s != nil; s = s.before {
		if s.Comment != "" {
			return s.Comment
		}
	}
	return ""
}

// Ended reports whether the packet goes no further.
func (w Way) Ended() bool {
	return slices.Contains([]Verdict{Drop, Reject, Redirect, Unroutable, Unknown}, w.Verdict)
}

// Chain is a chain that the kernel enters.
type Chain struct {
	Hook     uint32 // such as unix.NF_INET_PRE_ROUTING
	Priority int32
	NAT      bool // of type nat
	// Walk returns the ways out of the chain.
	Walk func(Way) []Way
}

// Route is where the routing table sends packets for an address.
type Route uint8

// The routes.
const (
	RouteOn    Route = iota // to another host, or a pod
	RouteLocal              // the node itself
	RouteNone
)

// Host is a node.
type Host struct {
	Chains []Chain
	Route  func(netip.Addr) Route
}

// Walk walks the first packet of a connection through all hooks, and returns the ways that it can
// take, each with another end.
func (h Host) Walk(p Packet) []Way {
	p.Sent = p.Destination
	ways := []Way{{Packet: p, Chance: 1}}
	switch {
	case p.Interface != "":
		ways = h.hook(unix.NF_INET_PRE_ROUTING, ways)
	case h.Route(p.Destination.Addr()) == RouteNone: // before any rule
		ways[0].Verdict = Unroutable
		return ways
	default:
		ways = h.hook(unix.NF_INET_LOCAL_OUT, ways)
	}
	var ends []Way
	for _, way := range ways {
		hooks := []uint32{unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
		switch route := h.Route(way.Destination.Addr()); {
		case way.Ended():
			hooks = nil
		case route == RouteNone:
			way.Verdict, hooks = Unroutable, nil
		case route == RouteLocal && p.Interface != "":
			hooks = []uint32{unix.NF_INET_LOCAL_IN}
		case route == RouteLocal:
			hooks = []uint32{unix.NF_INET_POST_ROUTING, unix.NF_INET_LOCAL_IN}
		case p.Interface == "":
			hooks = hooks[1:]
		}
		out := []Way{way}
		for _, hook := range hooks {
			out = h.hook(hook, out)
		}
		ends = append(ends, out...)
	}
	return merge(ends)
}

// hook walks ways through all chains of a hook, in the order of their priorities.
func (h Host) hook(hook uint32, ways []Way) []Way {
	chains := slices.DeleteFunc(slices.Clone(h.Chains), func(c Chain) bool { return c.Hook != hook })
	slices.SortStableFunc(chains, func(a, b Chain) int { return cmp.Compare(a.Priority, b.Priority) })
	for _, c := range chains {
		var next []Way
		for _, w := range ways {
			if w.Ended() || c.NAT && !w.meets(hook) {
				next = append(next, w)
				continue
			}
			w.Verdict = Undecided
			next = append(next, c.Walk(w)...)
		}
		ways = merge(next)
	}
	return ways
}

// meets reports whether the packet meets chains of type nat: what conntrack finds invalid does not,
// and once a connection has been translated at a hook, others are not asked.
func (w Way) meets(hook uint32) bool {
	switch hook {
	case unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_OUT:
		return !w.Invalid && !w.Translated
	}
	return !w.Invalid && !w.Masqueraded
}

// merge makes one of ways that end alike, with the steps of the most likely one.
func merge(ways []Way) []Way {
	type end struct {
		Packet
		Verdict
	}
	at, best := map[end]int{}, []float64(nil)
	var merged []Way
	for _, w := range ways {
		key := end{w.Packet, w.Verdict}
		i, ok := at[key]
		if !ok {
			at[key] = len(merged)
			merged, best = append(merged, w), append(best, w.Chance)
			continue
		}
		merged[i].Chance += w.Chance
		if w.Chance > best[i] {
			best[i], merged[i].last = w.Chance, w.last
		}
	}
	return merged
}

// Forget forgets the step of entering a chain that did nothing: what was last after is what was last
// on entry.
func (w *Way) Forget(before, entered Way) {
	if w.last == entered.last && w.Verdict == Undecided {
		w.last = before.last
	}
}
