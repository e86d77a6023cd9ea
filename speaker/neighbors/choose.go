package neighbors

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

// askMost bounds how many neighbors are asked for at a time: each question is a broadcast, and
// when a switch returns, all nodes ask at once.
const askMost = 64

// question is a neighbor that the kernel is to ask for.
type question struct {
	links.Unresolved
	// awaited is set if packets are likely to be sent there, and an answer is likely to come.
	awaited bool
}

// choose returns the Nodes and the next hops of routes whose link-layer address the kernel does not
// know, those that are awaited first. All are but Nodes that do not live, and next hops that are
// silent. A next hop that is a Node counts as that Node.
func choose(d Desired, nextHops []links.Gateway, unresolved []links.Unresolved, silent map[key]bool) []question {
	usable := make(map[int]bool, len(d.Interfaces))
	for _, i := range d.Interfaces {
		usable[i.Index] = asks(i)
	}
	var chosen []question
	for _, u := range unresolved {
		live, isNode := d.Nodes[u.Addr]
		isHop := slices.Contains(nextHops, links.Gateway{Addr: u.Addr, Interface: u.Link})
		if usable[u.Link] && (isNode || isHop) {
			q := question{Unresolved: u}
			q.awaited = live || !isNode && !silent[q.key()]
			chosen = append(chosen, q)
		}
	}
	slices.SortFunc(chosen, question.compare)
	return chosen[:min(len(chosen), askMost)]
}

// compare orders questions by what is lost without them: packets wait for a neighbor that the kernel
// is asking for, and none does for one that it has given up.
func (q question) compare(other question) int {
	return cmp.Or(first(q.awaited, other.awaited), first(!q.Failed, !other.Failed), q.Addr.Compare(other.Addr),
		cmp.Compare(q.Link, other.Link))
}

// first orders true before false.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// asks reports whether the kernel can ask for neighbors on an interface.
func asks(i lb.Interface) bool { return i.Up && !i.NoARP && !i.Loopback }

// returned reports whether an interface with addresses of the node can ask for neighbors that could
// not before, or was not there. Those of pods have none.
func returned(before, now []lb.Interface) bool {
	could := make(map[int]bool, len(before))
	for _, i := range before {
		could[i.Index] = asks(i)
	}
	return slices.ContainsFunc(now, func(i lb.Interface) bool {
		return asks(i) && !could[i.Index] && slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool {
			return !p.Addr().IsLinkLocalUnicast()
		})
	})
}

// key tells neighbors apart, whatever their state.
type key struct {
	addr netip.Addr
	link int
}

func (q question) key() key { return key{q.Addr, q.Link} }
