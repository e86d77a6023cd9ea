package charts

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
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
	want := beyond(readValues(t, "landfall/values.yaml"), readValues(t, firstValues))
	if diff := cmp.Diff(want, readValues(t, "landfall/files/defaults.yaml")); diff != "" {
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

// asGiven are maps within which null takes out a part, as the templates have it too.
var asGiven = []string{"probes", "resources", "labels", "tlsConfig"}

// TestEachNewValueMayLack renders without each of the values that came after the first version: it is as it
// is by default.
func TestEachNewValueMayLack(t *testing.T) {
	t.Parallel()
	chart := filepath.Join(t.TempDir(), "landfall")
	if err := os.CopyFS(chart, os.DirFS("landfall")); err != nil {
		t.Fatal(err)
	}
	render := func(values map[string]any, monitor string) rendered {
		text, err := yaml.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(chart, "values.yaml"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		args := []string{"template", "landfall", chart, "--namespace", "landfall-system", "--kube-version", kubeVersion}
		for _, set := range []string{clusterCIDR, `speaker.gossip.existingSecret="key"`, monitor + ".enabled=true",
			"relay.enabled=true", "controller.dashboard.enabled=true", "prometheusRule.enabled=true",
			"dashboards.enabled=true", "networkPolicy.enabled=true", `tracing.endpoint="http://collector:4318"`} {
			args = append(args, "--set-json", set)
		}
		out, err := run(t, args...)
		if err != nil {
			return rendered{"error": json.RawMessage(err.Error())}
		}
		return decode(t, out)
	}
	first := readValues(t, firstValues)
	for _, monitor := range []string{"podMonitor", "serviceMonitor"} {
		all := readValues(t, "landfall/values.yaml")
		want := render(all, monitor)
		if monitor == "podMonitor" { // the other has shown the rest
			maps.DeleteFunc(all, func(section string, _ any) bool { return section != monitor })
		}
		turns := without(all, first, 0)
		if len(turns) == 0 {
			t.Error("there is nothing to leave out")
		}
		for turn, paths := range turns {
			lacking := readValues(t, "landfall/values.yaml")
			for _, path := range paths {
				section := lacking
				for _, name := range path[:len(path)-1] {
					section = section[name].(map[string]any)
				}
				delete(section, path[len(path)-1])
			}
			if diff := cmp.Diff(want, render(lacking, monitor)); diff != "" {
				t.Errorf("%v, without %v (-want +got):\n%s", turn, paths, diff)
			}
		}
	}
}

// turn is when a value is left out: alone of its section, together with one of each other section of the
// same depth.
type turn struct{ depth, index int }

// without returns the paths of the values that others lack, by the turn in which they are left out.
func without(values, others map[string]any, depth int) map[turn][][]string {
	turns := map[turn][][]string{}
	index := 0
	for _, key := range slices.Sorted(maps.Keys(values)) {
		other, had := others[key]
		if !had {
			turns[turn{depth, index}] = append(turns[turn{depth, index}], []string{key})
			index++
		}
		inner, isMap := values[key].(map[string]any)
		if !isMap || slices.Contains(asGiven, key) {
			continue
		}
		older, _ := other.(map[string]any)
		for at, paths := range without(inner, older, depth+1) {
			for _, path := range paths {
				turns[at] = append(turns[at], append([]string{key}, path...))
			}
		}
	}
	return turns
}

// TestNullTakesOut has null take parts out of what Kubernetes defines, and give the default elsewhere.
func TestNullTakesOut(t *testing.T) {
	t.Parallel()
	objects := render(t, "relay.enabled=true", "relay.resources.limits=null", "relay.tries=null",
		"dashboards.enabled=true", "dashboards.labels.grafana_dashboard=null", "serviceMonitor.enabled=true",
		"serviceMonitor.tlsConfig.insecureSkipVerify=null")
	containers := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec.Containers
	relay := containers[slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == "relay" })]
	if len(relay.Resources.Limits) > 0 || len(relay.Resources.Requests) == 0 || !slices.Contains(relay.Args, "--tries=3") {
		t.Errorf("the relay has %v and %v", relay.Resources, relay.Args)
	}
	for name, object := range objects {
		for _, gone := range []string{"grafana_dashboard", "insecureSkipVerify"} {
			if strings.Contains(string(object), `"`+gone+`":`) {
				t.Errorf("%s has %s", name, gone)
			}
		}
	}
}

func readValues(t *testing.T, file string) (values map[string]any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	return values
}
