package plan

import (
	"fmt"
	"slices"
	"testing"
)

func TestRing(t *testing.T) {
	for n := range 40 {
		var nodes []string
		for i := range n + 1 {
			nodes = append(nodes, fmt.Sprintf("node-%d", i))
		}
		for _, k := range []int{0, 1, 2, 3} {
			for _, node := range nodes {
				neighbors := Ring(node, nodes, k)
				if want := min(2*k, n); len(neighbors) != want {
					t.Fatalf("%s of %d has neighbors %v, want %d", node, n+1, neighbors, want)
				}
				for _, other := range neighbors {
					if other == node || !slices.Contains(Ring(other, nodes, k), node) {
						t.Fatalf("%s is a neighbor of %s, and not the other way round", other, node)
					}
				}
			}
		}
	}
	if got := Ring("stranger", []string{"a", "b"}, 2); got != nil {
		t.Errorf("a node that is not on the ring has neighbors %v", got)
	}
}

// A node that goes changes the neighbors only of those around it.
func TestRingIsStable(t *testing.T) {
	var nodes []string
	for i := range 50 {
		nodes = append(nodes, fmt.Sprintf("node-%d", i))
	}
	changed := 0
	for _, node := range nodes[1:] {
		if !slices.Equal(Ring(node, nodes, 2), Ring(node, nodes[1:], 2)) {
			changed++
		}
	}
	if changed != 4 {
		t.Errorf("%d nodes have other neighbors, want 4", changed)
	}
}
