package nftables

import (
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// Tables follow weights, those of Maglev too; weights that are all the same change no table.
func TestSlotsFollowWeights(t *testing.T) {
	for _, s := range []plan.Scheduler{plan.WeightedRoundRobin, plan.SourceHash, plan.DestinationHash, plan.Maglev} {
		for _, weights := range [][]uint8{{3, 1}, {5, 3, 2}, {100, 1, 1}, slices.Repeat([]uint8{100, 1}, 100)} {
			g := group{backends: targets(len(weights)), weights: weights, scheduler: s}
			size := plan.SlotSize(g.shares())
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
