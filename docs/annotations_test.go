package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// key is the name of an annotation, a label, a finalizer or a condition: a prefix and a name.
var key = regexp.MustCompile(`^(landfall\.dev|metallb\.io|metallb\.universe\.tf|service\.kubernetes\.io|` +
	`node\.kubernetes\.io)/([A-Za-z][A-Za-z-]*)$`)

// TestAnnotations checks that the page lists each key that the programs have a constant for, and no
// other.
func TestAnnotations(t *testing.T) {
	const page = "docs/reference/annotations.md"
	text, err := fs.ReadFile(repository, page)
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string]bool{}
	walk(t, func(file, source string) {
		root, _, _ := strings.Cut(file, "/")
		product := root == "controller" || root == "speaker" || root == "proxy" || root == "internal" || root == "ctl"
		if !product || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, source, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for _, value := range spec.Values {
				literal, ok := value.(*ast.BasicLit)
				if !ok {
					continue
				}
				if name, err := strconv.Unquote(literal.Value); err == nil && key.MatchString(name) {
					declared[name] = true
				}
			}
			return true
		})
	})
	declared["node.kubernetes.io/out-of-service"] = true // corev1.TaintNodeOutOfService
	if len(declared) < 15 {
		t.Errorf("found %d keys: the test does not see them", len(declared))
	}
	for name := range declared {
		if !strings.Contains(string(text), "`"+name+"`") {
			t.Errorf("%s does not list %s", page, name)
		}
	}
	for _, span := range codeSpan.FindAllString(string(text), -1) {
		if name := strings.Trim(span, "`"); key.MatchString(name) && !declared[name] {
			t.Errorf("%s lists %s, which no program has", page, name)
		}
	}
}
