package plan

import "container/heap"

// Turns tells whose turn it is among backends. Those with the same weight come one after the other;
// one with a weight of 3 comes three times as often as one with 1, and at about the same distances.
// That is stride scheduling (Waldspurger and Weihl, 1995), which is fair after any number of turns.
type Turns struct {
	n, last int
	waiting strides // empty if all weights are the same
}

// NewTurns returns the turns of n backends, whose weights are the same if there are none.
func NewTurns[W uint8 | uint32](n int, weights []W) *Turns {
	t := &Turns{n: n, last: -1}
	for i, weight := range weights[:min(n, len(weights))] {
		t.waiting = append(t.waiting, stride{backend: i, weight: uint64(weight), turn: 1})
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
	first.turn += 2
	heap.Fix(&t.waiting, 0)
	return t.last
}

// Fill returns whose the next turns are.
func (t *Turns) Fill(size uint32) []uint16 {
	table := make([]uint16, size)
	for i := range table {
		table[i] = uint16(t.Next())
	}
	return table
}

// stride is a backend whose next turn is in the middle of its share: at turn / (2 * weight), with
// turn an odd number.
type stride struct {
	backend      int
	weight, turn uint64
}

type strides []stride

func (s strides) Len() int { return len(s) }

func (s strides) Less(i, j int) bool {
	if a, b := s[i].turn*s[j].weight, s[j].turn*s[i].weight; a != b {
		return a < b
	}
	return s[i].backend < s[j].backend
}

func (s strides) Swap(i, j int) { s[i], s[j] = s[j], s[i] }

// Push and Pop are there for heap.Interface alone: nothing comes or goes.
func (s *strides) Push(any) {}
func (s *strides) Pop() any { return nil }
