package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// apart tells why two Services cannot have one address, "" when they can. A node announces a shared
// address only while it can deliver every Service on it, so policies may differ; but of two
// Services with policy Local that select different pods there may be no node that has both.
func apart(a, b *lb.Service) string {
	if why := unshared(a, b); why != "" {
		return why
	}
	if port := commonPort(a, b); port != nil {
		return fmt.Sprintf("and both have port %d/%s", port.Port, port.Protocol)
	}
	if differentPods(a, b) {
		return "and both have externalTrafficPolicy Local, but different selectors, so there may be no node that " +
			"delivers both"
	}
	return ""
}

// unshared tells why two Services cannot have one address whatever their ports.
func unshared(a, b *lb.Service) string {
	switch {
	case a.Request.Share == "" || b.Request.Share == "":
		return "without a sharing key"
	case a.Request.Share != b.Request.Share:
		return "with another sharing key"
	case a.Unkept.Ports+b.Unkept.Ports > 0:
		return "and one of both has more ports than can be compared"
	}
	return ""
}

// commonPort returns the first port of a that b has too; nil if there is none. Tenants write lists of many
// thousands, so it goes through each list once.
func commonPort(a, b *lb.Service) *lb.ServicePort {
	uses := make(map[portProtocol]bool, len(b.Ports))
	for _, p := range b.Ports {
		uses[portProtocol{p.Port, p.Protocol}] = true
	}
	for i, p := range a.Ports {
		if uses[portProtocol{p.Port, p.Protocol}] {
			return &a.Ports[i]
		}
	}
	return nil
}

// differentPods reports whether there may be no node that delivers both Services.
func differentPods(a, b *lb.Service) bool {
	return a.ExternalPolicy == lb.Local && b.ExternalPolicy == lb.Local &&
		(a.Request.Selector == "" || a.Request.Selector != b.Request.Selector)
}

// foreignPods reports whether two Services with policy Local are of different namespaces: one selector selects other
// pods in each. That counts for newcomers only: an address that two share already is taken from neither.
func foreignPods(a, b *lb.Service) bool {
	return a.ExternalPolicy == lb.Local && b.ExternalPolicy == lb.Local && a.Key.Namespace != b.Key.Namespace
}

// narrows reports whether nodes that deliver the first holder of an address may fail to deliver a
// joiner. The first holder alone decides which nodes announce the address.
func narrows(joiner, first *lb.Service) bool {
	return joiner.ExternalPolicy == lb.Local &&
		(first.ExternalPolicy != lb.Local || joiner.Request.Selector != first.Request.Selector)
}

// first returns the Service that held addr before the others that hold it, or nil.
func (b *Book) first(addr netip.Addr) *entry {
	h := b.holders[addr]
	if h == nil {
		return nil
	}
	if !h.found {
		h.first, h.found = nil, true
		for _, e := range h.entries {
			if rank := b.rank(e, addr); h.first == nil || rank < h.best {
				h.first, h.best = e, rank
			}
		}
	}
	return h.first
}

// rank orders the holders of an address, before their age does: those that joined another one come
// after those that did not, and those that just came, that the controller did not confirm, or that
// hold it by mistake, last.
func (b *Book) rank(e *entry, addr netip.Addr) int {
	switch {
	case e.over:
		return 3
	case !e.settled(addr):
		return 2
	}
	if _, joined := e.after[addr]; joined {
		return 1
	}
	return 0
}

// settled reports whether it was decided that e may hold addr.
func (e *entry) settled(addr netip.Addr) bool {
	return e.shown != lb.ReasonDuplicate && (slices.Contains(e.decided, addr) || slices.Contains(e.named, addr))
}

// search is where an address to share was searched for.
type search struct {
	in     *pool
	family lb.Family
	full   bool
}

// shareable returns the lowest address of p that e can have together with its holders. With full,
// only one that its namespace has. Services that wait search again whenever anything becomes free, so what was
// searched without success is not looked at again before it has changed.
func (b *Book) shareable(e *entry, p *pool, family lb.Family, picked []netip.Addr,
	full bool) (best netip.Addr, ok bool) {
	of := b.shares[e.Request.Share]
	this := search{p, family, full}
	if of == nil || of.changed <= e.tried[this] {
		return netip.Addr{}, false
	}
	for addr, changed := range of.at {
		if changed > e.tried[this] && lb.FamilyOf(addr) == family && p.contains(addr) && (!ok || addr.Less(best)) &&
			!slices.Contains(picked, addr) && !slices.Contains(e.taken, addr) &&
			(!full || hasNamespace(b.at(addr), e.Key.Namespace)) && b.mayJoin(e, addr) == nil {
			best, ok = addr, true
		}
	}
	if !ok && len(picked) == 0 {
		if e.tried == nil {
			e.tried = map[search]uint64{}
		}
		e.tried[this] = b.clock
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
		h := b.holders[addr]
		if h == nil || len(h.entries) == 1 && h.entries[0] == e {
			continue
		}
		yield, found := oldest(func(other *entry) bool { return b.precedes(other, e, addr) })
		h.apart(e, yield)
		if first := found(); first != nil {
			return &duplicated{addr, first, apart(&e.Service, &first.Service)}
		}
	}
	return nil
}

// precedes reports which of two Services that cannot share their address goes on with it: the one
// with the better right; then the one whose status shows it; then the older, where one that joined another holder is as
// old as that one and comes after it.
func (b *Book) precedes(x, y *entry, addr netip.Addr) bool {
	if x.over != y.over {
		return y.over
	}
	if of, than := x.right(addr), y.right(addr); of != than {
		return of < than
	}
	if x.lacks(addr) != y.lacks(addr) {
		return y.lacks(addr)
	}
	of, than := b.joined(x, addr), b.joined(y, addr)
	if by := Older(&of.Service, &than.Service); by != 0 {
		return by < 0
	}
	if (of == x) != (than == y) {
		return of == x
	}
	return Older(&x.Service, &y.Service) < 0
}

// joined returns the Service that held addr before e did, by what the condition of e says, if it holds it still; else
// e.
func (b *Book) joined(e *entry, addr netip.Addr) *entry {
	if key, ok := e.joined[addr]; ok {
		if first := b.entries[key]; first != nil && slices.Contains(first.taken, addr) {
			return first
		}
	}
	return e
}

// markJoined has those decided anew that hold addr, if some of them joined e, which has come to addr or left it: that
// changes whom those come before. It matters only if some cannot share, and then one of these is not assigned.
func (b *Book) markJoined(e *entry, addr netip.Addr) {
	others := b.at(addr)
	if slices.ContainsFunc(others, func(other *entry) bool { return other.dirty || other.reason != lb.ReasonAssigned }) &&
		slices.ContainsFunc(others, func(other *entry) bool { return other.joined[addr] == e.Key }) {
		b.touch(addr)
	}
}

// right is less for those with a better right to an address.
type right int

const (
	// confirmed is that of who holds it as the controller confirmed it, on the same terms.
	confirmed right = iota
	// changed is that of who may have broken what was agreed, until the controller has decided about it.
	changed
	// undecided is the same of one about which it decides no more.
	undecided
	// shown is that of who merely shows the address: somebody wrote it into the status, or it is held by mistake.
	shown
)

func (e *entry) right(addr netip.Addr) right {
	named := slices.Contains(e.named, addr)
	switch {
	case named && e.agreed || slices.Contains(e.fresh, addr):
		return confirmed
	case !named:
		return shown
	case e.Deleting || e.Headless:
		return undecided
	}
	return changed
}

// recall reads from the condition Assigned what earlier decisions were made on. What was decided
// since counts until the Service shows it.
func (e *entry) recall() {
	e.terms, e.shown, e.agreed, e.named = lb.SharingTerms(&e.Service), "", false, nil
	e.joined = nil
	if len(e.assigned) == 0 {
		e.decided = nil
	}
	if len(e.decided) == 0 {
		e.after = nil
	}
	i := slices.IndexFunc(e.Conditions, func(c lb.Condition) bool { return c.Type == lb.ConditionAssigned })
	if i < 0 {
		return
	}
	e.shown, e.named = e.Conditions[i].Reason, lb.Confirmed(e.Conditions[i])
	terms, joined := lb.ParseSharing(e.Conditions[i].Message)
	if e.joined = joined; len(e.decided) == 0 {
		e.after = joined
	}
	e.agreed = terms == e.terms
}

// sharing says how e shares its addresses, for its condition: which Service it joined, also once that is gone. So the
// end of the first one changes the condition of the next one only.
func (b *Book) sharing(e *entry, addrs []netip.Addr) string {
	if e.terms == "" {
		return ""
	}
	after := map[netip.Addr]lb.Key{}
	for _, addr := range addrs {
		if first := b.first(addr); first == nil || first == e {
			continue
		} else if after[addr] = first.Key; e.settled(addr) {
			after[addr] = cmp.Or(e.after[addr], first.Key)
		}
	}
	var differs []netip.Addr
	for _, addr := range e.taken {
		if !e.settled(addr) || e.after[addr] != after[addr] {
			differs = append(differs, addr)
		}
	}
	e.after, e.decided = after, addrs
	for _, addr := range differs {
		b.reranked(e, addr)
	}
	return lb.FormatSharing(e.terms, after)
}
