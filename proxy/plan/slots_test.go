package plan

import (
	"math/rand/v2"
	"testing"
)

// The algorithm with tables as large as others have them. The figures are those of docs/design/direct.md: of the slots of
// backends that stay, few change.
func TestMaglevDisruptionByTheSizeOfTheTable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		who      string
		backends int
		size     uint32
		gone     int
		most     float64
	}{
		{"Cilium", 10, 16381, 1, 0.05}, {"Cilium", 100, 16381, 1, 0.05}, {"Cilium", 160, 16381, 1, 0.05},
		{"Maglev", 1000, 65537, 1, 0.02}, {"Maglev", 1000, 65537, 10, 0.04}, {"Maglev", 1000, 655373, 10, 0.02},
	} {
		kept, changed := 0, 0
		for seed := range uint64(4) {
			random := rand.New(rand.NewPCG(seed, uint64(c.backends)))
			hashes := make([]uint64, c.backends)
			for i := range hashes {
				hashes[i] = random.Uint64()
			}
			left := c.backends - c.gone // the last ones go, so that the others keep their indexes
			before, after := Slots(Maglev, hashes, nil, c.size), Slots(Maglev, hashes[:left], nil, c.size)
			for slot, backend := range before {
				if int(backend) >= left {
					continue
				}
				if kept++; after[slot] != backend {
					changed++
				}
			}
		}
		part := float64(changed) / float64(kept)
		t.Logf("%s: of %d backends in %d slots %d go: %.2f %% of the slots of the others change", c.who, c.backends, c.size,
			c.gone, 100*part)
		if part > c.most {
			t.Errorf("%s: %.2f %% of the slots of the others change", c.who, 100*part)
		}
	}
}
