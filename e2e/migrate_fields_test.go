package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestMigrationKnowsMetalLBsFields compares MetalLB's own definitions with the list of fields whose
// migration ctl/migrate tests.
func TestMigrationKnowsMetalLBsFields(t *testing.T) {
	_, definitions, err := lab.MetalLB(t.Context(), func(line string) { t.Log(line) })
	if err != nil {
		t.Skipf("MetalLB cannot be built here: %v", err)
	}
	text, err := os.ReadFile("../ctl/migrate/testdata/metallb-fields.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var listed map[string]map[string]any
	if err := yaml.Unmarshal(text, &listed); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(definitions, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	fields := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		kind := crd.Spec.Names.Kind
		if strings.HasSuffix(kind, "Status") {
			continue // MetalLB writes it
		}
		for _, version := range crd.Spec.Versions {
			for name := range version.Schema.OpenAPIV3Schema.Properties["spec"].Properties {
				if fields++; listed[kind][name] == nil {
					t.Errorf("%s.%s of %s is not listed", kind, name, version.Name)
				}
			}
		}
	}
	if fields < 40 {
		t.Errorf("found %d fields: the test does not see them", fields)
	}
}
