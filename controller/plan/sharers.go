package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxSharers is the most Services that hold one address together. Each of them costs the others'
// decisions a little.
const maxSharers = 1000

// sharers are the Services that hold one address.
type sharers struct {
	entries []*entry // oldest first
	// ports has who uses a port, once somebody has asked: see users.
	ports map[portProtocol][]*entry
	// first is the Service that held the address before the others, and best its rank, if found says so.
	first *entry
	best  int
	found bool
	// told is the first one whose condition says so.
	told *entry
}

type portProtocol struct {
	port     uint16
	protocol lb.Protocol
}

// enter adds e to those that hold addr, and marks the others that this concerns.
func (b *Book) enter(e *entry, addr netip.Addr) {
	h := b.holders[addr]
	if h == nil {
		h = &sharers{}
		b.holders[addr] = h
	}
	i, _ := slices.BinarySearchFunc(h.entries, e, func(x, y *entry) int { return Older(&x.Service, &y.Service) })
	h.entries = slices.Insert(h.entries, i, e)
	b.reranked(e, addr)
	if h.ports != nil {
		h.usePorts(e)
	}
	b.markHindered(e, addr, h)
}

// leave undoes enter. What is known of e must be as it was then.
func (b *Book) leave(e *entry, addr netip.Addr) {
	h := b.holders[addr]
	b.markHindered(e, addr, h)
	h.entries, h.found = slices.DeleteFunc(h.entries, func(x *entry) bool { return x == e }), false
	if h.ports != nil {
		h.freePorts(e)
	}
	if len(h.entries) == 0 {
		delete(b.holders, addr)
	}
	b.unshare(addr, e.Request.Share)
}

func (h *sharers) usePorts(e *entry) {
	for _, p := range e.Ports {
		at := portProtocol{p.Port, p.Protocol}
		h.ports[at] = append(h.ports[at], e)
	}
}

func (h *sharers) freePorts(e *entry) {
	for _, p := range e.Ports {
		at := portProtocol{p.Port, p.Protocol}
		if h.ports[at] = slices.DeleteFunc(h.ports[at], func(x *entry) bool { return x == e }); len(h.ports[at]) == 0 {
			delete(h.ports, at)
		}
	}
}

// users returns who uses each port. It is made when it is first needed, as most addresses have one holder, and
// others ask for few of them.
func (h *sharers) users() map[portProtocol][]*entry {
	if h.ports == nil {
		h.ports = map[portProtocol][]*entry{}
		for _, e := range h.entries {
			h.usePorts(e)
		}
	}
	return h.ports
}

// apart calls yield for all others that hold the address and cannot do so together with e, some of
// them more than once. It costs the ports of e, and those of the others once, however often it is called.
func (h *sharers) apart(e *entry, yield func(*entry)) {
	left := false // others for which it depends on ports
	for _, other := range h.entries {
		switch {
		case other == e:
		case unshared(&e.Service, &other.Service) != "" || differentPods(&e.Service, &other.Service):
			yield(other)
		default:
			left = true
		}
	}
	if !left {
		return
	}
	users := h.users()
	for _, p := range e.Ports {
		for _, other := range users[portProtocol{p.Port, p.Protocol}] {
			if other != e {
				yield(other)
			}
		}
	}
}

// oldest returns a function for apart and the oldest of those that it was called for.
func oldest(only func(*entry) bool) (yield func(*entry), found func() *entry) {
	var best *entry
	return func(e *entry) {
		if (best == nil || Older(&e.Service, &best.Service) < 0) && only(e) {
			best = e
		}
	}, func() *entry { return best }
}

// markHindered has those decided anew that may not hold addr together with e, as e comes first.
func (b *Book) markHindered(e *entry, addr netip.Addr, h *sharers) {
	if len(h.entries) > 1 {
		h.apart(e, func(other *entry) {
			if b.precedes(e, other, addr) {
				b.mark(other)
			}
		})
	}
}

// reranked notes that e came to addr, or that its rank there may differ. That may make it the first;
// what it changes of the others' ranks only puts them behind.
func (b *Book) reranked(e *entry, addr netip.Addr) {
	h := b.holders[addr]
	if !e.over {
		b.share(addr, e.Request.Share)
	}
	if !h.found || h.first == nil || h.first == e {
		h.found = false
	} else if rank := b.rank(e, addr); rank < h.best || rank == h.best && Older(&e.Service, &h.first.Service) < 0 {
		h.first, h.best = e, rank
	}
}

// markFirst has the first one that holds addr decided anew if another one was it before, and that one: their conditions
// say so. Those of the others go on to name whom they joined.
func (b *Book) markFirst(addr netip.Addr) {
	h := b.holders[addr]
	if h == nil {
		return
	}
	first := b.first(addr)
	if first == h.told {
		return
	}
	for _, e := range h.entries {
		if e == first || e == h.told {
			b.mark(e)
		}
	}
	h.told = first
}

// at returns those that hold addr, oldest first.
func (b *Book) at(addr netip.Addr) []*entry {
	if h := b.holders[addr]; h != nil {
		return h.entries
	}
	return nil
}

// mayJoin tells why e cannot have addr together with those that hold it.
func (b *Book) mayJoin(e *entry, addr netip.Addr) *lb.Refusal {
	h := b.holders[addr]
	if h == nil {
		return nil
	}
	yield, found := oldest(func(*entry) bool { return true })
	h.apart(e, yield)
	pool := b.separating(addr)
	for _, other := range h.entries {
		if other.over || pool != nil && other.Key.Namespace != e.Key.Namespace || foreignPods(&e.Service, &other.Service) {
			yield(other)
		}
	}
	if holder := found(); holder != nil {
		return refuseJoin(e, holder, addr, pool)
	}
	if len(h.entries) >= maxSharers && !slices.Contains(h.entries, e) {
		return refuseSharers(addr, len(h.entries))
	}
	if first := b.first(addr); first != nil && first != e && narrows(&e.Service, &first.Service) {
		return lb.Refuse(lb.ReasonSharingRefused, "asks for %s, which %s held first, and which is announced from nodes that "+
			"do not deliver this Service, as it has externalTrafficPolicy Local; set Cluster, or the selector and policy of "+
			"the other", addr, first.Key.SeenFrom(e.Key.Namespace))
	}
	return nil
}

func refuseSharers(addr netip.Addr, n int) *lb.Refusal {
	return lb.Refuse(lb.ReasonTooManySharers,
		"asks for %s, which %d Services share, the most that can share an address", addr, n)
}

func refuseJoin(e, holder *entry, addr netip.Addr, pool *pool) *lb.Refusal {
	who := holder.Key.SeenFrom(e.Key.Namespace)
	why := apart(&e.Service, &holder.Service)
	switch {
	case holder.over:
		return lb.Refuse(lb.ReasonAddressTaken, "asks for %s, which %s held and nodes may still announce", addr, who)
	case e.Request.Share == "":
		return lb.Refuse(lb.ReasonAddressTaken, "asks for %s, which %s holds", addr, who)
	case why == "" && pool == nil:
		why = "in another namespace, and both have externalTrafficPolicy Local, so there may be no node that delivers both"
	case why == "":
		why = fmt.Sprintf("in another namespace, and spec.sharing of pool %s is namespace", pool.Name)
	}
	return lb.Refuse(lb.ReasonSharingRefused, "asks for %s, which %s holds %s", addr, who, why)
}

// separating returns the pool of addr if it lets only Services of one namespace share an address.
// That counts for newcomers only: an address that two share already is taken from neither.
func (b *Book) separating(addr netip.Addr) *pool {
	if p := b.pools.of(addr); p != nil && !p.ShareAcross {
		return p
	}
	return nil
}
