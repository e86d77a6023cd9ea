package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// pool is a pool at work.
type pool struct {
	lb.Pool
	spaces map[lb.Family]*space
	// refusal says why the pool hands out nothing new; nil when it does.
	refusal *lb.Refusal
	// overlap says with which other pool it shares addresses; "" when with none.
	overlap, overlapWith string
	// byNamespace counts the addresses that the Services of a namespace hold.
	byNamespace map[namespaceFamily]int
}

type namespaceFamily struct {
	namespace string
	family    lb.Family
}

// pools are all pools, oldest first, with an index from addresses to pools.
type pools struct {
	ordered []*pool
	// pinned hand out addresses by themselves to the Services that they select, general ones to every Service. In the order in which
	// they are asked.
	pinned, general []*pool
	byName          map[string]*pool
	index           []indexed
	never           []neverRange
	// selectNamespaces is set when a pool selects namespaces by labels.
	selectNamespaces bool
}

// indexed is one range of a pool in the index, which is sorted by the start of the ranges.
type indexed struct {
	lb.Range
	pool *pool
	// maxTo is the highest end of this range and all before it: where it is below an address, no earlier range contains that.
	maxTo netip.Addr
}

// neverRange is what no pool hands out.
type neverRange struct {
	lb.Range
	what string
}

// nodeAddresses are never handed out: a node would lose its own address to a Service.
func nodeAddresses(nodes map[string]lb.Node) []neverRange {
	var never []neverRange
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		for _, addr := range nodes[name].Addresses {
			never = append(never, neverRange{lb.Range{From: addr, To: addr}, "an address of node " + name})
		}
	}
	return never
}

func others(ranges []lb.Range) []neverRange {
	var never []neverRange
	for _, r := range ranges {
		never = append(never, neverRange{r, "excluded by the controller's --never-assign"})
	}
	return never
}

func newPools(all map[string]lb.Pool, never []neverRange) *pools {
	ps := &pools{byName: make(map[string]*pool, len(all)), never: never}
	var excluded []lb.Range
	for _, n := range never {
		excluded = append(excluded, n.Range)
	}
	for name := range all {
		p := &pool{Pool: all[name], spaces: map[lb.Family]*space{}, refusal: all[name].Problem, byNamespace: map[namespaceFamily]int{}}
		cut := slices.Concat(excluded, p.Excluded)
		for _, r := range p.Reservations {
			cut = append(cut, r.Range)
		}
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			if ranges := ofFamily(p.Ranges, family); len(ranges) > 0 {
				p.spaces[family] = newSpace(ranges, ofFamily(cut, family), p.AvoidBuggy)
			}
		}
		ps.ordered = append(ps.ordered, p)
		ps.byName[name] = p
	}
	slices.SortFunc(ps.ordered, olderPool)
	ps.buildIndex()
	ps.refuseOverlaps()
	for _, p := range ps.ordered {
		if p.Allocation != nil && len(p.Allocation.NamespaceSelectors) > 0 {
			ps.selectNamespaces = true
		}
		switch {
		case !p.AutoAssign || p.refusal != nil:
		case p.Allocation == nil:
			ps.general = append(ps.general, p)
		default:
			ps.pinned = append(ps.pinned, p)
		}
	}
	slices.SortStableFunc(ps.pinned, func(a, b *pool) int { return cmp.Compare(a.rank(), b.rank()) })
	return ps
}

// same tells whether all is made of the same specifications.
func (ps *pools) same(all map[string]lb.Pool) bool {
	if len(all) != len(ps.ordered) {
		return false
	}
	for _, p := range ps.ordered {
		other, ok := all[p.Name]
		other.Status = p.Status
		if !ok || !reflect.DeepEqual(other, p.Pool) {
			return false
		}
	}
	return true
}

// rank is the priority, with 0 last.
func (p *pool) rank() uint { return uint(p.Allocation.Priority) - 1 }

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
		if o.older.overlap == "" || olderPool(p, ps.byName[o.older.overlapWith]) < 0 {
			o.older.overlap, o.older.overlapWith = fmt.Sprintf("%s is also in the younger pool %s, which hands out nothing new", o.shared, p.Name), p.Name
		}
	}
	for p, o := range found {
		p.overlap = fmt.Sprintf("%s is also in the older pool %s", o.shared, o.older.Name)
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

// assigned notes in all pools that contain addr that a Service holds it, or with -1 that none does any longer.
func (ps *pools) assigned(addr netip.Addr, by int) {
	ps.containing(addr, func(p *pool) bool {
		p.spaces[lb.FamilyOf(addr)].usage.Assigned += by
		return true
	})
}

// occupied notes in all pools that contain addr that it cannot be given to just anybody, or that it can again. It tells whether
// one of them has nothing left now.
func (ps *pools) occupied(addr netip.Addr, busy bool) (exhausted bool) {
	ps.containing(addr, func(p *pool) bool {
		s := p.spaces[lb.FamilyOf(addr)]
		s.occupied(addr, busy)
		exhausted = exhausted || s.exhausted()
		return true
	})
	return exhausted
}

// used notes in all pools that contain addr that a namespace has it, or with -1 that it has not any longer. It tells whether the
// namespace has now as many as one of them allows it.
func (ps *pools) used(addr netip.Addr, namespace string, by int) (full bool) {
	ps.containing(addr, func(p *pool) bool {
		k := namespaceFamily{namespace, lb.FamilyOf(addr)}
		n := p.byNamespace[k] + by
		if p.byNamespace[k] = n; n == 0 {
			delete(p.byNamespace, k)
		}
		full = full || by > 0 && n == p.PerNamespace
		return true
	})
	return full
}

// giveBack has searches find addresses again that free returned and that were not taken.
func (ps *pools) giveBack(addrs []netip.Addr) {
	for _, addr := range addrs {
		ps.containing(addr, func(p *pool) bool {
			if s := p.spaces[lb.FamilyOf(addr)]; s.offers(addr) {
				s.giveBack(addr)
			}
			return true
		})
	}
}

// neverAssigned says what addr is that no pool hands out, or "".
func (ps *pools) neverAssigned(addr netip.Addr) string {
	for _, n := range ps.never {
		if n.Contains(addr) {
			return n.what
		}
	}
	return ""
}

func (p *pool) contains(addr netip.Addr) bool {
	s := p.spaces[lb.FamilyOf(addr)]
	return s != nil && contains(s.ranges, addr)
}

// serves tells whether the pool is for Services with these labels in a namespace with those.
func (p *pool) serves(e *entry, namespaces map[string]lb.Namespace) bool {
	a := p.Allocation
	if a == nil {
		return true
	}
	namespace := namespaces[e.Key.Namespace].Labels
	inNamespace := len(a.Namespaces)+len(a.NamespaceSelectors) == 0 || slices.Contains(a.Namespaces, e.Key.Namespace) ||
		slices.ContainsFunc(a.NamespaceSelectors, func(s labels.Selector) bool { return s.Matches(namespace) })
	return inNamespace && (len(a.ServiceSelectors) == 0 ||
		slices.ContainsFunc(a.ServiceSelectors, func(s labels.Selector) bool { return s.Matches(e.Labels) }))
}

// plan returns what the pool shall show.
func (p *pool) plan(released []lb.Released) PoolPlan {
	plan := PoolPlan{Families: make(map[lb.Family]Usage, len(p.spaces)), Status: lb.PoolStatus{Released: released}}
	for family, s := range p.spaces {
		plan.Families[family] = s.usage
	}
	figures := func(family lb.Family) (assigned, available string) {
		u, ok := plan.Families[family]
		if !ok {
			return "0", "0"
		}
		return strconv.Itoa(u.Assigned), u.Available().String()
	}
	plan.Status.AssignedIPv4, plan.Status.AvailableIPv4 = figures(lb.IPv4)
	plan.Status.AssignedIPv6, plan.Status.AvailableIPv6 = figures(lb.IPv6)
	plan.Status.Conditions = []lb.Condition{p.ready(), p.overlapping(), p.exhausted()}
	return plan
}

func (p *pool) ready() lb.Condition {
	c := lb.Condition{Type: lb.ConditionReady, Generation: p.Generation}
	switch {
	case p.refusal != nil:
		c.Reason, c.Message = p.refusal.Reason, p.refusal.Message
	case p.AutoAssign && p.Allocation != nil:
		c.Status, c.Reason, c.Message = true, lb.ReasonPoolReady, "hands out addresses to the Services that spec.serviceAllocation selects"
	case p.AutoAssign:
		c.Status, c.Reason, c.Message = true, lb.ReasonPoolReady, "hands out addresses"
	default:
		c.Status, c.Reason, c.Message = true, lb.ReasonPoolReady, "hands out addresses to Services that ask for them"
	}
	return c
}

func (p *pool) overlapping() lb.Condition {
	if p.overlap == "" {
		return lb.Condition{Type: lb.ConditionOverlapping, Reason: lb.ReasonPoolApart, Message: "no other pool has any of its addresses", Generation: p.Generation}
	}
	return lb.Condition{Type: lb.ConditionOverlapping, Status: true, Reason: lb.ReasonPoolOverlaps, Message: p.overlap, Generation: p.Generation}
}

// exhausted has figures only once there is nothing left, as they would change all the time before.
func (p *pool) exhausted() lb.Condition {
	var none []string
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if s := p.spaces[family]; s != nil && s.exhausted() {
			none = append(none, fmt.Sprintf("none of %s %s addresses is left (Services hold %d)", s.usage.Total, family, s.usage.Assigned))
		}
	}
	if len(none) == 0 {
		return lb.Condition{Type: lb.ConditionExhausted, Reason: lb.ReasonPoolAvailable, Message: "has addresses left", Generation: p.Generation}
	}
	return lb.Condition{Type: lb.ConditionExhausted, Status: true, Reason: lb.ReasonPoolExhausted, Message: strings.Join(none, "; "), Generation: p.Generation}
}
