package e2e

import (
	"os"
	"testing"

	"github.com/landfall-lb/landfall/e2e/chaos"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// What TestChaos runs.
const chaosSeed, chaosRounds = 5529, 7

// TestChaos breaks a lab in the ways that one seed draws, about three minutes long, and judges what is seen by the
// contract. "make chaos SEED=n" runs others: docs/chaos.md.
func TestChaos(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("the lab makes network namespaces: needs root")
	}
	told := story.Generate(chaosSeed, chaos.Cast(), chaosRounds)
	result, err := chaos.Run(t.Context(), chaos.Options{Story: told, Lab: lab.Options{}})
	if len(result.Told.Rounds) > 0 {
		t.Log(chaos.Report(result))
	}
	if err != nil {
		t.Fatal(err)
	}
	if ran := len(result.Told.Rounds); ran != chaosRounds || result.Samples == 0 || result.Flows == 0 {
		t.Errorf("%d of %d rounds, %d requests, %d connections", ran, chaosRounds, result.Samples, result.Flows)
	}
	if len(result.Violations) > 0 {
		t.Errorf("%d violations; again: make chaos SEED=%d MINUTES=3", len(result.Violations), chaosSeed)
	}
}

// That seed's rounds hold many kinds of events, and a node that goes away alone, so that others must take over: whoever
// changes what seeds draw chooses another one.
func TestChaosTellsMuch(t *testing.T) {
	kinds, alone := map[story.Kind]bool{}, 0
	for _, r := range story.Generate(chaosSeed, chaos.Cast(), chaosRounds).Rounds {
		for _, e := range r.Events {
			kinds[e.Kind] = true
		}
		if e, is := r.Alone(); is && e.Kind.TakesNode() {
			alone++
		}
	}
	if len(kinds) < 25 || alone == 0 {
		t.Errorf("%d kinds of events, %d nodes that go away alone", len(kinds), alone)
	}
}
