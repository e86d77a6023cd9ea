package explain

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/reference"
)

// TestEveryReasonIsExplained reads the constants of the type lb.Reason from the source.
func TestEveryReasonIsExplained(t *testing.T) {
	declared := declaredReasons(t, os.DirFS("../.."))
	if len(declared) < 80 {
		t.Fatalf("found %d reasons: the test does not see them", len(declared))
	}
	for reason, at := range declared {
		entry, ok := Reasons[lb.Reason(reason)]
		if !ok {
			t.Errorf("%s: reason %s has no entry in reasons.go", at, reason)
		} else if !strings.HasSuffix(entry.Meaning, ".") {
			t.Errorf("reason %s: %q is not a sentence", reason, entry.Meaning)
		}
	}
	for reason := range Reasons {
		if declared[string(reason)] == "" {
			t.Errorf("reasons.go explains %s, which no program has", reason)
		}
	}
}

// TestReference compares docs/reference/reasons.md with the reasons.
func TestReference(t *testing.T) {
	var rows [][]string
	for _, reason := range slices.Sorted(maps.Keys(Reasons)) {
		entry := Reasons[reason]
		rows = append(rows, []string{reference.Code(string(reason)), reference.Prose(entry.Meaning), cure(entry.Cure)})
	}
	reference.Page(t, "reasons", reasonsIntroduction+reference.Table([]string{"reason", "meaning", "what to do"}, rows))
}

const reasonsIntroduction = `# Reasons and Events

` + "```" + `
landfallctl explain reason NoLocalBackends
` + "```" + `

A reason is one word that says why something is refused, left out or not announced. The same word is in the conditions
of Services, pools and advertisements, in the status of BGPPeers, in Events, metrics and logs, and in what landfallctl
prints.

| Events on | come from | show |
| --- | --- | --- |
| Services | controller, speaker, proxy | which address was assigned and announced, or why not; which setting a proxy cannot follow |
| IPAddressPools | controller | why a pool assigns nothing, and when it does again |
| BGPPeers | speaker | that a session is up, or why not |
| Nodes | speaker, proxy | [findings](../guide/install.md#what-the-programs-find): what keeps traffic from the node |

` + "```" + `
kubectl get events -A --field-selector type=Warning
` + "```" + `

## All reasons

`

// cure returns what to do in Markdown: a command up to its comment, or prose.
func cure(text string) string {
	command, comment, _ := strings.Cut(text, "   # ")
	if !strings.HasPrefix(command, "kubectl ") && !strings.HasPrefix(command, "landfallctl ") &&
		!strings.HasPrefix(command, "sysctl ") && !strings.HasPrefix(command, "iptables ") {
		return reference.Prose(text)
	}
	if comment != "" {
		comment = ": " + reference.Prose(comment)
	}
	return reference.Code(command) + comment
}

// declaredReasons returns the reasons that the product's source declares, and where.
func declaredReasons(t *testing.T, root fs.FS) map[string]string {
	t.Helper()
	found := map[string]string{}
	files := token.NewFileSet()
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		top, _, _ := strings.Cut(path, "/")
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || top == "e2e" || top == "bin" || top == "dist"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		source, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		parsed, err := parser.ParseFile(files, path, source, 0)
		if err != nil {
			return err
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || !isReason(spec.Type, filepath.Dir(path)) {
				return true
			}
			for _, value := range spec.Values {
				if literal, ok := value.(*ast.BasicLit); ok {
					word, _ := strconv.Unquote(literal.Value)
					found[word] = files.Position(literal.Pos()).String()
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// isReason reports whether a type is lb.Reason.
func isReason(e ast.Expr, dir string) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "Reason" && dir == "internal/lb"
	case *ast.SelectorExpr:
		pkg, ok := e.X.(*ast.Ident)
		return ok && pkg.Name == "lb" && e.Sel.Name == "Reason"
	}
	return false
}

// TestCuresNameWhatIsMeant shows that each placeholder of a cure is one that is filled, or said to
// be one.
func TestCuresNameWhatIsMeant(t *testing.T) {
	known := []string{"NAME", "POOL", "NODE", "PEER", "ADDRESS", "KEY", "BGP", "ARP", "MAC", "IP", "TCP", "UDP", "BFD", "FORWARD",
		"ACCEPT", "README", "PROFILE"}
	for reason, entry := range Reasons {
		for word := range strings.FieldsFuncSeq(entry.Cure, func(r rune) bool { return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') }) {
			if len(word) > 1 && word == strings.ToUpper(word) && !slices.Contains(known, word) {
				t.Errorf("the cure of %s has %s", reason, word)
			}
		}
	}
}
