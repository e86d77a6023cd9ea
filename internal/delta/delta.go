// Package delta compares what is there with what is wanted.
package delta

// Delta is the difference between two maps.
type Delta[K comparable, V any] struct {
	// Add holds what is wanted and not there, Change what is wanted otherwise than it is there (the
	// wanted values).
	Add, Change map[K]V
	// Remove holds what is there and not wanted (the values that are there).
	Remove map[K]V
}

// Diff returns what makes have equal to want.
func Diff[K comparable, V any](have, want map[K]V, equal func(a, b V) bool) Delta[K, V] {
	d := Delta[K, V]{Add: map[K]V{}, Change: map[K]V{}, Remove: map[K]V{}}
	for k, w := range want {
		switch h, ok := have[k]; {
		case !ok:
			d.Add[k] = w
		case !equal(h, w):
			d.Change[k] = w
		}
	}
	for k, h := range have {
		if _, ok := want[k]; !ok {
			d.Remove[k] = h
		}
	}
	return d
}
