package chaos

import (
	"testing"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// Whatever a story may draw can be done. TestStories shows that these stories hold every kind.
func TestEachKindHasAWay(t *testing.T) {
	for seed := range uint64(200) {
		for _, r := range story.Generate(seed, Cast(), 10).Rounds {
			for _, e := range r.Events {
				if ways[e.Kind] == nil {
					t.Fatalf("there is no way to do %s of seed %d", e, seed)
				}
			}
		}
	}
	if err := (&runner{}).do(t.Context(), deed{Event: story.Event{Kind: "another"}}); err == nil {
		t.Error("an event of a kind that is none was done")
	}
}
