package e2e

import (
	"os"
	"testing"

	"github.com/landfall-lb/landfall/e2e/chaos"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestChaos breaks a lab in the ways that one seed draws, about three minutes long, and judges what is seen by the
// contract. "make chaos SEED=n" runs others: docs/chaos.md.
func TestChaos(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("the lab makes network namespaces: needs root")
	}
	const seed, rounds = 1, 7
	told := story.Generate(seed, chaos.Cast(), rounds)
	result, err := chaos.Run(t.Context(), chaos.Options{Story: told, Lab: lab.Options{}})
	if len(result.Told.Rounds) > 0 {
		t.Log(chaos.Report(result))
	}
	if err != nil {
		t.Fatal(err)
	}
	if ran := len(result.Told.Rounds); ran != rounds || result.Samples == 0 || result.Flows == 0 {
		t.Errorf("%d of %d rounds, %d requests, %d connections", ran, rounds, result.Samples, result.Flows)
	}
	if len(result.Violations) > 0 {
		t.Errorf("%d violations; again: make chaos SEED=%d MINUTES=3", len(result.Violations), seed)
	}
}
