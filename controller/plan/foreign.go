package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A status may show an address that no controller like this one assigned: another kind of load
// balancer wrote it, or somebody who may write statuses, or it comes with an object from another
// cluster. What a pool contains is adopted, unless the pool's rules keep it from the Service. The rest
// is kept only if Landfall's condition names it as held or, on a Service that Landfall has never seen
// before, MetalLB's annotation says that it assigned the address.

// foreign reports whether addr, which e holds, is neither of a pool that lets e have it nor known to be assigned. While
// a pool cannot be read, nobody knows what it contains.
func (b *Book) foreign(e *entry, addr netip.Addr) bool {
	return !b.assigned(e, addr) && (!b.pools.unread || b.pools.of(addr) != nil)
}

// assigned reports whether addr, which e holds, is of a pool that lets e have it or known to be assigned to it.
func (b *Book) assigned(e *entry, addr netip.Addr) bool {
	return e.knows(addr) || b.pools.of(addr) != nil && b.denied(e, addr) == nil
}

// rightful reports whether e holds addr by right: assigned, and beside nobody who keeps it from e.
func (b *Book) rightful(e *entry, addr netip.Addr) bool {
	return e.knows(addr) || b.assigned(e, addr) && b.duplicate(e, []netip.Addr{addr}) == nil
}

// owned reports whether one of those that hold addr, apart from e, does so by right.
func (b *Book) owned(addr netip.Addr, e *entry) bool {
	return slices.ContainsFunc(b.at(addr), func(other *entry) bool { return other != e && b.rightful(other, addr) })
}

// knows reports whether addr is known to be assigned to e. That a write is to go on showing what the status shows does
// not say so.
func (e *entry) knows(addr netip.Addr) bool {
	switch {
	case slices.Contains(e.named, addr):
		return true
	case slices.Contains(e.assigned, addr) &&
		!slices.ContainsFunc(e.Ingress, func(in lb.Ingress) bool { return in.Addr == addr }):
		return true
	case e.shown == "":
		return len(e.AllocatedFrom) > 0
	}
	return e.shown == lb.ReasonDuplicate && slices.Contains(shownAddresses(&e.Service), addr)
}

// lacks reports whether the status lacks addr although the condition confirms it: a program has taken it out.
func (e *entry) lacks(addr netip.Addr) bool {
	return slices.Contains(e.named, addr) &&
		!slices.ContainsFunc(e.Ingress, func(in lb.Ingress) bool { return in.Addr == addr })
}

// gone reports whether a program took addr out of the status, which no pool has and nobody announces: that program may
// serve e, as MetalLB does before a migration.
func (b *Book) gone(e *entry, addr netip.Addr) bool {
	return e.lacks(addr) && !b.pools.unread && b.pools.of(addr) == nil
}

// denied tells why e cannot have addr, which merely stands in its status: what keeps an address from who asks for it
// keeps it from who writes it. Services of one namespace that do not go together are told apart later: see duplicate.
func (b *Book) denied(e *entry, addr netip.Addr) *lb.Refusal {
	if e.knows(addr) {
		return nil
	}
	in, ready, _ := b.poolsFor(addr, "")
	if in == nil {
		return nil
	}
	holders := b.at(addr)
	if len(holders) > maxSharers {
		return refuseSharers(addr, len(holders))
	}
	if what := b.pools.never.what(addr); what != "" {
		return lb.Refuse(lb.ReasonAddressExcluded, "asks for %s, which is %s", addr, what)
	}
	pool := b.separating(addr)
	for _, other := range holders {
		if other.right(addr) < shown && (other.over || other.Key.Namespace != e.Key.Namespace &&
			(pool != nil || foreignPods(&e.Service, &other.Service))) {
			return refuseJoin(e, other, addr, pool)
		}
	}
	if ready == nil {
		ready = in
	}
	if refusal := b.checkRules(e, ready, addr, nil); refusal != nil {
		return refusal
	}
	if b.beyondQuota(e.Key.Namespace, ready, addr) {
		return b.refuseQuota(e, ready, lb.FamilyOf(addr))
	}
	return nil
}

// beyondQuota reports whether a namespace shows more addresses of p than its quota, and addr is known to be assigned to
// none of its Services.
func (b *Book) beyondQuota(namespace string, p *pool, addr netip.Addr) bool {
	return p.PerNamespace > 0 && p.byNamespace[namespaceFamily{namespace, lb.FamilyOf(addr)}] > p.PerNamespace &&
		!slices.ContainsFunc(b.at(addr), func(e *entry) bool { return e.Key.Namespace == namespace && e.knows(addr) })
}

// withoutDenied returns those of addrs that e may have.
func (b *Book) withoutDenied(e *entry, addrs []netip.Addr) []netip.Addr {
	return without(addrs, func(addr netip.Addr) bool { return b.denied(e, addr) != nil })
}

// without returns the addresses that are not out.
func without(addrs []netip.Addr, out func(netip.Addr) bool) []netip.Addr {
	if !slices.ContainsFunc(addrs, out) {
		return addrs
	}
	return slices.DeleteFunc(slices.Clone(addrs), out)
}

// shows comes before addresses that only stand in the status.
const shows = "shows "

// keeps says what e goes on holding, and what its status shows although nobody assigned it.
func (b *Book) keeps(e *entry, addrs []netip.Addr) string {
	var held, shown []string
	for _, addr := range addrs {
		if !b.assigned(e, addr) {
			shown = append(shown, addr.String())
		} else {
			held = append(held, addr.String())
		}
	}
	switch {
	case len(shown) == 0:
		return lb.Keeps + strings.Join(held, ", ")
	case len(held) == 0:
		return shows + strings.Join(shown, ", ") + ", which Landfall did not assign"
	}
	return lb.Keeps + strings.Join(held, ", ") + "; " + shows + strings.Join(shown, ", ") +
		", which Landfall did not assign"
}

// others names what e holds and the condition does not name: apart what it has by right, as that alone is confirmed,
// and with duplicates what others hold with more right.
func (b *Book) others(e *entry, c lb.Condition, duplicates bool) string {
	var others, theirs []string
	named := conditionAddresses(c)
	for _, addr := range e.held {
		switch {
		case slices.Contains(named, addr) || !b.assigned(e, addr):
		case duplicates && b.duplicate(e, []netip.Addr{addr}) != nil:
			if e.knows(addr) { // else what the condition says would make it known
				theirs = append(theirs, addr.String())
			}
		default:
			others = append(others, addr.String())
		}
	}
	return listed(lb.OthersHold, theirs) + listed(lb.AlsoHolds, others)
}

func listed(words string, addrs []string) string {
	if len(addrs) == 0 {
		return ""
	}
	return "; " + words + strings.Join(addrs, ", ")
}

// withoutWritten returns what is held without addresses that somebody wrote into the status beside
// those of their family that the controller assigned, or that e may have.
func (b *Book) withoutWritten(e *entry, held []netip.Addr) []netip.Addr {
	mine := b.withoutDenied(e, held)
	return without(held, func(addr netip.Addr) bool {
		return b.written(e, addr) || !slices.Contains(mine, addr) && slices.ContainsFunc(mine, func(other netip.Addr) bool {
			return lb.FamilyOf(other) == lb.FamilyOf(addr) && !b.foreign(e, other)
		})
	})
}

// written reports whether the controller did not assign addr to e, but another address of its
// family that e holds.
func (b *Book) written(e *entry, addr netip.Addr) bool {
	return !slices.Contains(e.named, addr) && !slices.Contains(e.assigned, addr) &&
		slices.ContainsFunc(e.held, func(other netip.Addr) bool {
			return lb.FamilyOf(other) == lb.FamilyOf(addr) && slices.Contains(e.named, other) && !b.gone(e, other)
		})
}

// replacedForeign returns what e held and holds no more, as the controller did not assign it.
func (b *Book) replacedForeign(e *entry, before, after []netip.Addr) []netip.Addr {
	var replaced []netip.Addr
	for _, addr := range before {
		if !slices.Contains(after, addr) && (b.foreign(e, addr) || b.written(e, addr)) {
			replaced = append(replaced, addr)
		}
	}
	return replaced
}
