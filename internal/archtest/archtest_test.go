// Package archtest holds the house rules that a compiler cannot check: which package may import
// which, and what a pure package may use.
package archtest

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/landfall-lb/landfall/"

// listed is what `go list -json` says of a package.
type listed struct {
	Dir, ImportPath string
	GoFiles         []string
	Imports         []string
}

// name is the import path inside the module.
func (p listed) name() string { return strings.TrimPrefix(p.ImportPath, module) }

func packages(t *testing.T) []listed {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=Dir,ImportPath,GoFiles,Imports", "./...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []listed
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := decoder.Decode(&p); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// A rule says what the packages it is for must not import.
type rule struct {
	reason string
	// applies reports whether the rule is for the package, forbidden whether that package must not
	// import the other. Packages of this module come without the module's path.
	applies   func(pkg string) bool
	forbidden func(pkg, imported string) bool
}

var binaries = []string{"controller", "speaker", "proxy", "ctl"}

// binary returns which program's folder the package is in, or "".
func binary(pkg string) string {
	root, _, _ := strings.Cut(pkg, "/")
	if slices.Contains(binaries, root) {
		return root
	}
	return ""
}

// actors are the packages below a binary's folder that declare a method Run(context.Context) error.
var actors = map[string]bool{}

// isActor reports whether the package owns goroutines: its exported types have a Run.
func isActor(pkg string) bool { return actors[pkg] }

// testSupport are the packages that help tests: outside of test files they import testing.
var testSupport = map[string]bool{}

// findActors fills actors, and testSupport.
func findActors(t *testing.T) {
	t.Helper()
	for _, p := range packages(t) {
		testSupport[p.name()] = slices.Contains(p.Imports, "testing")
		if binary(p.name()) != "" && strings.Contains(p.name(), "/") && hasRun(t, p) {
			actors[p.name()] = true
		}
	}
}

func hasRun(t *testing.T, p listed) bool {
	t.Helper()
	for _, file := range p.GoFiles {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil && f.Name.Name == "Run" {
				return true
			}
		}
	}
	return false
}

func isPlan(pkg string) bool { return binary(pkg) != "" && strings.HasSuffix(pkg, "/plan") }

// rooms are the sub-states of the speaker's loop: like plans, but they remember something from one
// step to the next.
var rooms = []string{"speaker/handoff", "speaker/holders", "speaker/ownership", "speaker/partition", "speaker/routes"}

func isPure(pkg string) bool {
	return isPlan(pkg) || slices.Contains(rooms, pkg) || pkg == "internal/lb"
}

// below reports whether pkg is root or lies below it.
func below(pkg string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(root string) bool { return pkg == root || strings.HasPrefix(pkg, root+"/") })
}

func ours(imported string) bool {
	return below(imported, "api", "internal", "e2e") || binary(imported) != ""
}

func standard(imported string) bool {
	root, _, _ := strings.Cut(imported, "/")
	return !ours(imported) && !strings.Contains(root, ".")
}

var rules = []rule{
	{
		reason:    "whoever imports the API types must not drag in a client; api imports apimachinery only",
		applies:   func(pkg string) bool { return below(pkg, "api") },
		forbidden: func(_, imported string) bool { return !standard(imported) && !below(imported, "k8s.io/apimachinery") },
	},
	{
		reason:  "one place talks to the API server; all else sees lb values",
		applies: func(pkg string) bool { return !below(pkg, "internal/kube", "e2e") },
		forbidden: func(_, imported string) bool {
			return below(imported, "k8s.io/client-go", "k8s.io/api")
		},
	},
	{
		reason: "a decision must be testable as a value: plans, rooms and the vocabulary do no I/O and know no logger and " +
			"no " +
			"chance",
		applies: isPure,
		forbidden: func(pkg, imported string) bool {
			if standard(imported) {
				return below(imported, "os", "log", "net/http", "io", "math/rand", "syscall", "context")
			}
			ownPlan := slices.Contains(rooms, pkg) && isPlan(imported) && binary(imported) == binary(pkg)
			return !ownPlan && !below(imported, "internal/lb", "k8s.io/apimachinery/pkg/labels")
		},
	},
	{
		reason:    "binaries never import one another; what two share lives in internal",
		applies:   func(pkg string) bool { return binary(pkg) != "" },
		forbidden: func(pkg, imported string) bool { return binary(imported) != "" && binary(imported) != binary(pkg) },
	},
	{
		reason:    "actors never import one another; only main wires them together. Helpers of a slice may be shared",
		applies:   isActor,
		forbidden: func(pkg, imported string) bool { return isActor(imported) && !below(imported, pkg) },
	},
	{
		reason:    "what is shared must not depend on who shares it",
		applies:   func(pkg string) bool { return below(pkg, "internal", "api") },
		forbidden: func(_, imported string) bool { return binary(imported) != "" },
	},
	{
		reason:    "tests and the lab stand outside of the product",
		applies:   func(pkg string) bool { return !below(pkg, "e2e") },
		forbidden: func(_, imported string) bool { return below(imported, "e2e") },
	},
	{
		reason:    "the product does not carry what only tests need",
		applies:   func(pkg string) bool { return !testSupport[pkg] },
		forbidden: func(_, imported string) bool { return testSupport[imported] || imported == "testing" },
	},
	{
		reason:  "no type of a BGP or gossip library leaves the package that wraps it, so that it can be replaced",
		applies: func(pkg string) bool { return !below(pkg, "speaker/bgp", "speaker/members") },
		forbidden: func(_, imported string) bool {
			return below(imported, "github.com/osrg/gobgp", "github.com/hashicorp/memberlist")
		},
	},
	{
		reason: "there is one stack for each part of netlink: internal/links for interfaces, routes and neighbors, " +
			"proxy/nfnetlink for netfilter",
		applies: func(pkg string) bool { return !below(pkg, "internal/links", "internal/nstest", "e2e") },
		forbidden: func(_, imported string) bool {
			return below(imported, "github.com/vishvananda/netlink", "github.com/mdlayher/netlink", "github.com/google/nftables")
		},
	},
}

// violation returns the reason why pkg must not import imported, or "".
func violation(pkg, imported string) string {
	for _, r := range rules {
		if r.applies(pkg) && r.forbidden(pkg, imported) {
			return r.reason
		}
	}
	return ""
}

func TestImports(t *testing.T) {
	findActors(t)
	for _, p := range packages(t) {
		for _, imported := range p.Imports {
			imported = strings.TrimPrefix(imported, module)
			if reason := violation(p.name(), imported); reason != "" {
				t.Errorf("%s imports %s: %s", p.name(), imported, reason)
			}
		}
	}
}

// TestRulesCatch shows that each rule can fail.
func TestRulesCatch(t *testing.T) {
	findActors(t)
	for _, test := range []struct {
		pkg, imported string
		refused       bool
	}{
		{"api/v1beta1", "k8s.io/client-go/rest", true},
		{"api/v1beta1", "k8s.io/apimachinery/pkg/runtime", false},
		{"speaker", "k8s.io/client-go/rest", true},
		{"internal/kube", "k8s.io/client-go/rest", false},
		{"speaker/plan", "log/slog", true},
		{"speaker/plan", "net/http", true},
		{"speaker/plan", "net/netip", false},
		{"speaker/routes", "speaker/plan", false},
		{"speaker/routes", "speaker/bgp", true},
		{"speaker/routes", "log/slog", true},
		{"speaker/handoff", "speaker/routes", true},
		{"speaker/plan", "speaker/routes", true},
		{"proxy/plan", "internal/kube", true},
		{"proxy/plan", "internal/lb", false},
		{"internal/lb", "math/rand/v2", true},
		{"speaker/gate", "proxy/feed", true},
		{"proxy/health", "proxy/feed", true},
		{"proxy", "proxy/feed", false},
		{"internal/lb", "proxy/plan", true},
		{"ctl", "e2e/lab", true},
		{"proxy/nftables", "e2e/cases", true},
		{"proxy/nftables", "internal/nstest", true},
		{"e2e/lab", "internal/seeds", true},
		{"e2e/cases", "internal/nstest", false},
		{"speaker", "github.com/hashicorp/memberlist", true},
		{"speaker/members", "github.com/hashicorp/memberlist", false},
		{"proxy/rescue", "github.com/vishvananda/netlink", true},
		{"proxy/conntrack", "github.com/google/nftables", true},
		{"internal/links", "github.com/vishvananda/netlink", false},
		{"proxy/rescue", "proxy/nft/expr", false},
	} {
		if got := violation(test.pkg, test.imported); (got != "") != test.refused {
			t.Errorf("%s imports %s: refused because of %q, want refused: %v", test.pkg, test.imported, got, test.refused)
		}
	}
}

// TestPurePackagesKnowNoClockAndNoNetwork looks for what makes the same input give another output.
func TestPurePackagesKnowNoClockAndNoNetwork(t *testing.T) {
	for _, p := range packages(t) {
		if !isPure(p.name()) {
			continue
		}
		for _, file := range p.GoFiles {
			set := token.NewFileSet()
			parsed, err := parser.ParseFile(set, filepath.Join(p.Dir, file), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(parsed, func(n ast.Node) bool {
				if sel, ok := n.(*ast.SelectorExpr); ok && impure(sel) {
					t.Errorf("%s: a pure package must not use it; what it knows arrives as an argument", set.Position(sel.Pos()))
				}
				return true
			})
		}
	}
}

// impure reports whether the expression reaches for the clock, or for more of package net than the
// type of a MAC address.
func impure(sel *ast.SelectorExpr) bool {
	clock := []string{"Now", "Since", "Until", "After", "AfterFunc", "Sleep", "NewTimer", "NewTicker", "Tick"}
	pkg, ok := sel.X.(*ast.Ident)
	if !ok {
		return false
	}
	return pkg.Name == "time" && slices.Contains(clock, sel.Sel.Name) || pkg.Name == "net" &&
		sel.Sel.Name != "HardwareAddr"
}
