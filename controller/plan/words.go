package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxName is the length of the longest name that an object can have.
const maxName = 253

func refuseUnknown(name string) *lb.Refusal {
	if strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789.-") != "" || len(name) > maxName {
		name = quoted(name)
	}
	return lb.Refuse(lb.ReasonPoolNotFound, "asks for pool %s, which does not exist", name)
}

func refuseNotReady(p *pool) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotReady, "pool %s hands out nothing new: %s", p.Name, p.refusal.Message)
}

func refuseNotAllowed(p *pool) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotAllowed, "pool %s is not for this Service: its spec.serviceAllocation selects others",
		p.Name)
}

// refuseQuota says that p allows the namespace of e no more addresses of the family, or not as many as e asks for.
func (b *Book) refuseQuota(e *entry, p *pool, family lb.Family) *lb.Refusal {
	if !b.full(e, p, family, nil) {
		return lb.Refuse(lb.ReasonQuotaExceeded,
			"asks for more %s addresses than the %d of pool %s that spec.addressesPerNamespace allows namespace %s", family,
			p.PerNamespace, p.Name, e.Key.Namespace)
	}
	return lb.Refuse(lb.ReasonQuotaExceeded,
		"namespace %s already holds the %d %s addresses of pool %s that spec.addressesPerNamespace allows it",
		e.Key.Namespace, p.PerNamespace, family, p.Name)
}

// refuseFamily says why none of the pools gave an address of the family, beside those that were
// found.
func (b *Book) refuseFamily(e *entry, candidates []*pool, family lb.Family, named string,
	found []netip.Addr) *lb.Refusal {
	var full []string
	var quota *pool
	for _, p := range candidates {
		if p.spaces[family] == nil {
			continue
		}
		full = append(full, p.Name)
		if quota == nil && b.full(e, p, family, found) {
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
		return b.refuseQuota(e, quota, family)
	case len(full) == 1:
		return lb.Refuse(lb.ReasonPoolExhausted, "all %s addresses of pool %s are held", family, full[0])
	}
	return lb.Refuse(lb.ReasonPoolExhausted, "all %s addresses of the pools %s are held", family, strings.Join(full, ", "))
}

// condition says in one sentence what came out for a Service, and how it shares what it holds.
func (b *Book) condition(e *entry, duplicate *duplicated, note string, refusal *lb.Refusal) lb.Condition {
	condition := lb.Condition{Type: lb.ConditionAssigned}
	from, held := b.origins(e)
	switch {
	case duplicate != nil:
		shown := duplicate.addr.String()
		if !e.knows(duplicate.addr) {
			shown = shows + shown + ", which" // not as lb.Duplicated reads it: it is never known to be assigned
		}
		held = lb.Refuse(
			lb.ReasonDuplicate,
			"%s"+lb.HeldByAnother+"%s as well, which comes first, %s; undo the change, ask for another address, or delete "+
				"and create this Service",
			shown, duplicate.first.Key.SeenFrom(e.Key.Namespace), duplicate.why)
		if refusal != nil {
			held.Message += "; " + refusal.Message
		}
	case refusal != nil && len(e.held) == 0:
		held = refusal
	case refusal != nil:
		held = lb.Refuse(refusal.Reason, "%s; %s", refusal.Message, b.keeps(e, e.held))
	}
	if held != nil {
		condition.Reason, condition.Message = held.Reason, held.Message
		condition.Message += b.others(e, condition, duplicate != nil)
	} else {
		condition.Status, condition.Reason, condition.Message = true, lb.ReasonAssigned, from
		if note != "" {
			condition.Message += "; " + note
		}
	}
	if duplicate == nil && len(e.held) > 0 {
		unassigned := func(addr netip.Addr) bool { return !b.assigned(e, addr) }
		condition.Message += b.sharing(e, without(e.held, unassigned))
	}
	return condition
}

// origins says from which pool each address of e comes, or why one is held that should not be.
func (b *Book) origins(e *entry) (string, *lb.Refusal) {
	var outside []netip.Addr
	var never []string
	var room [64]byte
	from := room[:0]
	for _, addr := range e.held {
		p := b.pools.of(addr)
		if p == nil {
			outside = append(outside, addr)
			continue
		}
		if why := b.denied(e, addr); why != nil {
			return "", lb.Refuse(why.Reason, "%s; %s", why.Message, b.keeps(e, e.held))
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
	case len(outside) > 0:
		return "", lb.Refuse(lb.ReasonHeldOutside,
			"%s, which is in no pool and so is not announced; add it to a pool, or ask for another address",
			b.keeps(e, outside))
	case len(never) > 0:
		return "", lb.Refuse(lb.ReasonAddressExcluded, "keeps %s; ask for another address", strings.Join(never, ", "))
	}
	return string(from), nil
}
