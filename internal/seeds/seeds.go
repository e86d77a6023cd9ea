// Package seeds says with which seeds a test tells its random stories: few in an ordinary run, many
// new ones in a long run, and always those that once failed.
package seeds

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
)

// The environment variables that people set.
const (
	variableLong = "LANDFALL_LONG" // 1 asks for a long run
	variableSeed = "LANDFALL_SEED" // the first seed, in place of 0, or in a long run of any
)

// long reports whether the long stories run.
func long() bool { return os.Getenv(variableLong) == "1" }

// Of returns brief in an ordinary run and thorough in a long one.
func Of[V any](brief, thorough V) V {
	if long() {
		return thorough
	}
	return brief
}

// Run runs story as a subtest for each of the seeds that once failed, and for n more that follow
// one another. A failure prints how to repeat it.
func Run(t *testing.T, n int, failed []uint64, story func(t *testing.T, seed uint64)) {
	t.Helper()
	first := Of(0, rand.Uint64N(1_000_000_000))
	if given := os.Getenv(variableSeed); given != "" {
		var err error
		if first, err = strconv.ParseUint(given, 10, 64); err != nil {
			t.Fatalf("%s=%q is not a whole number", variableSeed, given)
		}
	}
	t.Logf("seeds %d to %d, and %v that once failed", first, first+uint64(n)-1, failed)
	for _, seed := range list(first, n, failed) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("to repeat this: %s=%d %s=%s go test -run '^%s$'", variableSeed, seed, variableLong, Of("0", "1"), t.Name())
				}
			})
			story(t, seed)
		})
	}
}

// list returns the seeds of a run, those that once failed first.
func list(first uint64, n int, failed []uint64) []uint64 {
	all := slices.Clone(failed)
	for seed := first; seed < first+uint64(n); seed++ {
		if !slices.Contains(failed, seed) {
			all = append(all, seed)
		}
	}
	return all
}
