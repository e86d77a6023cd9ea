package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// decide says what a Service of ours shall hold: what it holds of its families, and, where that is
// not what it asks for, what can be found instead. What it holds is never given up before there is
// something else for it.
func (b *Book) decide(e *entry) Decision {
	w, refusal := parse(&e.Service)
	kept := without(e.held, func(addr netip.Addr) bool { return b.gone(e, addr) })
	otherFamily := func(addr netip.Addr) bool { return !slices.Contains(w.families, lb.FamilyOf(addr)) }
	if len(w.families) > 0 && slices.ContainsFunc(kept, otherFamily) {
		kept = slices.DeleteFunc(slices.Clone(kept), otherFamily)
	}
	kept = without(b.withoutWritten(e, kept), func(addr netip.Addr) bool {
		return e.lacks(addr) && b.duplicate(e, []netip.Addr{addr}) != nil // not to be shown beside its holder again
	})
	var note string
	if refusal == nil {
		var found []netip.Addr
		var room [2]need
		needs := b.needs(room[:0], e, w, kept)
		found, note, refusal = b.find(e, w, needs, kept)
		if refusal == nil {
			kept = replaced(kept, w, needs, found)
		}
		before := e.taken
		e.taken, e.assigned, e.fresh = union(e.taken, found), union(e.assigned, found), union(e.fresh, found)
		for _, addr := range found {
			if !slices.Contains(before, addr) {
				b.take(e, addr)
			}
		}
	}
	foreign := b.replacedForeign(e, e.held, kept)
	e.held = kept
	duplicate := b.duplicate(e, b.withoutDenied(e, kept))
	condition := b.condition(e, duplicate, note, refusal)
	b.count(e, condition.Reason)
	b.wait(e, w.asks(), !condition.Status || note != "")
	d := Decision{Addresses: kept, Mode: w.mode, Condition: &condition, Replaced: foreign}
	d.Protect, d.Release = b.protects(e)
	if len(kept) > 0 {
		d.Pool = b.Pool(kept[0])
	}
	return d
}

// needs adds to needs what e lacks of what it wants, family by family.
func (b *Book) needs(needs []need, e *entry, w want, held []netip.Addr) []need {
	for _, family := range w.families {
		needs = append(needs, w.need(family, held, func(addr netip.Addr, asked bool) bool {
			return asked && b.denied(e, addr) == nil || !asked && b.satisfies(e, w, addr)
		}))
	}
	return needs
}

// satisfies reports whether e, which does not ask for another address by name, is to stay with the
// one that it holds.
func (b *Book) satisfies(e *entry, w want, addr netip.Addr) bool {
	if b.foreign(e, addr) {
		return false
	}
	in := b.pools.of(addr)
	if (in == nil || b.pools.never.theirs[addr] != "") && (w.move || b.config.MoveOutside && e.Request.WhenOutside == "") {
		return false
	}
	if b.config.MoveDuplicates && b.duplicate(e, []netip.Addr{addr}) != nil {
		return false
	}
	if w.pool == "" {
		return true
	}
	// Who asks for another pool than that of its address is to move there. An address that is in no
	// pool any more is kept: pools were edited, and no edit of a pool takes an address from its
	// holder.
	p := b.pools.byName[w.pool]
	return p != nil && (p.contains(addr) || in == nil)
}

// replaced returns what is held after what was found is added, in the place of what is held of its
// family but not asked for.
func replaced(held []netip.Addr, w want, needs []need, found []netip.Addr) []netip.Addr {
	if len(held) == 0 && len(needs) == 1 {
		return found
	}
	var addrs, last []netip.Addr
	changed := false
	for _, n := range needs {
		var of []netip.Addr
		for _, addr := range found {
			if lb.FamilyOf(addr) == n.family {
				of = append(of, addr)
			}
		}
		switch {
		case len(of) > 0:
			changed = true
			all := slices.Concat(n.have, of)
			// Not all could be found: what is there goes on to be held.
			for _, addr := range n.wrong {
				if len(all) < max(w.count, 1) {
					all = append(all, addr)
				}
			}
			last = append(last, all...)
		case w.count > 0 && len(n.have) == w.count && len(n.wrong) > 0:
			changed = true // fewer are asked for
			last = append(last, n.have...)
		default:
			for _, addr := range held {
				if lb.FamilyOf(addr) == n.family {
					addrs = append(addrs, addr)
				}
			}
		}
	}
	if !changed {
		return held
	}
	return append(addrs, last...)
}

// find returns an address for each that is missing, without taking it. The note says what a Service
// that only prefers two families has to do without.
func (b *Book) find(e *entry, w want, needs []need,
	held []netip.Addr) (found []netip.Addr, note string, refusal *lb.Refusal) {
	var room [2]lb.Family // as most ask for no more
	open := room[:0]
	for _, n := range needs {
		for _, asked := range n.asked {
			if refusal := b.checkAsked(asked, w.pool, e, found); refusal != nil {
				return nil, "", refusal
			}
			found = append(found, asked)
		}
		for range n.open {
			open = append(open, n.family)
		}
	}
	if len(open) == 0 {
		return found, "", nil
	}
	candidates, refusal := b.candidates(e, w)
	if refusal != nil {
		return nil, "", refusal
	}
	candidates = b.preferred(e, candidates, held, found)
	if more, ok := b.fromOnePool(e, candidates, open, found); ok {
		return more, "", nil
	}
	for _, family := range open {
		more, ok := b.fromOnePool(e, candidates, []lb.Family{family}, found)
		if !ok {
			more, ok = b.fromQuarantine(e, candidates, family, found)
		}
		if ok {
			found = more
		} else if refusal == nil {
			refusal = b.refuseFamily(e, candidates, family, w.pool, found)
		}
	}
	if refusal == nil {
		return found, "", nil
	}
	if w.all || len(found) == 0 && len(held) == 0 {
		b.pools.giveBack(found)
		return nil, "", refusal
	}
	return found, refusal.Message, nil
}

// fromOnePool adds an address of each of the families to found, all from the first pool that has
// them, or tells that there is none.
func (b *Book) fromOnePool(e *entry, candidates []*pool, families []lb.Family,
	found []netip.Addr) ([]netip.Addr, bool) {
	for _, p := range candidates {
		picked := slices.Clip(found)
		for _, family := range families {
			addr, ok := b.pick(e, p, family, picked)
			if !ok {
				break
			}
			picked = append(picked, addr)
		}
		if len(picked) == len(found)+len(families) {
			return picked, true
		}
		b.pools.giveBack(picked[len(found):])
	}
	return nil, false
}

// pick returns the address of p that e gets next: one that is kept or reserved for it, one that it
// can share, or the lowest free one.
func (b *Book) pick(e *entry, p *pool, family lb.Family, picked []netip.Addr) (netip.Addr, bool) {
	s := p.spaces[family]
	if s == nil {
		return netip.Addr{}, false
	}
	full := b.full(e, p, family, picked)
	if !full {
		if addr, ok := b.own(e, p, family, picked); ok {
			return addr, true
		}
	}
	if addr, ok := b.shareable(e, p, family, picked, full); ok {
		return addr, true
	}
	if full {
		return netip.Addr{}, false
	}
	return s.free(func(addr netip.Addr) bool { return b.busy(addr) || slices.Contains(picked, addr) })
}

// full reports whether the namespace of e has all addresses of the family that p allows it, with
// those of picked.
func (b *Book) full(e *entry, p *pool, family lb.Family, picked []netip.Addr) bool {
	if p.PerNamespace == 0 {
		return false
	}
	n := p.byNamespace[namespaceFamily{e.Key.Namespace, family}]
	for _, addr := range picked {
		if lb.FamilyOf(addr) == family && p.contains(addr) && !hasNamespace(b.at(addr), e.Key.Namespace) {
			n++
		}
	}
	return n >= p.PerNamespace
}

// own returns an address of p that is free for e only.
func (b *Book) own(e *entry, p *pool, family lb.Family, picked []netip.Addr) (netip.Addr, bool) {
	if kept := b.kept.of[e.Key]; len(kept) > 0 {
		for _, addr := range slices.SortedFunc(slices.Values(kept), netip.Addr.Compare) {
			if lb.FamilyOf(addr) == family && (p.spaces[family].offers(addr) || p.reservedFor(e, addr)) &&
				!b.owned(addr, nil) && !slices.Contains(picked, addr) {
				return addr, true
			}
		}
	}
	for _, named := range []bool{true, false} { // those for this Service before those for all of its namespace
		for i, r := range p.Reservations {
			if r.Range.Family() != family || !forService(r, e) || named != (r.Name != "") {
				continue
			}
			if addr, ok := p.reserved[i].free(func(addr netip.Addr) bool {
				return b.busy(addr) ||
					slices.Contains(picked, addr)
			}); ok {
				return addr, true
			}
		}
	}
	return netip.Addr{}, false
}

// reservedFor reports whether a reservation offers addr to e.
func (p *pool) reservedFor(e *entry, addr netip.Addr) bool {
	for i, r := range p.Reservations {
		if forService(r, e) && p.reserved[i].offers(addr) {
			return true
		}
	}
	return false
}

func forService(r lb.Reservation, e *entry) bool {
	return r.Namespace == e.Key.Namespace && (r.Name == "" || r.Name == e.Key.Name)
}

func inRanges(ranges []lb.Range, addr netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r lb.Range) bool { return r.Contains(addr) })
}

// candidates returns the pools that may serve the Service, in the order in which they are asked.
func (b *Book) candidates(e *entry, w want) ([]*pool, *lb.Refusal) {
	if w.pool != "" {
		p := b.pools.byName[w.pool]
		switch {
		case p == nil:
			return nil, refuseUnknown(w.pool)
		case p.refusal != nil:
			return nil, refuseNotReady(p)
		case !p.serves(e, b.namespaces):
			return nil, refuseNotAllowed(p)
		}
		return []*pool{p}, nil
	}
	if len(b.pools.ordered) == 0 {
		return nil, lb.Refuse(lb.ReasonNoPool, "there is no IPAddressPool")
	}
	if len(b.pools.pinned)+len(b.pools.general) == 0 {
		return nil,
			lb.Refuse(
				lb.ReasonNoPool,
				"no IPAddressPool hands out addresses to Services that do not ask for one; name one in the annotation %s",
				lb.AnnotationPool)
	}
	candidates := b.pools.general
	for _, p := range slices.Backward(b.pools.pinned) {
		if p.serves(e, b.namespaces) {
			candidates = slices.Concat([]*pool{p}, candidates)
		}
	}
	if len(candidates) == 0 {
		return nil,
			lb.Refuse(lb.ReasonNoPool, "no IPAddressPool is for this Service: spec.serviceAllocation of each selects others")
	}
	return candidates, nil
}

// preferred puts the pool of the addresses that the Service has, or that are kept for it, before
// the others.
func (b *Book) preferred(e *entry, candidates []*pool, held, found []netip.Addr) []*pool {
	kept := b.kept.of[e.Key]
	for _, addrs := range [][]netip.Addr{found, held, kept} {
		if i := slices.IndexFunc(candidates, func(p *pool) bool { return slices.ContainsFunc(addrs, p.contains) }); i > 0 {
			return slices.Concat(candidates[i:i+1], candidates[:i], candidates[i+1:])
		} else if i == 0 {
			break
		}
	}
	return candidates
}
