package plan

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// pool is a pool at work in one pass.
type pool struct {
	lb.Pool
	spaces map[lb.Family]*space
	// refusal says why the pool hands out nothing new; nil when it does.
	refusal *lb.Refusal
}

// pools are all pools, oldest first, with an index from addresses to pools.
type pools struct {
	ordered   []*pool
	automatic []*pool // those that hand out addresses to Services that ask for none of them
	byName    map[string]*pool
	index     []indexed
}

// indexed is one range of a pool in the index, which is sorted by the start of the ranges.
type indexed struct {
	lb.Range
	pool *pool
	// maxTo is the highest end of this range and all before it: where it is below an address, no earlier range contains that.
	maxTo netip.Addr
}

func newPools(all map[string]lb.Pool) *pools {
	ps := &pools{byName: make(map[string]*pool, len(all))}
	for name := range all {
		p := &pool{Pool: all[name], spaces: map[lb.Family]*space{}, refusal: all[name].Problem}
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			if ranges := ofFamily(p.Ranges, family); len(ranges) > 0 {
				p.spaces[family] = newSpace(ranges)
			}
		}
		ps.ordered = append(ps.ordered, p)
		ps.byName[name] = p
	}
	slices.SortFunc(ps.ordered, olderPool)
	ps.buildIndex()
	ps.refuseOverlaps()
	for _, p := range ps.ordered {
		if p.AutoAssign && p.refusal == nil {
			ps.automatic = append(ps.automatic, p)
		}
	}
	return ps
}

// olderPool orders pools by age, then by name.
func olderPool(a, b *pool) int {
	return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name))
}

func ofFamily(ranges []lb.Range, family lb.Family) []lb.Range {
	var some []lb.Range
	for _, r := range ranges {
		if r.Family() == family {
			some = append(some, r)
		}
	}
	return some
}

func (ps *pools) buildIndex() {
	for _, p := range ps.ordered {
		for _, s := range p.spaces {
			for _, r := range s.ranges {
				ps.index = append(ps.index, indexed{Range: r, pool: p})
			}
		}
	}
	slices.SortFunc(ps.index, func(a, b indexed) int {
		return cmp.Or(a.From.Compare(b.From), olderPool(a.pool, b.pool))
	})
	for i := range ps.index {
		ps.index[i].maxTo = ps.index[i].To
		if i > 0 && ps.index[i].To.Less(ps.index[i-1].maxTo) {
			ps.index[i].maxTo = ps.index[i-1].maxTo
		}
	}
}

// refuseOverlaps lets only the oldest of pools that share addresses hand out new ones: whoever came later does so by mistake.
func (ps *pools) refuseOverlaps() {
	type overlap struct {
		older  *pool
		shared lb.Range
	}
	found := map[*pool]overlap{}
	for i, r := range ps.index {
		for j := i - 1; j >= 0 && !ps.index[j].maxTo.Less(r.From); j-- {
			other := ps.index[j]
			if !other.Overlaps(r.Range) || other.pool == r.pool {
				continue
			}
			older, younger := other.pool, r.pool
			if olderPool(younger, older) < 0 {
				older, younger = younger, older
			}
			// The oldest, and of its ranges the lowest, so that the message is the same in each pass.
			if known, ok := found[younger]; !ok || olderPool(older, known.older) < 0 {
				found[younger] = overlap{older, lb.Range{From: r.From, To: lowest(other.To, r.To)}}
			}
		}
	}
	for p, o := range found {
		if p.refusal == nil {
			p.refusal = lb.Refuse(lb.ReasonPoolOverlaps,
				"%s is also in the older pool %s; Services keep what they hold of pool %s, and it hands out nothing new", o.shared, o.older.Name, p.Name)
		}
	}
}

func lowest(a, b netip.Addr) netip.Addr {
	if a.Less(b) {
		return a
	}
	return b
}

// containing calls yield for each pool that contains addr, in no particular order, until it returns false.
func (ps *pools) containing(addr netip.Addr, yield func(*pool) bool) {
	after, _ := slices.BinarySearchFunc(ps.index, addr, func(e indexed, addr netip.Addr) int {
		if addr.Less(e.From) {
			return 1
		}
		return -1
	})
	for i := after - 1; i >= 0 && !ps.index[i].maxTo.Less(addr); i-- {
		if ps.index[i].Contains(addr) && !yield(ps.index[i].pool) {
			return
		}
	}
}

// of returns the oldest pool that contains addr, or nil.
func (ps *pools) of(addr netip.Addr) *pool {
	var oldest *pool
	ps.containing(addr, func(p *pool) bool {
		if oldest == nil || olderPool(p, oldest) < 0 {
			oldest = p
		}
		return true
	})
	return oldest
}

// count notes in all pools that contain addr that it is held.
func (ps *pools) count(addr netip.Addr) {
	ps.containing(addr, func(p *pool) bool {
		p.spaces[lb.FamilyOf(addr)].usage.Assigned++
		return true
	})
}

func (p *pool) contains(addr netip.Addr) bool {
	s := p.spaces[lb.FamilyOf(addr)]
	return s != nil && slices.ContainsFunc(s.ranges, func(r lb.Range) bool { return r.Contains(addr) })
}

// plan returns what the pool shall show after the pass.
func (p *pool) plan() PoolPlan {
	plan := PoolPlan{Families: make(map[lb.Family]Usage, len(p.spaces))}
	for family, s := range p.spaces {
		plan.Families[family] = s.usage
	}
	assigned := func(family lb.Family) (assigned, available string) {
		u, ok := plan.Families[family]
		if !ok {
			return "0", "0"
		}
		return strconv.Itoa(u.Assigned), u.Available().String()
	}
	plan.Status.AssignedIPv4, plan.Status.AvailableIPv4 = assigned(lb.IPv4)
	plan.Status.AssignedIPv6, plan.Status.AvailableIPv6 = assigned(lb.IPv6)
	plan.Status.Conditions = []lb.Condition{p.condition()}
	return plan
}

func (p *pool) condition() lb.Condition {
	c := lb.Condition{Type: lb.ConditionReady, Generation: p.Generation}
	switch {
	case p.refusal != nil:
		c.Reason, c.Message = p.refusal.Reason, p.refusal.Message
	case p.AutoAssign:
		c.Status, c.Reason, c.Message = true, lb.ReasonPoolReady, "hands out addresses"
	default:
		c.Status, c.Reason, c.Message = true, lb.ReasonPoolReady, "hands out addresses to Services that ask for them"
	}
	return c
}
