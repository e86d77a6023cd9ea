package charts

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the chart's README.md anew")

const readmeHead = `# The Landfall chart

Landfall assigns external addresses to Services of type LoadBalancer, announces them over ARP, NDP or BGP, and programs
the kernel of every node to forward them.

[Install Landfall](../../docs/guide/install.md) has the commands, and [examples](../examples) has values for common
clusters. This page lists all values. It is made from the comments in values.yaml by ` + "`make generate`" + `.
`

// TestReadmeListsAllValues compares the chart's README with what values.yaml makes of it.
func TestReadmeListsAllValues(t *testing.T) {
	const file = "landfall/README.md"
	text, err := os.ReadFile("landfall/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	sections, err := valuesOf(string(text))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString(readmeHead)
	for _, s := range sections {
		fmt.Fprintf(&b, "\n## %s\n\n", s.name)
		if s.text != "" {
			fmt.Fprintf(&b, "%s\n\n", s.text)
		}
		b.WriteString("| value | default | description |\n| --- | --- | --- |\n")
		for _, v := range s.values {
			if v.text == "" {
				t.Errorf("values.yaml: %s has no comment that begins with --", v.path)
			}
			fmt.Fprintf(&b, "| `%s` | `%s` | %s |\n", v.path, v.value, strings.ReplaceAll(v.text, "|", `\|`))
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(have), b.String()); diff != "" {
		t.Errorf("%s is stale; run make generate (-have +want):\n%s", file, diff)
	}
}

// section is what values.yaml has on its first level: an object, or the values between objects.
type section struct {
	name, text string
	values     []value
}

type value struct{ path, value, text string }

var keyLine = regexp.MustCompile(`^( *)(\w+):(.*)$`)

// valuesOf reads the values with their comments. A key with a comment that begins with -- is a
// value, and so is one with something on its line; other keys are objects of values.
func valuesOf(text string) ([]section, error) {
	var values map[string]any
	if err := yaml.Unmarshal([]byte(text), &values); err != nil {
		return nil, err
	}
	sections := []section{{name: "General"}}
	var path []string
	var comment []string
	within := -1 // the depth of the value whose lines follow
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		content := strings.TrimSpace(line)
		depth := (len(line) - len(strings.TrimLeft(line, " "))) / 2
		switch m := keyLine.FindStringSubmatch(line); {
		case content == "":
			comment = nil
		case within >= 0 && depth > within:
		case strings.HasPrefix(content, "#"):
			within = -1
			comment = append(comment, strings.TrimPrefix(strings.TrimPrefix(content, "#"), " "))
		case m != nil:
			within = -1
			path = append(path[:depth:depth], m[2])
			said, documented := strings.CutPrefix(strings.Join(comment, " "), "-- ")
			comment = nil
			if !documented && m[3] == "" {
				if depth == 0 {
					sections = append(sections, section{name: m[2], text: said})
				}
				continue
			}
			within = depth
			if !documented {
				said = ""
			}
			at := &sections[0]
			if depth > 0 {
				at = &sections[len(sections)-1]
			}
			shown, err := json.Marshal(lookup(values, path))
			if err != nil {
				return nil, err
			}
			at.values = append(at.values, value{strings.Join(path, "."), string(shown), said})
		}
	}
	return sections, nil
}

func lookup(values map[string]any, path []string) any {
	var at any = values
	for _, key := range path {
		object, _ := at.(map[string]any)
		at = object[key]
	}
	return at
}
