package plan

import (
	"maps"
	"math"
	"slices"
	"testing"
)

// As IPVS defines wrr: of as many turns as all weights together, each backend has as many as its
// own. They are spread over all turns, not one after the other.
func TestTurnsFollowWeights(t *testing.T) {
	for _, weights := range [][]uint8{{1, 1, 1}, {3, 1}, {5, 3, 2}, {100, 1, 1}, {7, 7, 1, 50, 2}} {
		total := 0
		for _, weight := range weights {
			total += int(weight)
		}
		heaviest := slices.Index(weights, slices.Max(weights))
		turns, counts := NewTurns(len(weights), weights), make([]int, len(weights))
		longest, waited := 0, 0
		for range 4 * total {
			now := turns.Next()
			counts[now]++
			if waited++; now == heaviest {
				longest, waited = max(longest, waited), 0
			}
		}
		for i, weight := range weights {
			if counts[i] != 4*int(weight) {
				t.Errorf("%d: %d turns of %d for %d", weights, counts[i], 4*total, i)
			}
		}
		if most := total/int(weights[heaviest]) + len(weights); longest > most {
			t.Errorf("%d: the heaviest waits for %d turns, want %d at most", weights, longest, most)
		}
	}
}

// alone returns how many turns in a row one backend has at most, and by how many turns a backend is off its share at
// most, after any number of turns from the beginning of the table.
func alone(table []uint16, shares []float64) (row int, off float64) {
	counts, same := make([]float64, len(shares)), 0
	for i, now := range table {
		counts[now]++
		if same++; i > 0 && table[i-1] != now {
			same = 1
		}
		row = max(row, same)
		for b, share := range shares {
			off = max(off, math.Abs(counts[b]-share*float64(i+1)))
		}
	}
	return row, off
}

// sampled returns by which part of the turns that it takes a backend is off its share at most, for a Service that takes
// so many turns, every stride-th, wherever it begins.
func sampled(table []uint16, shares []float64, taken, stride int) (off float64) {
	for first := range stride {
		counts := make([]float64, len(shares))
		for i := range taken {
			counts[table[(first+i*stride)%len(table)]]++
		}
		for b, share := range shares {
			off = max(off, math.Abs(counts[b]/float64(taken)-share))
		}
	}
	return off
}

// All Services of a node whose tables have the same size take turns from one counter. A Service that has it for itself
// gets each backend once in n turns. One whose connections alternate with those of others gets every second turn, or
// every third: its backends have their shares all the same, in 60 turns to within what a choice at random would miss in
// one of thousands, and exactly those of the table when it has had as many as that has slots.
func TestTurnsOfAlternatingServices(t *testing.T) {
	for _, weights := range [][]uint8{{1, 1}, {1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}, {2, 1}, {3, 1}, {5, 3, 2}} {
		n, total, equal := len(weights), 0, slices.Max(weights) == 1
		for _, w := range weights {
			total += int(w)
		}
		shares := make([]float64, n)
		for i, w := range weights {
			shares[i] = float64(w) / float64(total)
		}
		size := SlotSize(total)
		worst := map[int]float64{}
		for service := range uint64(50) {
			table := NewTurns(n, weights).Fill(size, Mix(service))
			if equal && !slices.Equal(table, NewTurns[uint8](n, nil).Fill(size, Mix(service))) {
				t.Errorf("%d: equal weights make another table than none", weights)
			}
			row, off := alone(table, shares)
			if equal && (row > 2 || off >= 1) || !equal && off >= 2 {
				t.Errorf("%d: alone, a backend has %d turns in a row, and is off by %.2f", weights, row, off)
			}
			for block := range slices.Chunk(table[:int(size)/n*n], n) {
				if slices.Sort(block); equal && len(slices.Compact(block)) != n {
					t.Fatalf("%d: a block without a backend", weights)
				}
			}
			table = NewTurns(n, weights).Fill(size, Mix(service))
			for stride := 2; stride <= 16; stride++ {
				worst[stride] = max(worst[stride], sampled(table, shares, 60, stride))
				if off := sampled(table, shares, int(size), stride); off > 1/float64(size)*2 {
					t.Errorf("%d: every %d. turn, in %d: off by %.4f", weights, stride, size, off)
				}
			}
		}
		for stride, off := range worst {
			if off > 0.3 || equal && stride == n && off > 0.04 {
				t.Errorf("%d: every %d. of 60 turns: off by %.2f of them", weights, stride, off)
			}
		}
		t.Logf("%d: off by %.2f at stride 2, %.2f at stride 3, %.2f at most", weights, worst[2], worst[3],
			slices.Max(slices.Collect(maps.Values(worst))))
	}
}
