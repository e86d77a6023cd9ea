package plan

import "container/heap"

// Turns tells whose turn it is among backends. Those with the same weight come one after the other;
// one with a weight of 3 comes three times as often as one with 1, and at about the same distances.
// That is stride scheduling (Waldspurger and Weihl, 1995): a backend with weight w has one turn in each
// 1/w of the time.
type Turns struct {
	n, last int
	waiting strides // empty if all weights are the same
	// within returns where in its part of the time a backend's turn is, in units of 1/turnUnit of it.
	within func(backend, turn int) uint64
}

const turnUnit = 1 << 32

// NewTurns returns the turns of n backends, whose weights are the same if there are none.
func NewTurns[W uint8 | uint32](n int, weights []W) *Turns {
	t := &Turns{n: n, last: -1, within: func(int, int) uint64 { return turnUnit / 2 }}
	for i, weight := range weights[:min(n, len(weights))] {
		t.waiting = append(t.waiting, stride{backend: i, weight: uint64(weight), at: turnUnit / 2})
	}
	heap.Init(&t.waiting)
	return t
}

// Next returns whose turn it is.
func (t *Turns) Next() int {
	if len(t.waiting) == 0 {
		t.last = (t.last + 1) % t.n
		return t.last
	}
	first := &t.waiting[0]
	t.last = first.backend
	first.turn++
	first.at = uint64(first.turn)*turnUnit + t.within(first.backend, first.turn)
	heap.Fix(&t.waiting, 0)
	return t.last
}

// Fill returns whose the next turns are, for a counter that others move too. So that someone who gets only every second
// turn, or every third, meets all backends too, it shuffles them: each turn has another place in its part of the time,
// which depends on seed. Without weights, each n turns are a permutation of the n backends, and in n such permutations
// each backend has each place once.
func (t *Turns) Fill(size uint32, seed uint64) []uint16 {
	s := &shuffle{n: t.n, seed: seed}
	table := make([]uint16, size)
	if len(t.waiting) == 0 {
		for turn := 0; turn*t.n < len(table); turn++ {
			for backend := range t.n {
				if i := turn*t.n + s.place(backend, turn); i < len(table) {
					table[i] = uint16(backend)
				}
			}
		}
		return table
	}
	t.within = s.within
	for i := range t.waiting {
		t.waiting[i].at = s.within(t.waiting[i].backend, 0)
	}
	heap.Init(&t.waiting)
	for i := range table {
		table[i] = uint16(t.Next())
	}
	return table
}

// shuffle says where in its part of the time each turn is.
type shuffle struct {
	n    int
	seed uint64
	// orders has two permutations for each n turns, which make a Latin square: see place.
	orders []uint16
}

// place returns which of n places a backend's turn has. All backends have different places in the same turn, and a
// backend has all places in n turns.
func (s *shuffle) place(backend, turn int) int {
	first := turn / s.n * 2 * s.n
	for len(s.orders) <= first {
		for range 2 {
			next := len(s.orders)
			for i := range s.n {
				s.orders = append(s.orders, uint16(i))
			}
			order := s.orders[next:]
			for i := s.n - 1; i > 0; i-- {
				j := Mix(Mix(s.seed)+uint64(next+i)) % uint64(i+1)
				order[i], order[j] = order[j], order[i]
			}
		}
	}
	return int(s.orders[first+turn%s.n]+s.orders[first+s.n+backend]) % s.n
}

// within returns where a backend's turn is, in units of 1/turnUnit: somewhere in its place, as places of backends with
// other weights have other lengths.
func (s *shuffle) within(backend, turn int) uint64 {
	some := Mix(s.seed^Mix(uint64(turn)<<16|uint64(backend))) % turnUnit
	// 0 would be a turn of a backend of weight 0.
	return (uint64(s.place(backend, turn))*turnUnit+some)/uint64(s.n) + 1
}

// stride is a backend whose next turn is at / (weight * turnUnit).
type stride struct {
	backend, turn int
	weight, at    uint64
}

type strides []stride

func (s strides) Len() int { return len(s) }

func (s strides) Less(i, j int) bool {
	if a, b := s[i].at*s[j].weight, s[j].at*s[i].weight; a != b {
		return a < b
	}
	return s[i].backend < s[j].backend
}

func (s strides) Swap(i, j int) { s[i], s[j] = s[j], s[i] }

// Push and Pop are there for heap.Interface alone: nothing comes or goes.
func (s *strides) Push(any) {}
func (s *strides) Pop() any { return nil }
