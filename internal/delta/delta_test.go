package delta

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestDiff(t *testing.T) {
	have := map[string]int{"same": 1, "changed": 2, "gone": 3}
	want := map[string]int{"same": 1, "changed": 5, "new": 4}
	got := Diff(have, want, func(a, b int) bool { return a == b })
	expected := Delta[string, int]{
		Add:    map[string]int{"new": 4},
		Change: map[string]int{"changed": 5},
		Remove: map[string]int{"gone": 3},
	}
	if diff := cmp.Diff(expected, got); diff != "" {
		t.Errorf("Diff (-want +got):\n%s", diff)
	}
	got = Diff(have, have, func(a, b int) bool { return a == b })
	if diff := cmp.Diff(Delta[string, int]{}, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("a map differs from itself (-want +got):\n%s", diff)
	}
}
