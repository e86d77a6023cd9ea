package plan

import (
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
