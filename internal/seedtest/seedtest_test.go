package seedtest

import (
	"slices"
	"testing"
)

func TestSeeds(t *testing.T) {
	s := Stories{Usual: 3, Long: 5, Failed: []uint64{700, 1}}
	for _, test := range []struct {
		long, seed string
		want       []uint64
	}{
		{"", "", []uint64{700, 1, 0, 2}},
		{"1", "", []uint64{700, 1, 0, 2, 3, 4}},
		{"", "42", []uint64{42, 43, 44}},
		{"1", "42", []uint64{42, 43, 44, 45, 46}},
	} {
		t.Setenv("LANDFALL_LONG", test.long)
		t.Setenv("LANDFALL_SEED", test.seed)
		if got := s.seeds(t); !slices.Equal(got, test.want) {
			t.Errorf("LANDFALL_LONG=%q LANDFALL_SEED=%q: seeds %v, want %v", test.long, test.seed, got, test.want)
		}
	}
}
