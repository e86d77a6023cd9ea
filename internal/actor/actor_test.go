package actor

import (
	"maps"
	"testing"
)

// TestInbox checks that nothing is taken before Begin, and that the newest word on a key is what is
// taken.
func TestInbox(t *testing.T) {
	var box Inbox[string, int]
	box.Update(map[string]int{"early": 1, "both": 1})
	if _, ok := box.Take(); ok {
		t.Error("something was taken before Begin")
	}
	box.Begin(map[string]int{"both": 2, "first": 2})
	changes := map[string]int{"first": 3}
	box.Update(changes)
	changes["first"] = 4 // the caller may go on with its map
	for _, want := range []map[string]int{{"early": 1, "both": 2, "first": 3}, {}} {
		if got, ok := box.Take(); !ok || !maps.Equal(got, want) {
			t.Errorf("took %v, %v, want %v", got, ok, want)
		}
	}
	changes = map[string]int{"again": 1}
	box.Update(changes)
	changes["again"] = 2
	if got, _ := box.Take(); got["again"] != 1 {
		t.Errorf("took %v, want what was there at Update", got)
	}
}
