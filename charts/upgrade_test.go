package charts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// firstValues are the values.yaml of the first version of the chart.
const firstValues = "testdata/values-first.yaml"

// TestReusedValues renders with the values of the first version alone, as helm upgrade
// --reuse-values does: what they lack is as it is by default.
func TestReusedValues(t *testing.T) {
	t.Parallel()
	old := filepath.Join(t.TempDir(), "landfall")
	if err := os.CopyFS(old, os.DirFS("landfall")); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(firstValues)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(old, "values.yaml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, set := range [][]string{
		nil,
		{"podMonitor.enabled=true", "metrics.secure=false"},
		{"serviceMonitor.enabled=true", "prometheusRule.enabled=true", "dashboards.enabled=true"},
		{"networkPolicy.enabled=true", "node.separatePods=true", "speaker.ignoreExcludeLB=true"},
		{"probes.startup.failureThreshold=7", `controller.serviceAccount.name="boss"`},
		{"speaker.enabled=false", "proxy.setIPForward=true"},
	} {
		args := []string{"--namespace", "landfall-system", "--kube-version", kubeVersion, "--set-json", clusterCIDR,
			"--set-json", `speaker.gossip.existingSecret="key"`}
		for _, s := range set {
			args = append(args, "--set-json", s)
		}
		reused, err := run(t, append([]string{"template", "landfall", old}, args...)...)
		if err != nil {
			t.Errorf("%v: %v", set, err)
			continue
		}
		fresh, err := run(t, append([]string{"template", "landfall", "landfall", "--values", firstValues}, args...)...)
		if err != nil {
			t.Fatalf("%v: %v", set, err)
		}
		if diff := cmp.Diff(decode(t, fresh), decode(t, reused)); diff != "" {
			t.Errorf("%v: with the values of the first version alone (-want +got):\n%s", set, diff)
		}
	}
}

// TestDefaultsOfNewValues has in files/defaults.yaml all that values.yaml has beyond the first
// version, and has each template add it.
func TestDefaultsOfNewValues(t *testing.T) {
	t.Parallel()
	read := func(file string) (values map[string]any) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(text, &values); err != nil {
			t.Fatal(err)
		}
		return values
	}
	want := beyond(read("landfall/values.yaml"), read(firstValues))
	if diff := cmp.Diff(want, read("landfall/files/defaults.yaml")); diff != "" {
		t.Errorf("files/defaults.yaml (-want +got):\n%s", diff)
	}
	files, err := filepath.Glob("landfall/templates/*")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Ext(file) != ".tpl" && !strings.HasPrefix(string(text), `{{- include "landfall.defaults" . -}}`) {
			t.Errorf("%s does not begin with the defaults", file)
		}
	}
}

// beyond returns the values that others lack.
func beyond(values, others map[string]any) map[string]any {
	all := map[string]any{}
	for key, value := range values {
		other, has := others[key]
		inner, isMap := value.(map[string]any)
		if !has {
			all[key] = value
		} else if otherMap, ok := other.(map[string]any); ok && isMap {
			if more := beyond(inner, otherMap); len(more) > 0 {
				all[key] = more
			}
		}
	}
	return all
}
