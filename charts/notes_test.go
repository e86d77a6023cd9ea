package charts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The notes after an installation have a command that finds Landfall in its namespace.
func TestNotesNameTheNamespace(t *testing.T) {
	t.Parallel()
	chart := filepath.Join(t.TempDir(), "landfall")
	if err := os.CopyFS(chart, os.DirFS("landfall")); err != nil {
		t.Fatal(err)
	}
	// helm template shows no notes, but it shows what has them in it.
	const shown = `notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}`
	if err := os.WriteFile(filepath.Join(chart, "templates", "shown.yaml"), []byte(shown), 0o600); err != nil {
		t.Fatal(err)
	}
	for namespace, want := range map[string]string{"landfall-system": `\n  landfallctl status\n`,
		"kube-system": `\n  landfallctl status --landfall-namespace kube-system\n`} {
		notes, err := run(t, "template", "landfall", chart, "--namespace", namespace, "--kube-version", kubeVersion,
			"--set-json", clusterCIDR, "--show-only", "templates/shown.yaml")
		if err != nil || !strings.Contains(notes, want) {
			t.Errorf("%v: %q is not in %s", err, want, notes)
		}
	}
}
