package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A status may show an address that no controller like this one assigned: another kind of load
// balancer wrote it, or it comes with an object from another cluster. What a pool contains is
// adopted. The rest is kept only if Landfall's condition names it as held or, on a Service that
// Landfall has never seen before, MetalLB's annotation says that it assigned the address.

// foreign reports whether addr, which e holds, is neither of a pool nor known to be assigned. While
// a pool cannot be read, nobody knows what it contains.
func (b *Book) foreign(e *entry, addr netip.Addr) bool {
	return !b.pools.unread && !b.assigned(e, addr)
}

// assigned reports whether addr, which e holds, is of a pool or known to be assigned to it.
func (b *Book) assigned(e *entry, addr netip.Addr) bool {
	if b.pools.of(addr) != nil || slices.Contains(e.assigned, addr) {
		return true
	}
	for _, c := range e.Conditions {
		if c.Type == lb.ConditionAssigned {
			return slices.Contains(conditionAddresses(c), addr)
		}
	}
	return len(e.AllocatedFrom) > 0
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

// others names what e holds and the condition does not name: apart what it has by right, as that alone is confirmed, and
// with duplicates what others hold with more right.
func (b *Book) others(e *entry, c lb.Condition, duplicates bool) string {
	var others, theirs []string
	named := conditionAddresses(c)
	for _, addr := range e.held {
		switch {
		case slices.Contains(named, addr) || !b.assigned(e, addr):
		case duplicates && b.duplicate(e, []netip.Addr{addr}) != nil:
			theirs = append(theirs, addr.String())
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
// those of their family that the controller assigned.
func (e *entry) withoutWritten(held []netip.Addr) []netip.Addr {
	if !slices.ContainsFunc(held, e.written) {
		return held
	}
	return slices.DeleteFunc(slices.Clone(held), e.written)
}

// written reports whether the controller did not assign addr to e, but another address of its
// family that e holds.
func (e *entry) written(addr netip.Addr) bool {
	return !slices.Contains(e.named, addr) && !slices.Contains(e.assigned, addr) &&
		slices.ContainsFunc(e.held, func(other netip.Addr) bool {
			return lb.FamilyOf(other) == lb.FamilyOf(addr) && slices.Contains(e.named, other)
		})
}

// replacedForeign returns what e held and holds no more, as the controller did not assign it.
func (b *Book) replacedForeign(e *entry, before, after []netip.Addr) []netip.Addr {
	var replaced []netip.Addr
	for _, addr := range before {
		if !slices.Contains(after, addr) && (b.foreign(e, addr) || e.written(addr)) {
			replaced = append(replaced, addr)
		}
	}
	return replaced
}
