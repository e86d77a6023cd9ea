package plan

import (
	"container/heap"
	"iter"
	"math/big"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Usage counts the addresses of one family in a pool.
type Usage struct {
	Total    *big.Int // those that the pool can hand out to anybody
	Assigned int      // those that Services hold
	Busy     int      // those of Total that are held or kept
}

// Available returns how many addresses can be handed out now.
func (u Usage) Available() *big.Int {
	return new(big.Int).Sub(u.Total, big.NewInt(int64(u.Busy)))
}

// space is the addresses of one family in a pool.
type space struct {
	ranges     []lb.Range // all of them: disjoint ranges in ascending order
	open       []lb.Range // those that can be handed out to anybody, likewise
	avoidBuggy bool
	usage      Usage
	// All addresses before next, which is in the open range with index at, are busy, or on the heap of
	// those that became free since. So a search goes on where the last one ended, and looks at each
	// address once.
	at       int
	next     netip.Addr
	released addrHeap
}

// newSpace makes a space of ranges without those in excluded, all of one family.
func newSpace(ranges, excluded []lb.Range, avoidBuggy bool) *space {
	s := &space{ranges: merge(ranges), avoidBuggy: avoidBuggy, usage: Usage{Total: new(big.Int)}}
	s.open = subtract(s.ranges, merge(excluded))
	for _, r := range s.open {
		s.usage.Total.Add(s.usage.Total, r.Size())
		if avoidBuggy && r.From.Is4() {
			s.usage.Total.Sub(s.usage.Total, big.NewInt(buggyIn(r)))
		}
	}
	if len(s.open) > 0 {
		s.next = s.open[0].From
	}
	return s
}

// merge returns the same addresses as disjoint ranges in ascending order. It does not change its
// argument.
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

// subtract returns the addresses of ranges that are not in cut; both as merge returns them.
func subtract(ranges, cut []lb.Range) []lb.Range {
	var left []lb.Range
	for _, r := range ranges {
		gone := false
		for _, c := range cut {
			if !c.Overlaps(r) {
				continue
			}
			if r.From.Less(c.From) {
				left = append(left, lb.Range{From: r.From, To: c.From.Prev()})
			}
			if !c.To.Less(r.To) {
				gone = true
				break
			}
			r.From = c.To.Next()
		}
		if !gone {
			left = append(left, r)
		}
	}
	return left
}

// buggy reports whether some old devices take addr for that of a network or a broadcast.
func buggy(addr netip.Addr) bool {
	if !addr.Is4() {
		return false
	}
	last := addr.As4()[3]
	return last == 0 || last == 255
}

// buggyIn counts the buggy addresses of an IPv4 range.
func buggyIn(r lb.Range) int64 {
	upTo := func(n int64) int64 { return (n+255)/256 + n/256 } // among the n lowest addresses
	number := func(a netip.Addr) int64 { return new(big.Int).SetBytes(a.AsSlice()).Int64() }
	return upTo(number(r.To)+1) - upTo(number(r.From))
}

// contains reports whether ranges, as merge returns them, contain addr.
func contains(ranges []lb.Range, addr netip.Addr) bool {
	after, _ := slices.BinarySearchFunc(ranges, addr, func(r lb.Range, addr netip.Addr) int {
		if addr.Less(r.From) {
			return 1
		}
		return -1
	})
	return after > 0 && ranges[after-1].Contains(addr)
}

// offers reports whether addr can be handed out to anybody.
func (s *space) offers(addr netip.Addr) bool {
	return contains(s.open, addr) && (!s.avoidBuggy || !buggy(addr))
}

// occupied notes that addr has become busy, or is so no longer.
func (s *space) occupied(addr netip.Addr, busy bool) {
	if !s.offers(addr) {
		return
	}
	if busy {
		s.usage.Busy++
		return
	}
	s.usage.Busy--
	s.giveBack(addr)
}

// exhausted reports whether there is nothing left to hand out.
func (s *space) exhausted() bool {
	return s.usage.Total.IsInt64() && s.usage.Total.Int64() <= int64(s.usage.Busy)
}

// giveBack has free find addr again.
func (s *space) giveBack(addr netip.Addr) {
	if s.at >= len(s.open) || addr.Less(s.next) {
		heap.Push(&s.released, addr)
	}
}

// free returns the lowest address that is not busy, without taking it.
func (s *space) free(busy func(netip.Addr) bool) (netip.Addr, bool) {
	for len(s.released) > 0 {
		if !busy(s.released[0]) {
			return s.released[0], true
		}
		heap.Pop(&s.released)
	}
	for s.at < len(s.open) {
		for ; s.open[s.at].Contains(s.next); s.next = s.next.Next() {
			if !busy(s.next) && (!s.avoidBuggy || !buggy(s.next)) {
				return s.next, true
			}
		}
		if s.at++; s.at < len(s.open) {
			s.next = s.open[s.at].From
		}
	}
	return netip.Addr{}, false
}

// following returns the n addresses that free returns next if each is taken in turn, as disjoint
// ranges in ascending order. It looks at no more than what it returns, what has become busy on the
// heap, and the busy addresses right behind next.
func (s *space) following(n int, busy func(netip.Addr) bool) (ranges []lb.Range) {
	add := func(addr netip.Addr) {
		if last := len(ranges) - 1; last >= 0 && ranges[last].To.Next() == addr {
			ranges[last].To = addr
		} else {
			ranges = append(ranges, lb.Range{From: addr, To: addr})
		}
		n--
	}
	var last netip.Addr
	for addr := range s.released.ascending() {
		if n <= 0 {
			return ranges
		}
		if addr != last && !busy(addr) { // an address may have become free twice
			add(addr)
		}
		last = addr
	}
	from := s.next
	for at := s.at; at < len(s.open); at++ {
		for ; s.open[at].Contains(from) && n > 0; from = from.Next() {
			if !busy(from) && (!s.avoidBuggy || !buggy(from)) {
				add(from)
			}
		}
		if n <= 0 {
			break
		}
		if at+1 < len(s.open) {
			from = s.open[at+1].From
		}
	}
	return ranges
}

// ascending goes through the heap in order, and leaves it as it is.
func (h addrHeap) ascending() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		f := frontier{of: h}
		if len(h) > 0 {
			f.places = append(f.places, 0)
		}
		for len(f.places) > 0 {
			i := heap.Pop(&f).(int)
			if !yield(h[i]) {
				return
			}
			for child := 2*i + 1; child <= 2*i+2 && child < len(h); child++ {
				heap.Push(&f, child)
			}
		}
	}
}

// frontier are the places of a heap whose parents were visited, that of the lowest address first.
type frontier struct {
	of     addrHeap
	places []int
}

func (f *frontier) Len() int           { return len(f.places) }
func (f *frontier) Less(i, j int) bool { return f.of.Less(f.places[i], f.places[j]) }
func (f *frontier) Swap(i, j int)      { f.places[i], f.places[j] = f.places[j], f.places[i] }
func (f *frontier) Push(place any)     { f.places = append(f.places, place.(int)) }
func (f *frontier) Pop() any {
	last := f.places[len(f.places)-1]
	f.places = f.places[:len(f.places)-1]
	return last
}

// addrHeap has the lowest address first.
type addrHeap []netip.Addr

func (h addrHeap) Len() int           { return len(h) }
func (h addrHeap) Less(i, j int) bool { return h[i].Less(h[j]) }
func (h addrHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *addrHeap) Push(addr any)     { *h = append(*h, addr.(netip.Addr)) }
func (h *addrHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
