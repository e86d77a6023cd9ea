package nftables

import (
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/proxy/plan"
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
		turns, counts := newTurns(len(weights), weights), make([]int, len(weights))
		longest, waited := 0, 0
		for range 4 * total {
			counts[turns.next()]++
			if waited++; turns.last == heaviest {
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

// Tables follow weights, those of Maglev too; weights that are all the same change no table.
func TestSlotsFollowWeights(t *testing.T) {
	for _, s := range []plan.Scheduler{plan.WeightedRoundRobin, plan.SourceHash, plan.DestinationHash, plan.Maglev} {
		for _, weights := range [][]uint8{{3, 1}, {5, 3, 2}, {100, 1, 1}, slices.Repeat([]uint8{100, 1}, 100)} {
			g := group{backends: targets(len(weights)), weights: weights, scheduler: s}
			size := slotClass(g.shares())
			counts := make([]int, len(weights))
			for _, i := range slots(s, g.backends, weights, size) {
				counts[i]++
			}
			for i, got := range counts {
				want := float64(size) * float64(weights[i]) / float64(g.shares())
				if off := float64(got) - want; off > 1+want*0.05 || off < -1-want*0.05 {
					t.Errorf("%s, %d weights: %d of %d slots for backend %d, want %.1f", s, len(weights), got, size, i, want)
				}
			}
		}
		equal := slots(s, targets(5), slices.Repeat([]uint8{1}, 5), 127)
		if !slices.Equal(equal, slots(s, targets(5), nil, 127)) {
			t.Errorf("%s: equal weights make another table than none", s)
		}
	}
}
