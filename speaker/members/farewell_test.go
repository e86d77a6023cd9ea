package members

import (
	"slices"
	"strings"
	"testing"
)

// A speaker that is stopped is not missed: it counts for no majority, and is none that has failed.
func TestContract6WhoSaysFarewellIsNotMissed(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	var log lines
	r.cluster(logTo(&log))
	a := r.members["a"]
	for _, left := range [][]string{{"a", "b"}, {"a"}} {
		leaves := []string{"b", "c"}[len(left)-1]
		r.members[leaves].stop()
		r.eventually(leaves+" has left", func() bool { return slices.Equal(a.Live(), left) })
		if seen := a.alive.Sight(); len(seen.Missing) > 0 || !seen.Majority || seen.Alone {
			t.Errorf("after %s has left: %+v", leaves, seen)
		}
	}
	// A question that is under way when a node leaves may still make it a suspect, so that word may be there.
	if text := log.text(); !strings.Contains(text, "node has left") {
		t.Errorf("the log says %s", text)
	}
}

func FuzzFarewell(f *testing.F) {
	f.Add(farewell{node: "n1", born: 300}.encode())
	f.Add([]byte{farewellVersion})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 || b[0] != farewellVersion {
			return
		}
		a, err := decodeFarewell(b)
		if err != nil {
			return
		}
		if again, err := decodeFarewell(a.encode()); err != nil || again != a {
			t.Fatalf("%+v becomes %+v, %v", a, again, err)
		}
	})
}
