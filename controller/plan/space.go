package plan

import (
	"math/big"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Usage counts the addresses of one family in a pool.
type Usage struct {
	Total    *big.Int
	Assigned int
}

// Available returns how many addresses nobody holds.
func (u Usage) Available() *big.Int {
	return new(big.Int).Sub(u.Total, big.NewInt(int64(u.Assigned)))
}

// space is the addresses of one family in a pool: disjoint ranges in ascending order.
type space struct {
	ranges []lb.Range
	usage  Usage
	// All addresses before next, in the range with index at, and all ranges before it are taken. In one pass addresses are
	// only ever taken, so a search goes on where the last one ended and a pass looks at each taken address once.
	at   int
	next netip.Addr
}

// newSpace merges ranges, all of one family, into disjoint ones.
func newSpace(ranges []lb.Range) *space {
	s := &space{ranges: merge(ranges), usage: Usage{Total: new(big.Int)}}
	for _, r := range s.ranges {
		s.usage.Total.Add(s.usage.Total, r.Size())
	}
	s.next = s.ranges[0].From
	return s
}

// merge returns the same addresses as disjoint ranges in ascending order. It does not change its argument.
func merge(ranges []lb.Range) []lb.Range {
	sorted := slices.SortedFunc(slices.Values(ranges), func(a, b lb.Range) int { return a.From.Compare(b.From) })
	var merged []lb.Range
	for _, r := range sorted {
		if last := len(merged) - 1; last >= 0 && !merged[last].To.Less(r.From) {
			if merged[last].To.Less(r.To) {
				merged[last].To = r.To
			}
			continue
		}
		merged = append(merged, r)
	}
	return merged
}

// free returns the lowest address that is not taken, without taking it.
func (s *space) free(taken func(netip.Addr) bool) (netip.Addr, bool) {
	for s.at < len(s.ranges) {
		for ; s.ranges[s.at].Contains(s.next); s.next = s.next.Next() {
			if !taken(s.next) {
				return s.next, true
			}
		}
		if s.at++; s.at < len(s.ranges) {
			s.next = s.ranges[s.at].From
		}
	}
	return netip.Addr{}, false
}
