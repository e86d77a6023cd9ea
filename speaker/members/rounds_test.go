package members

import (
	"testing"
	"time"
)

// Of the rounds of a small cluster one in four passes on claims, and asks for each node; others if
// something is urgent, too much waits or the cluster is large.
func TestRoundsPassOnClaims(t *testing.T) {
	const interval = 50 * time.Millisecond
	ask := func(r *rounds, at time.Time, members, waiting int) (passed int) {
		for i := range 3 { // nodes of one round
			if r.passes(at.Add(time.Duration(i)*time.Millisecond), members, waiting) {
				passed++
			}
		}
		return passed
	}
	for _, c := range []struct {
		what             string
		members, waiting int
		urgent           int // before this round; -1 for none
		want             []int
	}{
		{"small", 3, 5, -1, []int{3, 0, 0, 0, 3, 0, 0, 0, 3}},
		{"as large as changes are told directly", directMembers, 5, -1, []int{3, 0, 0, 0, 3}},
		{"large", directMembers + 1, 5, -1, []int{3, 3, 3, 3}},
		{"much waits", 3, crowd + 1, -1, []int{3, 3, 3, 3}},
		{"urgent", 3, 5, 2, []int{3, 0, 3, 0, 0, 0, 3}},
	} {
		r := rounds{interval: interval}
		at := time.Now()
		for i, want := range c.want {
			if i == c.urgent {
				r.urgent()
			}
			if got := ask(&r, at.Add(time.Duration(i)*interval), c.members, c.waiting); got != want {
				t.Errorf("%s: round %d passes claims to %d nodes, want %d", c.what, i, got, want)
			}
		}
	}
}
