package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// pool is a pool at work.
type pool struct {
	lb.Pool
	spaces map[lb.Family]*space
	// reserved are the addresses of each of the pool's reservations.
	reserved []*space
	// refusal says why the pool hands out nothing new; nil when it does.
	refusal *lb.Refusal
	// overlap says with which other pool it shares addresses; "" when with none.
	overlap, overlapWith string
	// without names addresses of the pool that no pool hands out; "" when there are none.
	without string
	// outside names a reservation that lies outside the pool, or does in part; "" when there is none.
	outside string
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
	// pinned hand out addresses by themselves to the Services that they select, general ones to every
	// Service. In the order in which they are asked.
	pinned, general []*pool
	byName          map[string]*pool
	index           []indexed
	never           never
	// selectNamespaces is set when a pool selects namespaces by labels.
	selectNamespaces bool
	// unread is set while the ranges of a pool cannot all be read.
	unread bool
}

// indexed is one range of a pool in the index, which is sorted by the start of the ranges.
type indexed struct {
	lb.Range
	pool *pool
	// maxTo is the highest end of this range and all before it: where it is below an address, no
	// earlier range contains that.
	maxTo netip.Addr
}

func newPools(all map[string]lb.Pool, never never) *pools {
	ps := &pools{byName: make(map[string]*pool, len(all)), never: never}
	var excluded []lb.Range
	for _, n := range never.ranges {
		excluded = append(excluded, n.Range)
	}
	for name := range all {
		p := &pool{Pool: all[name], spaces: map[lb.Family]*space{}, refusal: all[name].Problem,
			byNamespace: map[namespaceFamily]int{}}
		cut := slices.Concat(excluded, p.Excluded)
		for _, r := range p.Reservations {
			cut = append(cut, r.Range)
		}
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			if ranges := ofFamily(p.Ranges, family); len(ranges) > 0 {
				p.spaces[family] = newSpace(ranges, ofFamily(cut, family), p.AvoidBuggy)
			}
		}
		for _, r := range p.Reservations {
			p.reserved = append(p.reserved, reservedSpace(p, r, excluded))
		}
		ps.unread = ps.unread || p.Problem != nil
		p.without = never.among(p.Ranges)
		p.outside = reservationOutside(p)
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

// reservedSpace returns the addresses of p that r offers: none outside of p, excluded, or reserved
// for others as well.
func reservedSpace(p *pool, r lb.Reservation, excluded []lb.Range) *space {
	family := r.Range.Family()
	cut := slices.Concat(subtract([]lb.Range{r.Range}, merge(ofFamily(p.Ranges, family))), ofFamily(excluded, family),
		ofFamily(p.Excluded, family))
	for _, other := range p.Reservations {
		if other.Range.Overlaps(r.Range) && (other.Namespace != r.Namespace || other.Name != "" && other.Name != r.Name) {
			cut = append(cut, other.Range)
		}
	}
	return newSpace([]lb.Range{r.Range}, cut, false)
}

// reservationOutside names the first reservation with addresses that the pool does not have. The
// API server refuses only CIDRs that are wholly outside, as its CEL library has no order of
// addresses.
func reservationOutside(p *pool) string {
	for i, r := range p.Reservations {
		rest := subtract([]lb.Range{r.Range}, merge(ofFamily(p.Ranges, r.Range.Family())))
		if len(rest) > 0 {
			return fmt.Sprintf("spec.reservations[%d] for %s/%s has no effect on %s, which spec.addresses does not contain", i,
				r.Namespace, orAll(r.Name), rest[0])
		}
	}
	return ""
}

// changed names the pools whose specifications are not those that ps is made of, and those that are
// gone.
func (ps *pools) changed(all map[string]lb.Pool) map[string]bool {
	changed := map[string]bool{}
	for _, p := range ps.ordered {
		if _, ok := all[p.Name]; !ok {
			changed[p.Name] = true
		}
	}
	for name, other := range all {
		p := ps.byName[name]
		if p == nil {
			changed[name] = true
			continue
		}
		other.Status, other.Version = p.Status, p.Version
		if !reflect.DeepEqual(other, p.Pool) {
			changed[name] = true
		}
	}
	return changed
}

// containedIn reports whether one of the pools named contains addr.
func (ps *pools) containedIn(addr netip.Addr, names map[string]bool) (found bool) {
	ps.containing(addr, func(p *pool) bool {
		found = names[p.Name]
		return !found
	})
	return found
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

// refuseOverlaps lets only the oldest of pools that share addresses hand out new ones: whoever came
// later does so by mistake.
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
			o.older.overlap, o.older.overlapWith = fmt.Sprintf("%s is also in the younger pool %s, which hands out nothing new",
				o.shared, p.Name), p.Name
		}
	}
	for p, o := range found {
		p.overlap = fmt.Sprintf("%s is also in the older pool %s", o.shared, o.older.Name)
		if p.refusal == nil {
			p.refusal = lb.Refuse(lb.ReasonPoolOverlaps,
				"%s is also in the older pool %s; Services keep what they hold of pool %s, and it hands out nothing new", o.shared,
				o.older.Name, p.Name)
		}
	}
}

func lowest(a, b netip.Addr) netip.Addr {
	if a.Less(b) {
		return a
	}
	return b
}

// containing calls yield for each pool that contains addr, in no particular order, until it returns
// false.
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

// assigned notes in all pools that contain addr that a Service holds it, or with -1 that none does
// any longer.
func (ps *pools) assigned(addr netip.Addr, by int) {
	ps.containing(addr, func(p *pool) bool {
		p.spaces[lb.FamilyOf(addr)].usage.Assigned += by
		return true
	})
}

// occupied notes in all pools that contain addr that it cannot be given to just anybody, or that it
// can again. It reports whether one of them has nothing left now.
func (ps *pools) occupied(addr netip.Addr, busy bool) (exhausted bool) {
	ps.containing(addr, func(p *pool) bool {
		s := p.spaces[lb.FamilyOf(addr)]
		s.occupied(addr, busy)
		if !busy {
			p.giveBackReserved(addr)
		}
		exhausted = exhausted || s.exhausted()
		return true
	})
	return exhausted
}

// used notes in all pools that contain addr that a namespace has it, or with -1 that it has not any
// longer. It reports whether the namespace has now as many as one of them allows it, or more.
func (ps *pools) used(addr netip.Addr, namespace string, by int) (full bool) {
	ps.containing(addr, func(p *pool) bool {
		k := namespaceFamily{namespace, lb.FamilyOf(addr)}
		n := p.byNamespace[k] + by
		if p.byNamespace[k] = n; n == 0 {
			delete(p.byNamespace, k)
		}
		full = full || by > 0 && p.PerNamespace > 0 && n >= p.PerNamespace
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
			p.giveBackReserved(addr)
			return true
		})
	}
}

// giveBackReserved has searches in reservations find addr again.
func (p *pool) giveBackReserved(addr netip.Addr) {
	for _, s := range p.reserved {
		if s.offers(addr) {
			s.giveBack(addr)
		}
	}
}

func (p *pool) contains(addr netip.Addr) bool {
	s := p.spaces[lb.FamilyOf(addr)]
	return s != nil && contains(s.ranges, addr)
}

// serves reports whether the pool is for Services with these labels in a namespace with those.
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

func orAll(name string) string {
	if name == "" {
		return "*"
	}
	return name
}
