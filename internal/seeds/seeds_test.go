package seeds

import (
	"slices"
	"testing"
)

func TestSeedsThatOnceFailedRunFirstAndOnce(t *testing.T) {
	if got, want := list(5, 3, []uint64{9, 6}), []uint64{9, 6, 5, 7}; !slices.Equal(got, want) {
		t.Errorf("seeds %v, want %v", got, want)
	}
}

// TestRun checks how many stories a run of each kind tells, and that they can begin at any seed.
func TestRun(t *testing.T) {
	for _, test := range []struct {
		long, seed string
		n          int
		from       uint64 // not checked if 0
	}{{"", "", 2, 0}, {"1", "", 3, 0}, {"", "77", 2, 77}, {"1", "77", 3, 77}} {
		t.Setenv(variableLong, test.long)
		t.Setenv(variableSeed, test.seed)
		var told []uint64
		Run(t, Of(2, 3), nil, func(_ *testing.T, seed uint64) { told = append(told, seed) })
		if len(told) != test.n || test.from != 0 && told[0] != test.from {
			t.Errorf("%+v: told %v", test, told)
		}
	}
}
