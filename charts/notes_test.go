package charts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// chartWithNotes is the chart with a template that shows its notes: helm template shows none.
func chartWithNotes(t *testing.T) string {
	t.Helper()
	chart := filepath.Join(t.TempDir(), "landfall")
	if err := os.CopyFS(chart, os.DirFS("landfall")); err != nil {
		t.Fatal(err)
	}
	const shown = `notes: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}`
	if err := os.WriteFile(filepath.Join(chart, "templates", "shown.yaml"), []byte(shown), 0o600); err != nil {
		t.Fatal(err)
	}
	return chart
}

// The notes of an upgrade that takes the proxy from the pods have what removes the rules that it leaves: they come
// ahead of kube-proxy's, and follow no change.
func TestNotesRemoveTheRulesOfAProxyThatGoes(t *testing.T) {
	t.Parallel()
	node, proxy := daemonSet{"landfall-node", "landfall", "node"}, daemonSet{"landfall-proxy", "landfall", "proxy"}
	const off = "proxy.enabled=false,speaker.gate=none,image.tag=x"
	chart := chartWithNotes(t)
	for name, test := range map[string]struct {
		there []daemonSet
		args  []string
		want  bool
	}{
		"it goes":                 {[]daemonSet{node}, []string{"--is-upgrade", "--set", off}, true},
		"it stays":                {[]daemonSet{node}, []string{"--is-upgrade"}, false},
		"there was none":          {[]daemonSet{{"landfall-speaker", "landfall", "speaker"}}, []string{"--is-upgrade", "--set", off}, false},
		"a first install":         {[]daemonSet{node}, []string{"--set", off}, false},
		"of another release":      {[]daemonSet{{"other-node", "other", "node"}}, []string{"--is-upgrade", "--set", off}, false},
		"its DaemonSet goes":      {[]daemonSet{proxy}, []string{"--is-upgrade", "--set", off + ",node.separatePods=true"}, false},
		"it goes without cleanup": {[]daemonSet{proxy}, []string{"--is-upgrade", "--set", off + ",cleanup.enabled=false"}, true},
	} {
		notes, err := run(t, append([]string{"template", "landfall", chart, "--namespace", "landfall-system", "--dry-run=server",
			"--kube-version", kubeVersion, "--set-json", clusterCIDR, "--kubeconfig", serve(t, test.there...),
			"--show-only", "templates/shown.yaml"}, test.args...)...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, part := range []string{"its rules stay in the kernels", "metadata: {name: landfall-cleanup, namespace: landfall-system}",
			"image: \\\"ghcr.io/landfall-lb/landfall:x\\\"", "[landfall-proxy, cleanup, "} {
			if strings.Contains(notes, part) != test.want {
				t.Errorf("%s: %q is in the notes or not: want %v: %s", name, part, test.want, notes)
			}
		}
	}
}

// The notes after an installation have a command that finds Landfall in its namespace.
func TestNotesNameTheNamespace(t *testing.T) {
	t.Parallel()
	chart := chartWithNotes(t)
	for namespace, want := range map[string]string{"landfall-system": `\n  landfallctl status\n`,
		"kube-system": `\n  landfallctl status --landfall-namespace kube-system\n`} {
		notes, err := run(t, "template", "landfall", chart, "--namespace", namespace, "--kube-version", kubeVersion,
			"--set-json", clusterCIDR, "--show-only", "templates/shown.yaml")
		if err != nil || !strings.Contains(notes, want) {
			t.Errorf("%v: %q is not in %s", err, want, notes)
		}
	}
}
