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
			return names(c, addr)
		}
	}
	return len(e.AllocatedFrom) > 0
}

// names reports whether the condition Assigned names addr as one that the Service holds.
func names(c lb.Condition, addr netip.Addr) bool {
	held := c.Message
	if !c.Status && c.Reason != lb.ReasonDuplicate {
		_, after, ok := strings.Cut(c.Message, keeps)
		if !ok {
			return false
		}
		held, _, _ = strings.Cut(after, shows)
	}
	return slices.Contains(strings.FieldsFunc(held, func(r rune) bool {
		return !strings.ContainsRune("0123456789abcdef.:", r)
	}), addr.String())
}

// The words for addresses that are held for good, and for those that only stand in the status.
const (
	keeps = "keeps "
	shows = "shows "
)

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
		return keeps + strings.Join(held, ", ")
	case len(held) == 0:
		return shows + strings.Join(shown, ", ") + ", which Landfall did not assign"
	}
	return keeps + strings.Join(held, ", ") + "; " + shows + strings.Join(shown, ", ") +
		", which Landfall did not assign"
}

// Protected reports whether the Service carries the finalizer and its condition says that Landfall
// assigned it an address: another load balancer's controller may have set the same finalizer.
func Protected(s *lb.Service) bool {
	return s.Finalizer && slices.ContainsFunc(s.Conditions, func(c lb.Condition) bool {
		return c.Type == lb.ConditionAssigned &&
			(c.Status || c.Reason == lb.ReasonDuplicate || strings.Contains(c.Message, keeps))
	})
}

// Written reports whether Landfall has written to a Service, or may have, that a controller for
// class serves or served: a Service that is no load balancer any more has no class.
func Written(s *lb.Service, class string) bool {
	return (s.Type != lb.LoadBalancer || s.Class == class) && (len(s.Conditions) > 0 || s.Announcements != "")
}

// protects says whether a deleted e must stay until nobody announces it.
func (b *Book) protects(e *entry) (protect, release bool) {
	protect = slices.ContainsFunc(e.held, func(addr netip.Addr) bool { return b.assigned(e, addr) })
	return protect, !protect && Protected(&e.Service)
}

// others names what e holds and the condition does not name.
func (b *Book) others(e *entry, c lb.Condition) string {
	var others []string
	for _, addr := range e.held {
		if !names(c, addr) && b.assigned(e, addr) {
			others = append(others, addr.String())
		}
	}
	if len(others) == 0 {
		return ""
	}
	return "; it also holds " + strings.Join(others, ", ")
}

// replacedForeign returns the foreign ones of what e held that it holds no more.
func (b *Book) replacedForeign(e *entry, before, after []netip.Addr) []netip.Addr {
	var replaced []netip.Addr
	for _, addr := range before {
		if !slices.Contains(after, addr) && b.foreign(e, addr) {
			replaced = append(replaced, addr)
		}
	}
	return replaced
}
