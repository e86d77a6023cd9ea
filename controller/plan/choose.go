package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// want is what a Service asks for, parsed.
type want struct {
	families []lb.Family
	// all is set when an address of each family is a must.
	all  bool
	addr map[lb.Family]netip.Addr // asked for by name
	pool string                   // asked for by name; "" for any
}

// parse reads what the Service asks for. Also a want with a refusal tells the families.
func parse(s *lb.Service) (want, *lb.Refusal) {
	w := want{families: s.Families, all: s.FamilyPolicy != lb.PreferDualStack, pool: s.Request.Pool}
	if len(w.families) == 0 {
		for _, ip := range s.ClusterIPs {
			w.families = append(w.families, lb.FamilyOf(ip))
		}
	}
	if len(w.families) == 0 {
		return w, lb.Refuse(lb.ReasonNoClusterIP, "waiting for the API server to give the Service a cluster IP, which tells its address families")
	}
	for _, written := range s.Request.Addresses {
		addr, err := lb.ParseAddr(written)
		if err != nil {
			return w, lb.Refuse(lb.ReasonAddressInvalid, "asks for %q, which is no IP address", written)
		}
		family := lb.FamilyOf(addr)
		if !slices.Contains(w.families, family) {
			return w, lb.Refuse(lb.ReasonAddressInvalid, "asks for %s, but its spec.ipFamilies has no %s", addr, family)
		}
		if other, ok := w.addr[family]; ok && other != addr {
			return w, lb.Refuse(lb.ReasonAddressInvalid, "asks for both %s and %s; it can have one address of each family", other, addr)
		}
		if w.addr == nil {
			w.addr = map[lb.Family]netip.Addr{}
		}
		w.addr[family] = addr
	}
	return w, nil
}

// decide says what a Service of ours shall hold: what it holds of its families, and, where that is not what it asks for, what can
// be found instead. What it holds is never given up before there is something else for it.
func (a *assigner) decide(c *candidate) Decision {
	w, refusal := parse(&c.Service)
	kept := c.held
	if stray := func(addr netip.Addr) bool { return !slices.Contains(w.families, lb.FamilyOf(addr)) }; len(w.families) > 0 && slices.ContainsFunc(kept, stray) {
		kept = slices.DeleteFunc(slices.Clone(kept), stray)
	}
	var note string
	if refusal == nil {
		var found map[lb.Family]netip.Addr
		found, note, refusal = a.find(w, kept, c.Key)
		if refusal == nil {
			kept = replaced(kept, w.families, found)
			for _, addr := range found {
				a.take(addr, c.Key)
			}
		}
	}
	condition := a.condition(c, kept, note, refusal)
	return Decision{Addresses: kept, Condition: &condition}
}

// replaced puts what was found in the place of what is held of that family, or at the end.
func replaced(held []netip.Addr, families []lb.Family, found map[lb.Family]netip.Addr) []netip.Addr {
	if len(found) == 0 {
		return held
	}
	var addrs []netip.Addr
	for _, addr := range held {
		if _, ok := found[lb.FamilyOf(addr)]; !ok {
			addrs = append(addrs, addr)
		}
	}
	for _, family := range families {
		if addr, ok := found[family]; ok {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// missing returns the families for which the Service holds nothing, or not what it asks for.
func (a *assigner) missing(w want, held []netip.Addr) []lb.Family {
	var missing []lb.Family
	for _, family := range w.families {
		asked, byName := w.addr[family]
		satisfied := slices.ContainsFunc(held, func(addr netip.Addr) bool {
			switch {
			case lb.FamilyOf(addr) != family:
				return false
			case byName:
				return addr == asked
			case w.pool != "":
				// Who asks for another pool than that of its address is to move there. An address that is in no pool any more is
				// kept: pools were edited, and no edit of a pool takes an address from its holder.
				p := a.pools.byName[w.pool]
				return p != nil && (p.contains(addr) || a.pools.of(addr) == nil)
			}
			return true
		})
		if !satisfied {
			missing = append(missing, family)
		}
	}
	return missing
}

// find returns an address for each family that is missing, without taking it. The note says what a Service that only prefers
// two families has to do without.
func (a *assigner) find(w want, held []netip.Addr, key lb.Key) (found map[lb.Family]netip.Addr, note string, refusal *lb.Refusal) {
	missing := a.missing(w, held)
	if len(missing) == 0 {
		return nil, "", nil
	}
	found = make(map[lb.Family]netip.Addr, len(missing))
	var open []lb.Family
	for _, family := range missing {
		asked, ok := w.addr[family]
		if !ok {
			open = append(open, family)
			continue
		}
		if refusal := a.checkAsked(asked, w.pool, key); refusal != nil {
			return nil, "", refusal
		}
		found[family] = asked
	}
	if len(open) == 0 {
		return found, "", nil
	}
	candidates, refusal := a.candidates(w)
	if refusal != nil {
		return nil, "", refusal
	}
	candidates = preferred(candidates, held, found)
	if a.fromOnePool(candidates, open, found) {
		return found, "", nil
	}
	for _, family := range open {
		if !a.fromOnePool(candidates, []lb.Family{family}, found) && refusal == nil {
			refusal = refuseFamily(candidates, family, w.pool)
		}
	}
	if refusal == nil {
		return found, "", nil
	}
	if w.all || len(found) == 0 && len(held) == 0 {
		return nil, "", refusal
	}
	return found, refusal.Message, nil
}

// fromOnePool adds an address of each of the families to found, all from the first pool that has them, or adds nothing.
func (a *assigner) fromOnePool(candidates []*pool, families []lb.Family, found map[lb.Family]netip.Addr) bool {
	free := make([]netip.Addr, len(families))
next:
	for _, p := range candidates {
		for i, family := range families {
			s := p.spaces[family]
			if s == nil {
				continue next
			}
			addr, ok := s.free(a.taken)
			if !ok {
				continue next
			}
			free[i] = addr
		}
		for i, family := range families {
			found[family] = free[i]
		}
		return true
	}
	return false
}

// checkAsked tells why the Service cannot have the address that it asks for.
func (a *assigner) checkAsked(addr netip.Addr, named string, key lb.Key) *lb.Refusal {
	var in, ready *pool
	if named != "" {
		p := a.pools.byName[named]
		if p == nil {
			return refuseUnknown(named)
		}
		if !p.contains(addr) {
			return lb.Refuse(lb.ReasonAddressOutside, "asks for %s of pool %s, which does not contain it", addr, named)
		}
		in, ready = p, p
	} else {
		in = a.pools.of(addr)
		a.pools.containing(addr, func(p *pool) bool {
			if p.refusal == nil {
				ready = p
			}
			return ready == nil
		})
	}
	switch holder, taken := a.holders[addr]; {
	case in == nil:
		return lb.Refuse(lb.ReasonAddressOutside, "asks for %s, which is in no pool", addr)
	case taken && holder != key:
		return lb.Refuse(lb.ReasonAddressTaken, "asks for %s, which Service %s holds", addr, holder)
	case ready == nil || ready.refusal != nil:
		return refuseNotReady(in)
	}
	return nil
}

// candidates returns the pools that may serve the Service, in the order in which they are asked.
func (a *assigner) candidates(w want) ([]*pool, *lb.Refusal) {
	if w.pool != "" {
		p := a.pools.byName[w.pool]
		switch {
		case p == nil:
			return nil, refuseUnknown(w.pool)
		case p.refusal != nil:
			return nil, refuseNotReady(p)
		}
		return []*pool{p}, nil
	}
	if len(a.pools.ordered) == 0 {
		return nil, lb.Refuse(lb.ReasonNoPool, "there is no IPAddressPool")
	}
	if len(a.pools.automatic) == 0 {
		return nil, lb.Refuse(lb.ReasonNoPool, "no IPAddressPool hands out addresses to Services that do not ask for one; name one in the annotation %s", lb.AnnotationPool)
	}
	return a.pools.automatic, nil
}

// preferred puts the pool of the addresses that the Service has already before the others.
func preferred(candidates []*pool, held []netip.Addr, found map[lb.Family]netip.Addr) []*pool {
	if len(held)+len(found) == 0 {
		return candidates
	}
	has := func(p *pool) bool {
		for _, addr := range found {
			if p.contains(addr) {
				return true
			}
		}
		return slices.ContainsFunc(held, p.contains)
	}
	if i := slices.IndexFunc(candidates, has); i > 0 {
		return slices.Concat(candidates[i:i+1], candidates[:i], candidates[i+1:])
	}
	return candidates
}

func refuseUnknown(name string) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotFound, "asks for pool %s, which does not exist", name)
}

func refuseNotReady(p *pool) *lb.Refusal {
	return lb.Refuse(lb.ReasonPoolNotReady, "pool %s hands out nothing new: %s", p.Name, p.refusal.Message)
}

// refuseFamily says why none of the pools gave an address of the family.
func refuseFamily(candidates []*pool, family lb.Family, named string) *lb.Refusal {
	var full []string
	for _, p := range candidates {
		if p.spaces[family] != nil {
			full = append(full, p.Name)
		}
	}
	slices.Sort(full)
	switch {
	case len(full) == 0 && named != "":
		return lb.Refuse(lb.ReasonFamilyUnserved, "pool %s has no %s addresses", named, family)
	case len(full) == 0:
		return lb.Refuse(lb.ReasonFamilyUnserved, "no pool that hands out addresses by itself has %s addresses", family)
	case len(full) == 1:
		return lb.Refuse(lb.ReasonPoolExhausted, "all %s addresses of pool %s are held", family, full[0])
	}
	return lb.Refuse(lb.ReasonPoolExhausted, "all %s addresses of the pools %s are held", family, strings.Join(full, ", "))
}

// condition says in one sentence what came out for the Service.
func (a *assigner) condition(c *candidate, addrs []netip.Addr, note string, refusal *lb.Refusal) lb.Condition {
	condition := lb.Condition{Type: lb.ConditionAssigned}
	var from, outside []string
	for _, addr := range addrs {
		if p := a.pools.of(addr); p != nil {
			from = append(from, addr.String()+" from pool "+p.Name)
		} else {
			outside = append(outside, addr.String())
		}
	}
	switch {
	case refusal != nil && len(addrs) == 0:
	case refusal != nil:
		refusal = lb.Refuse(refusal.Reason, "%s; keeps %s", refusal.Message, join(addrs))
	case c.duplicate.IsValid() && slices.Contains(addrs, c.duplicate):
		refusal = lb.Refuse(lb.ReasonDuplicate, "%s is held by the older Service %s as well; delete and create this Service, or ask for another address",
			c.duplicate, a.holders[c.duplicate])
	case len(outside) > 0:
		refusal = lb.Refuse(lb.ReasonHeldOutside, "keeps %s, which is in no pool and so is not announced; add it to a pool, or ask for another address",
			strings.Join(outside, ", "))
	}
	if refusal != nil {
		condition.Reason, condition.Message = refusal.Reason, refusal.Message
		return condition
	}
	condition.Status, condition.Reason, condition.Message = true, lb.ReasonAssigned, strings.Join(from, ", ")
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
