package migrate

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// TestEveryFieldOfMetalLB converts an object with one field at a time: it is taken over, becomes another
// field, or the plan and the guide name it. The end-to-end tests compare the list with MetalLB's own
// definitions.
func TestEveryFieldOfMetalLB(t *testing.T) {
	text, err := os.ReadFile("testdata/metallb-fields.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var listed map[string]map[string]struct {
		Value   any    `json:"value"`
		Becomes string `json:"becomes"`
	}
	if err := yaml.UnmarshalStrict(text, &listed); err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile("../../docs/guide/migrate-metallb.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range slices.Sorted(maps.Keys(listed)) {
		for _, name := range slices.Sorted(maps.Keys(listed[kind])) {
			field := listed[kind][name]
			c := Convert([]Object{{APIVersion: "metallb.io/v1beta1", Kind: kind, Metadata: Metadata{Name: "x"},
				Spec: map[string]any{name: field.Value}}})
			want, named := map[string]any{}, []string(nil)
			switch field.Becomes {
			case "":
				want[name] = field.Value
			case "left out":
			case "noted":
				named = c.Notes
			case "lost":
				named = c.Losses
			default:
				if err := yaml.UnmarshalStrict([]byte(field.Becomes), &want); err != nil {
					t.Fatal(err)
				}
			}
			got := map[string]any{}
			for _, o := range c.Objects {
				got = o.Spec
			}
			if diff := cmp.Diff(want, normal(got)); diff != "" {
				t.Errorf("%s.%s (-want +got):\n%s", kind, name, diff)
			}
			saysIt := func(note string) bool {
				return strings.Contains(note, name) || strings.Contains(strings.ToLower(note), name)
			}
			if (field.Becomes == "lost" || field.Becomes == "noted") && !slices.ContainsFunc(named, saysIt) {
				t.Errorf("%s.%s is %s, and the plan says %q", kind, name, field.Becomes, named)
			}
			if field.Becomes != "" && !strings.Contains(string(guide), "`"+name+"`") {
				t.Errorf("%s.%s becomes something else, and the guide does not say so", kind, name)
			}
		}
	}
}

// TestPlanNamesConfigurationsOfFRR: frr-k8s stops with MetalLB, and other programs may have configured it too.
func TestPlanNamesConfigurationsOfFRR(t *testing.T) {
	const own = `{apiVersion: frrk8s.metallb.io/v1beta1, kind: FRRConfiguration, metadata: {name: metallb-n1, namespace: m},
		spec: {nodeSelector: {matchLabels: {kubernetes.io/hostname: n1}}, bgp: {routers: [{asn: 64512, neighbors: [{address: 192.0.2.1}]}]}}}`
	const other = `{apiVersion: frrk8s.metallb.io/v1beta1, kind: FRRConfiguration, metadata: {name: extra, namespace: m},
		spec: {bgp: {routers: [{asn: 64512, prefixes: [10.1.0.0/16], neighbors: [{address: 192.0.2.7, password: hunter2,
		toReceive: {allowed: {mode: all}}}]}]}, raw: {rawConfig: "router bgp 64512\n neighbor 192.0.2.7 password hunter2"}}}`
	for name, test := range map[string]struct {
		object string
		want   []string // nil if it is not named
	}{
		"MetalLB's own": {own, nil},
		"another": {other, []string{"FRRConfiguration m/extra is not taken over", "a session with 192.0.2.7, whose routes",
			"the prefixes [10.1.0.0/16]", "raw configuration of FRR:", "router bgp 64512"}},
		"with the name of one of MetalLB's": {strings.Replace(other, "extra", "metallb-n1", 1), []string{"m/metallb-n1 is not"}},
		"nothing":                           {`{kind: FRRConfiguration, metadata: {name: empty, namespace: m}}`, []string{"nothing that is announced"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := Convert([]Object{decodeOne(t, test.object)})
			if len(c.Losses) > 0 != (test.want != nil) {
				t.Fatalf("losses: %q", c.Losses)
			}
			for _, want := range test.want {
				if !strings.Contains(c.Losses[0], want) {
					t.Errorf("%q is not in %q", want, c.Losses[0])
				}
			}
			if strings.Contains(strings.Join(c.Notes, ""), "hunter2") {
				t.Errorf("a password is in %q", c.Notes)
			}
		})
	}
}
