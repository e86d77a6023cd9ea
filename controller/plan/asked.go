package plan

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// checkAsked tells why the Service cannot have the address that it asks for, beside those of picked.
func (b *Book) checkAsked(addr netip.Addr, named string, e *entry, picked []netip.Addr) *lb.Refusal {
	in, ready, refusal := b.poolsFor(addr, named)
	if refusal != nil {
		return refusal
	}
	if what := b.pools.never.what(addr); in != nil && what != "" {
		return lb.Refuse(lb.ReasonAddressExcluded, "asks for %s, which is %s", addr, what)
	}
	switch {
	case in == nil:
		return lb.Refuse(lb.ReasonAddressOutside, "asks for %s, which is in no pool", addr)
	case slices.Contains(b.at(addr), e):
		// Who only shows it has it no sooner than others who ask for it.
		if refusal := b.denied(e, addr); refusal != nil || e.knows(addr) && !e.lacks(addr) {
			return refusal
		}
	}
	if refusal := b.mayJoin(e, addr); refusal != nil {
		return refusal
	}
	if ready == nil || ready.refusal != nil {
		return refuseNotReady(in)
	}
	return b.checkRules(e, ready, addr, picked)
}

// poolsFor returns the oldest pool that contains addr and one that hands it out, both the one asked
// for by name if there is one.
func (b *Book) poolsFor(addr netip.Addr, named string) (in, ready *pool, refusal *lb.Refusal) {
	if named == "" {
		in = b.pools.of(addr)
		b.pools.containing(addr, func(p *pool) bool {
			if p.refusal == nil {
				ready = p
			}
			return ready == nil
		})
		return in, ready, nil
	}
	p := b.pools.byName[named]
	switch {
	case p == nil:
		return nil, nil, refuseUnknown(named)
	case !p.contains(addr):
		return nil, nil, lb.Refuse(lb.ReasonAddressOutside, "asks for %s of pool %s, which does not contain it", addr, named)
	}
	return p, p, nil
}

// checkRules tells by which of its rules the pool keeps addr from e, which also gets those of picked.
func (b *Book) checkRules(e *entry, p *pool, addr netip.Addr, picked []netip.Addr) *lb.Refusal {
	switch {
	case !p.serves(e, b.namespaces):
		return refuseNotAllowed(p)
	case inRanges(p.Excluded, addr):
		return lb.Refuse(lb.ReasonAddressExcluded, "asks for %s, which spec.excludedAddresses of pool %s excludes", addr,
			p.Name)
	case p.AvoidBuggy && buggy(addr):
		return lb.Refuse(lb.ReasonAddressExcluded, "asks for %s, which spec.avoidBuggyIPs of pool %s excludes", addr, p.Name)
	}
	for _, r := range p.Reservations {
		if r.Range.Contains(addr) && !forService(r, e) {
			return lb.Refuse(lb.ReasonAddressReserved, "asks for %s, which pool %s reserves for %s", addr, p.Name,
				reservationFor(r, e.Key.Namespace))
		}
	}
	// Within a namespace, a successor may take over at once by asking for the address.
	if r, ok := b.kept.at[addr]; ok && r.Service.Namespace != e.Key.Namespace {
		until, ends := keptUntil(r, b.pools)
		if !ends {
			return lb.Refuse(lb.ReasonAddressKept, "asks for %s, which is kept for its last holder, %s", addr,
				r.Service.SeenFrom(e.Key.Namespace))
		}
		return lb.Refuse(lb.ReasonAddressKept, "asks for %s, which is kept for its last holder, %s, until %s", addr,
			r.Service.SeenFrom(e.Key.Namespace), until.UTC().Format("2006-01-02 15:04:05 MST"))
	}
	if family := lb.FamilyOf(addr); b.full(e, p, family, picked) && !hasNamespace(b.at(addr), e.Key.Namespace) {
		return b.refuseQuota(e, p, family)
	}
	return nil
}

// reservationFor names the Services of a reservation as Services of a namespace may see them.
func reservationFor(r lb.Reservation, namespace string) string {
	if r.Name == "" && r.Namespace == namespace {
		return "all Services of this namespace"
	}
	return lb.Key{Namespace: r.Namespace, Name: r.Name}.SeenFrom(namespace)
}
