package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// apart tells why two Services cannot have one address, "" when they can. A node announces a shared
// address only while it can deliver every Service on it, so policies may differ; but of two
// Services with policy Local that select different pods there may be no node that has both.
func apart(a, b *lb.Service) string {
	switch {
	case a.Request.Share == "" || b.Request.Share == "":
		return "without a sharing key"
	case a.Request.Share != b.Request.Share:
		return "with another sharing key"
	}
	for _, port := range a.Ports {
		if slices.ContainsFunc(b.Ports, func(p lb.ServicePort) bool {
			return p.Port == port.Port &&
				p.Protocol == port.Protocol
		}) {
			return fmt.Sprintf("and both have port %d/%s", port.Port, port.Protocol)
		}
	}
	if a.ExternalPolicy == lb.Local && b.ExternalPolicy == lb.Local &&
		(a.Request.Selector == "" || a.Request.Selector != b.Request.Selector) {
		return "and both have externalTrafficPolicy Local, but different selectors, so there may be no node that " +
			"delivers both"
	}
	return ""
}

// mayJoin tells why e cannot have addr together with those that hold it.
func (b *Book) mayJoin(e *entry, addr netip.Addr) *lb.Refusal {
	for _, holder := range b.holders[addr] {
		why := apart(&e.Service, &holder.Service)
		if why == "" {
			why = b.strangers(e, holder, addr)
		}
		switch {
		case holder == e || why == "":
		case e.Request.Share == "":
			return lb.Refuse(lb.ReasonAddressTaken, "asks for %s, which Service %s holds", addr, holder.Key)
		default:
			return lb.Refuse(lb.ReasonSharingRefused, "asks for %s, which Service %s holds %s", addr, holder.Key, why)
		}
	}
	if first := b.first(addr); first != nil && first != e && narrows(&e.Service, &first.Service) {
		return lb.Refuse(lb.ReasonSharingRefused, "asks for %s, which Service %s held first, and which is announced from "+
			"nodes that do not deliver this Service, as it has externalTrafficPolicy Local; set Cluster, or the selector "+
			"and policy of %s", addr, first.Key, first.Key)
	}
	return nil
}

// strangers tells why two Services of different namespaces cannot have addr together, "" when they
// can. It counts for newcomers only: an address that two share already is taken from neither.
func (b *Book) strangers(e, holder *entry, addr netip.Addr) string {
	if e.Key.Namespace == holder.Key.Namespace {
		return ""
	}
	p := b.pools.of(addr)
	if p == nil || p.ShareAcross {
		return ""
	}
	return fmt.Sprintf("in another namespace, and spec.sharing of pool %s is namespace", p.Name)
}

// narrows reports whether nodes that deliver the first holder of an address may fail to deliver a
// joiner. The first holder alone decides which nodes announce the address.
func narrows(joiner, first *lb.Service) bool {
	return joiner.ExternalPolicy == lb.Local &&
		(first.ExternalPolicy != lb.Local || joiner.Request.Selector != first.Request.Selector)
}

// first returns the Service that held addr before the others that hold it, or nil.
func (b *Book) first(addr netip.Addr) *entry {
	var first *entry
	best := 0
	for _, e := range b.holders[addr] {
		if rank := b.rank(e, addr); first == nil || rank < best {
			first, best = e, rank
		}
	}
	return first
}

// rank orders the holders of an address, before their age does: those that joined another one come
// after those that did not, and those that just came, or hold it by mistake, last.
func (b *Book) rank(e *entry, addr netip.Addr) int {
	first, joined := e.after[addr]
	switch {
	case e.shown == "" && !e.decided, e.shown == lb.ReasonDuplicate:
		return 2
	case joined && slices.ContainsFunc(b.holders[addr], func(h *entry) bool { return h.Key == first }):
		return 1
	}
	return 0
}

// shareable returns the lowest address of p that e can have together with its holders. With full,
// only one that its namespace has.
func (b *Book) shareable(e *entry, p *pool, family lb.Family, picked []netip.Addr,
	full bool) (best netip.Addr, ok bool) {
	for addr := range b.shares[e.Request.Share] {
		if lb.FamilyOf(addr) == family && p.contains(addr) && (!ok || addr.Less(best)) && !slices.Contains(picked, addr) &&
			!slices.Contains(b.holders[addr], e) && (!full || hasNamespace(b.holders[addr], e.Key.Namespace)) &&
			b.mayJoin(e, addr) == nil {
			best, ok = addr, true
		}
	}
	return best, ok
}

// duplicated is an address that another Service holds with more right, and why the two may not
// share it.
type duplicated struct {
	addr  netip.Addr
	first *entry
	why   string
}

// duplicate returns the last of addrs that e may not share with a Service that comes before it, or
// nil.
func (b *Book) duplicate(e *entry, addrs []netip.Addr) *duplicated {
	for _, addr := range slices.Backward(addrs) {
		for _, holder := range b.holders[addr] {
			if holder == e {
				continue
			}
			if why := apart(&e.Service, &holder.Service); why != "" && precedes(holder, e) {
				return &duplicated{addr, holder, why}
			}
		}
	}
	return nil
}

// precedes reports which of two Services that cannot share their address goes on with it: the one
// that is as it was when it was said to be all right, and so not the one whose change broke it;
// then the older.
func precedes(a, b *entry) bool {
	if a.confirmed != b.confirmed {
		return a.confirmed
	}
	return Older(&a.Service, &b.Service) < 0
}

// recall reads from the condition Assigned, which only Landfall can write, what earlier decisions
// were made on. What was decided since counts until the Service shows it.
func (e *entry) recall() {
	e.terms, e.shown, e.confirmed = lb.SharingTerms(&e.Service), "", false
	if e.decided = e.decided && len(e.assigned) > 0; !e.decided {
		e.after = nil
	}
	i := slices.IndexFunc(e.Conditions, func(c lb.Condition) bool { return c.Type == lb.ConditionAssigned })
	if i < 0 {
		return
	}
	e.shown = e.Conditions[i].Reason
	terms, after := lb.ParseSharing(e.Conditions[i].Message)
	if !e.decided {
		e.after = after
	}
	e.confirmed = e.shown != lb.ReasonDuplicate && terms == e.terms
}

// sharing says how e shares its addresses, for its condition.
func (b *Book) sharing(e *entry, addrs []netip.Addr) string {
	if e.terms == "" {
		return ""
	}
	after := map[netip.Addr]lb.Key{}
	for _, addr := range addrs {
		if first := b.first(addr); first != nil && first != e {
			after[addr] = first.Key
		}
	}
	e.after, e.decided = after, true
	return lb.FormatSharing(e.terms, after)
}
