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
		switch {
		case holder == e || why == "":
		case e.Request.Share == "":
			return lb.Refuse(lb.ReasonAddressTaken, "asks for %s, which Service %s holds", addr, holder.Key)
		default:
			return lb.Refuse(lb.ReasonSharingRefused, "asks for %s, which Service %s holds %s", addr, holder.Key, why)
		}
	}
	return nil
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

// duplicated is an address that an older Service holds as well, and why the two may not share it.
type duplicated struct {
	addr  netip.Addr
	older *entry
	why   string
}

// duplicate returns the last of addrs that an older Service holds with which e may not share it, or
// nil.
func (b *Book) duplicate(e *entry, addrs []netip.Addr) *duplicated {
	for _, addr := range slices.Backward(addrs) {
		for _, holder := range b.holders[addr] {
			if holder == e {
				break
			}
			if why := apart(&e.Service, &holder.Service); why != "" {
				return &duplicated{addr, holder, why}
			}
		}
	}
	return nil
}
