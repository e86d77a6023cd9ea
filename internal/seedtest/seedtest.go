// Package seedtest runs tests that make up stories from random seeds. Any seed can be run again by
// itself, and seeds that once failed are run for ever.
package seedtest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// Stories says which seeds a test runs.
type Stories struct {
	// Usual is how many seeds run by default, counted from 0.
	Usual int
	// Long is how many seeds run with LANDFALL_LONG=1.
	Long int
	// Failed are seeds that once found a defect. They always run.
	Failed []uint64
}

// Run tells the story of each seed in a subtest. LANDFALL_SEED=n runs the seeds from n on instead.
func Run(t *testing.T, s Stories, tell func(t *testing.T, r *rand.Rand)) {
	t.Helper()
	for _, seed := range s.seeds(t) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("run this story again: LANDFALL_SEED=%d go test -run '%s'", seed, t.Name())
				}
			})
			tell(t, rand.New(rand.NewPCG(seed, 1)))
		})
	}
}

// Long reports whether the long form of tests was asked for.
func Long() bool { return os.Getenv("LANDFALL_LONG") == "1" }

func (s Stories) seeds(t *testing.T) []uint64 {
	t.Helper()
	n := s.Usual
	if Long() {
		n = s.Long
	}
	seeds := slices.Clone(s.Failed)
	first := uint64(0)
	if given := os.Getenv("LANDFALL_SEED"); given != "" {
		var err error
		if first, err = strconv.ParseUint(given, 10, 64); err != nil {
			t.Fatalf("LANDFALL_SEED=%q is not a whole number", given)
		}
		seeds = nil
	}
	for seed := first; seed < first+uint64(n); seed++ {
		if !slices.Contains(seeds, seed) {
			seeds = append(seeds, seed)
		}
	}
	return seeds
}
