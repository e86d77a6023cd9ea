package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// What one object around BGP shows to be wrong is refused by the API server itself, in words that name the fix.
func TestBadBGPObjectsAreRefused(t *testing.T) {
	var cases []struct {
		Kind    string          `json:"kind"`
		Spec    json.RawMessage `json:"spec"`
		Refused string          `json:"refused"`
	}
	data, err := os.ReadFile("../api/v1beta1/testdata/bgp.yaml")
	if err == nil {
		err = yaml.UnmarshalStrict(data, &cases)
	}
	if err != nil {
		t.Fatal(err)
	}
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Stopped: true})
	for i, test := range cases {
		object := fmt.Sprintf("apiVersion: landfall.dev/v1beta1\nkind: %s\nmetadata: {name: case-%d}\nspec: %s\n", test.Kind, i, test.Spec)
		err := l.ApplyYAML(t.Context(), object)
		switch {
		case test.Refused == "" && err != nil:
			t.Errorf("%s %s: %v", test.Kind, test.Spec, err)
		case test.Refused != "" && (err == nil || !strings.Contains(err.Error(), test.Refused)):
			t.Errorf("%s %s: %v, want a refusal that says %q", test.Kind, test.Spec, err, test.Refused)
		}
	}
}
