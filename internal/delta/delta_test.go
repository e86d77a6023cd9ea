package delta

import (
	"testing"

	"github.com/google/go-cmp/cmp"
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
	if got.Empty() {
		t.Error("a difference counts as empty")
	}
	if !Diff(have, have, func(a, b int) bool { return a == b }).Empty() {
		t.Error("a map differs from itself")
	}
}
