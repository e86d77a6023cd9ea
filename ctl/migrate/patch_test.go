package migrate

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// object makes up an object with few keys, so that objects meet. A key is always a map, a list or a
// number.
func object(r *rand.Rand, depth int) map[string]any {
	o := map[string]any{}
	for range r.IntN(5) {
		switch key := r.IntN(5); {
		case key == 0:
			o["number"] = float64(r.IntN(3))
		case key == 1:
			o["list"] = []any{float64(r.IntN(3))}
		case depth > 0:
			o[fmt.Sprint("map", key)] = object(r, depth-1)
		}
	}
	return o
}

// Whatever is patched, in however many steps and runs, Undo gives back what was there.
func TestUndo(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 1))
		before := map[string]any{"metadata": map[string]any{"annotations": map[string]any{"mine": "kept"}},
			"spec": object(r, 3)}
		live := normal(before).(map[string]any)
		for range 1 + r.IntN(3) {
			change := object(r, 3)
			if r.IntN(2) == 0 {
				change["number"] = nil
			}
			for range 1 + r.IntN(2) { // a run that is interrupted begins anew
				patch, err := Remember(live, map[string]any{"spec": change})
				if err != nil {
					t.Fatal(err)
				}
				if patch == nil {
					continue
				}
				live = Apply(live, normal(patch).(map[string]any))
			}
		}
		if patch, err := Remember(live, map[string]any{"spec": map[string]any{}}); patch != nil || err != nil {
			t.Fatalf("seed %d: a change that changes nothing is remembered: %v %v", seed, patch, err)
		}
		undo, err := Undo(live)
		if err != nil {
			t.Fatal(err)
		}
		if undo != nil {
			live = Apply(live, normal(undo).(map[string]any))
		}
		if diff := cmp.Diff(before, live); diff != "" {
			t.Fatalf("seed %d (-want +got):\n%s", seed, diff)
		}
	}
}

// An annotation that somebody has broken is an error, not an object without a past.
func TestUndoOfABrokenAnnotation(t *testing.T) {
	live := map[string]any{"metadata": map[string]any{"annotations": map[string]any{AnnotationUndo: "{"}}}
	if patch, err := Undo(live); err == nil {
		t.Errorf("Undo: %v", patch)
	}
	if patch, err := Remember(live, Scale(0)); err == nil {
		t.Errorf("Remember: %v", patch)
	}
}

func TestKeepOffKeepsWhatIsThere(t *testing.T) {
	var affinity any
	if err := json.Unmarshal([]byte(`{"podAntiAffinity":{},"nodeAffinity":{
		"preferredDuringSchedulingIgnoredDuringExecution":[],"requiredDuringSchedulingIgnoredDuringExecution":{
		"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]},{"matchFields":[{"key":"f"}]}]}}}`),
		&affinity); err != nil {
		t.Fatal(err)
	}
	live := map[string]any{"affinity": affinity}
	got, err := json.Marshal(Apply(live, map[string]any{"affinity": keepOff(affinity, "l", "v")}))
	if err != nil {
		t.Fatal(err)
	}
	const not = `{"key":"l","operator":"NotIn","values":["v"]}`
	want := `{"affinity":{"nodeAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":[],` +
		`"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[` +
		`{"matchExpressions":[{"key":"a","operator":"Exists"},` + not + `]},` +
		`{"matchExpressions":[` + not + `],"matchFields":[{"key":"f"}]}]}},"podAntiAffinity":{}}}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
