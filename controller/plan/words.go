package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

func refuseUnknown(name string) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotFound, "asks for pool %s, which does not exist", name)
}

func refuseNotReady(p *pool) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotReady, "pool %s hands out nothing new: %s", p.Name, p.refusal.Message)
}

func refuseNotAllowed(p *pool) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotAllowed, "pool %s is not for this Service: its spec.serviceAllocation selects others",
		p.Name)
}

func refuseQuota(e *entry, p *pool, family lb.Family) *lb.Refusal {
	return lb.Refuse(lb.ReasonQuotaExceeded,
		"namespace %s already holds the %d %s addresses of pool %s that spec.addressesPerNamespace allows it",
		e.Key.Namespace, p.PerNamespace, family, p.Name)
}

// refuseFamily says why none of the pools gave an address of the family.
func refuseFamily(e *entry, candidates []*pool, family lb.Family, named string) *lb.Refusal {
	var full []string
	var quota *pool
	for _, p := range candidates {
		if p.spaces[family] == nil {
			continue
		}
		full = append(full, p.Name)
		if quota == nil && p.full(e, family, nil) {
			quota = p
		}
	}
	slices.Sort(full)
	switch {
	case len(full) == 0 && named != "":
		return lb.Refuse(lb.ReasonFamilyUnserved, "pool %s has no %s addresses", named, family)
	case len(full) == 0:
		return lb.Refuse(lb.ReasonFamilyUnserved, "no pool with autoAssign has %s addresses", family)
	case quota != nil:
		return refuseQuota(e, quota, family)
	case len(full) == 1:
		return lb.Refuse(lb.ReasonPoolExhausted, "all %s addresses of pool %s are held", family, full[0])
	}
	return lb.Refuse(lb.ReasonPoolExhausted, "all %s addresses of the pools %s are held", family, strings.Join(full, ", "))
}

// condition says in one sentence what came out for a Service.
func (b *Book) condition(addrs []netip.Addr, duplicate *duplicated, note string, refusal *lb.Refusal) lb.Condition {
	condition := lb.Condition{Type: lb.ConditionAssigned}
	var outside, never []string
	var room [64]byte
	from := room[:0]
	for _, addr := range addrs {
		p := b.pools.of(addr)
		if p == nil {
			outside = append(outside, addr.String())
			continue
		}
		if what := b.pools.never.theirs[addr]; what != "" {
			never = append(never, addr.String()+", which is "+what)
		}
		if len(from) > 0 {
			from = append(from, ", "...)
		}
		from = append(append(addr.AppendTo(from), " from pool "...), p.Name...)
	}
	switch {
	case refusal != nil && len(addrs) == 0:
	case refusal != nil:
		refusal = lb.Refuse(refusal.Reason, "%s; keeps %s", refusal.Message, join(addrs))
	case duplicate != nil:
		refusal = lb.Refuse(
			lb.ReasonDuplicate,
			"%s is held by the older Service %s as well, %s; delete and create this Service, or ask for another address",
			duplicate.addr, duplicate.older.Key, duplicate.why)
	case len(outside) > 0:
		refusal = lb.Refuse(lb.ReasonHeldOutside,
			"keeps %s, which is in no pool and so is not announced; add it to a pool, or ask for another address",
			strings.Join(outside, ", "))
	}
	if refusal == nil && len(never) > 0 {
		refusal = lb.Refuse(lb.ReasonAddressExcluded, "keeps %s; ask for another address", strings.Join(never, ", "))
	}
	if refusal != nil {
		condition.Reason, condition.Message = refusal.Reason, refusal.Message
		return condition
	}
	condition.Status, condition.Reason, condition.Message = true, lb.ReasonAssigned, string(from)
	if note != "" {
		condition.Message += "; " + note
	}
	return condition
}

func join(addrs []netip.Addr) string {
	var s []string
	for _, addr := range addrs {
		s = append(s, addr.String())
	}
	return strings.Join(s, ", ")
}
