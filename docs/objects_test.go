package docs

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/internal/reference"
)

const (
	crds     = "charts/landfall/charts/crds/templates"
	examples = "docs/reference/examples"
)

// TestObjects compares a page for each kind with what its CRD and its examples make of it. Each
// field of a spec must have a description and be in an example.
func TestObjects(t *testing.T) {
	files, err := fs.Glob(repository, crds+"/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("CRDs: %v, %v", files, err)
	}
	for _, file := range files {
		text, err := fs.ReadFile(repository, file)
		if err != nil {
			t.Fatal(err)
		}
		var crd apiextensions.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		t.Run(crd.Spec.Names.Kind, func(t *testing.T) {
			reference.Page(t, crd.Spec.Names.Singular, objectPage(t, crd))
		})
	}
}

func objectPage(t *testing.T, crd apiextensions.CustomResourceDefinition) string {
	t.Helper()
	names := crd.Spec.Names
	schema := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	shown := readExamples(t, names.Singular)
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n%s\n\n```yaml\n%s```\n\n%s\n\n```\nkubectl get %s\nkubectl explain %s.spec\n```\n", names.Kind,
		shown[0].about, shown[0].text, reference.Prose(schema.Description), names.Plural, names.Singular)
	if short := names.ShortNames; len(short) > 0 {
		fmt.Fprintf(&b, "\n%s objects are cluster-scoped; kubectl also knows them as %s.\n", names.Kind, reference.Code(short[0]))
	}
	for _, part := range []string{"spec", "status"} {
		of, ok := schema.Properties[part]
		if !ok {
			continue
		}
		fields := fieldsOf(of, "")
		head, rows := []string{"field", "type", "meaning"}, [][]string(nil)
		if part == "spec" {
			head = []string{"field", "type", "example", "meaning"}
		}
		for _, f := range fields {
			if f.description == "" || strings.HasSuffix(f.description, "...") {
				t.Errorf("%s.%s has no whole description: %q", part, f.path, f.description)
			}
			row := []string{reference.Code(f.path), f.kind}
			if part == "spec" {
				example := exampleOf(shown, f.path)
				if example == "" {
					t.Errorf("%s/%s.yaml has no example of %s.%s", examples, names.Singular, part, f.path)
				}
				row = append(row, reference.Code(example))
			}
			rows = append(rows, append(row, f.description))
		}
		fmt.Fprintf(&b, "\n## %s\n\n%s", part, reference.Table(head, rows))
	}
	if len(shown) > 1 {
		b.WriteString("\n## More examples\n")
	}
	for _, e := range shown[1:] {
		fmt.Fprintf(&b, "\n%s\n\n```yaml\n%s```\n", e.about, e.text)
	}
	return b.String()
}

// field is a field of a schema. Items of lists have [] in their path.
type field struct{ path, kind, description string }

func fieldsOf(schema apiextensions.JSONSchemaProps, under string) (all []field) {
	for _, name := range slices.Sorted(maps.Keys(schema.Properties)) {
		of := schema.Properties[name]
		f := field{path: under + name, kind: kindOf(of), description: reference.Prose(of.Description)}
		if of.Default != nil {
			f.kind += ", default " + reference.Code(strings.Trim(string(of.Default.Raw), `"`))
		}
		all = append(all, f)
		switch {
		case of.Items != nil && known(*of.Items.Schema) == "":
			all = append(all, fieldsOf(*of.Items.Schema, under+name+"[].")...)
		case known(of) == "":
			all = append(all, fieldsOf(of, under+name+".")...)
		}
	}
	return all
}

// known names the types of Kubernetes whose fields its own documentation lists.
func known(schema apiextensions.JSONSchemaProps) string {
	has := func(names ...string) bool {
		return !slices.ContainsFunc(names, func(n string) bool { _, ok := schema.Properties[n]; return !ok })
	}
	switch {
	case has("matchLabels", "matchExpressions"):
		return "label selector"
	case has("lastTransitionTime", "reason", "message"):
		return "condition"
	}
	return ""
}

func kindOf(schema apiextensions.JSONSchemaProps) string {
	switch {
	case len(schema.Enum) > 0:
		var values []string
		for _, v := range schema.Enum {
			values = append(values, reference.Code(strings.Trim(string(v.Raw), `"`)))
		}
		return strings.Join(values, ", ")
	case known(schema) != "":
		return known(schema)
	case schema.Items != nil:
		kind := kindOf(*schema.Items.Schema)
		return "list of " + kind + "s"
	case schema.XIntOrString:
		return "integer or string"
	}
	return schema.Type
}

// example is one of the documents in a file of examples: its first comment, its text and its value.
type example struct {
	about, text string
	value       map[string]any
}

var comment = regexp.MustCompile(`(?m)\A# (.*)\n`)

func readExamples(t *testing.T, name string) (all []example) {
	t.Helper()
	text, err := fs.ReadFile(repository, path.Join(examples, name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(text), "---\n") {
		var e example
		found := comment.FindStringSubmatch(document)
		if found == nil {
			t.Fatalf("an example of %s has no comment that says what it does:\n%s", name, document)
		}
		e.about, e.text = found[1], document[len(found[0]):]
		if err := yaml.UnmarshalStrict([]byte(e.text), &e.value); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, e)
	}
	return all
}

// exampleOf returns the first value of a field of the spec in the examples, as JSON.
func exampleOf(shown []example, field string) string {
	for _, e := range shown {
		at := e.value["spec"]
		for step := range strings.SplitSeq(field, ".") {
			name, list := strings.CutSuffix(step, "[]")
			object, _ := at.(map[string]any)
			at = object[name]
			if items, ok := at.([]any); ok && list {
				at = items[0]
			}
		}
		if at == nil {
			continue
		}
		text, err := yaml.Marshal(at)
		if err != nil {
			return ""
		}
		return inline(text)
	}
	return ""
}

// inline returns YAML on one line.
func inline(text []byte) string {
	json, err := yaml.YAMLToJSON(text)
	if err != nil {
		return ""
	}
	return cmp.Or(strings.Trim(string(json), `"`), `""`)
}
