package v1beta1

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestGeneratedFilesAreFresh runs the generator of `make generate` into other folders and compares.
func TestGeneratedFilesAreFresh(t *testing.T) {
	const crds = "../../charts/landfall/charts/crds/templates"
	generated := t.TempDir()
	cmd := exec.CommandContext(t.Context(), controllerGen(t), "object", "crd:maxDescLen=400", "paths=./api/...",
		"output:crd:dir="+filepath.Join(generated, "crds"), "output:object:dir="+filepath.Join(generated, "api"))
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("controller-gen: %v\n%s", err, out)
	}
	compare(t, filepath.Join(generated, "api"), ".", "zz_generated.*.go")
	compare(t, filepath.Join(generated, "crds"), crds, "*.yaml")
}

// controllerGen is the program in LANDFALL_CONTROLLER_GEN, or the one that the lab builds from the
// pinned module.
func controllerGen(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("LANDFALL_CONTROLLER_GEN"); path != "" {
		return path
	}
	cmd := exec.CommandContext(t.Context(), "go", "run", "./e2e/cmd/landfall-lab", "tool", "controller-gen")
	cmd.Dir = "../.."
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("no controller-gen: %v\n%s", err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// compare reports files that differ, lack or are too many.
func compare(t *testing.T, fresh, committed, pattern string) {
	t.Helper()
	want, have := read(t, fresh, pattern), read(t, committed, pattern)
	if len(want) == 0 {
		t.Errorf("nothing was generated as %s", pattern)
	}
	for name, text := range want {
		switch was, ok := have[name]; {
		case !ok:
			t.Errorf("%s lacks: run make generate", filepath.Join(committed, name))
		case was != text:
			t.Errorf("%s is stale: run make generate", filepath.Join(committed, name))
		}
	}
	for name := range have {
		if _, ok := want[name]; !ok {
			t.Errorf("%s is generated from nothing any more: remove it", filepath.Join(committed, name))
		}
	}
}

func read(t *testing.T, folder, pattern string) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(folder, pattern))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		files[filepath.Base(path)] = string(text)
	}
	return files
}
