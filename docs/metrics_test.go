package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/reference"
)

// programPages returns the reference of the programs.
func programPages(t *testing.T) string {
	t.Helper()
	var pages strings.Builder
	for _, name := range []string{"controller", "speaker", "proxy", "relay"} {
		text, err := fs.ReadFile(repository, "docs/reference/"+name+".md")
		if err != nil {
			t.Fatal(err)
		}
		pages.Write(text)
	}
	return pages.String()
}

// TestMetrics looks in the reference for the help of each metric that the sources describe, so that
// a TestReference that does not know a collector is noticed.
func TestMetrics(t *testing.T) {
	pages := programPages(t)
	found := 0
	walk(t, func(file, source string) {
		root, _, _ := strings.Cut(file, "/")
		program := root == "controller" || root == "speaker" || root == "proxy" || strings.HasPrefix(file, "internal/preflight/")
		if !program || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") ||
			!strings.Contains(source, "client_golang/prometheus") {
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, source, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			help := helpOf(n)
			if help == "" {
				return true
			}
			found++
			if !strings.Contains(pages, reference.Prose(help)) {
				t.Errorf("%s: docs/reference lacks the metric %q: its TestReference does not know the collector", file, help)
			}
			return true
		})
	})
	if found < 60 {
		t.Errorf("found %d metrics: the test does not see them", found)
	}
}

// TestMappedMetrics looks in the reference for the metrics to which tables map those of other products.
func TestMappedMetrics(t *testing.T) {
	guide, err := fs.ReadFile(repository, "docs/guide/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	pages := programPages(t)
	_, tables, _ := strings.Cut(string(guide), "## Names that you know")
	tables, _, _ = strings.Cut(tables, "\n## ")
	names := regexp.MustCompile("`(landfall_[a-z0-9_]+)").FindAllStringSubmatch(tables, -1)
	if len(names) < 25 {
		t.Errorf("found %d names: the test does not see them", len(names))
	}
	for _, name := range names {
		if !strings.Contains(pages, "`"+name[1]+"`") && !strings.Contains(pages, "`"+name[1]+"{") {
			t.Errorf("a table maps to %s, which no program has", name[1])
		}
	}
}

// helpOf returns the help of a metric that a node of the source describes, or "".
func helpOf(n ast.Node) string {
	switch n := n.(type) {
	case *ast.KeyValueExpr:
		if name, ok := n.Key.(*ast.Ident); ok && name.Name == "Help" {
			return text(n.Value)
		}
	case *ast.CallExpr:
		name := ""
		switch f := n.Fun.(type) {
		case *ast.Ident:
			name = f.Name
		case *ast.SelectorExpr:
			name = f.Sel.Name
		}
		if len(n.Args) > 1 && slices.Contains([]string{"desc", "counter", "gauge", "histogram", "NewDesc"}, name) {
			return text(n.Args[1])
		}
	}
	return ""
}

// text returns the value of a string, or of several that are joined; "" of anything else.
func text(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		value, err := strconv.Unquote(e.Value)
		if err == nil {
			return value
		}
	case *ast.BinaryExpr:
		left, right := text(e.X), text(e.Y)
		if left != "" && right != "" {
			return left + right
		}
	}
	return ""
}
