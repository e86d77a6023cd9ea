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

// What findParts finds, by what the packages declare and import.
var (
	// actors are the packages below a binary's folder that declare a method Run.
	actors = map[string]bool{}
	// rooms are the sub-states of the speaker's loop: like plans, but they remember something from
	// one step to the next. They declare a method Step of a type State.
	rooms = map[string]bool{}
	// dialects are the packages below proxy that are built on proxy/dialect, whose actor runs them.
	dialects = map[string]bool{}
	// testSupport are the packages that help tests: outside of test files they import testing.
	testSupport = map[string]bool{}
)

const dialect = "proxy/dialect"

func findParts(t *testing.T) {
	t.Helper()
	for _, p := range packages(t) {
		name := p.name()
		testSupport[name] = slices.Contains(p.Imports, "testing")
		if binary(name) == "" || !strings.Contains(name, "/") {
			continue
		}
		methods := methods(t, p)
		rooms[name] = slices.Contains(methods, "State.Step")
		actors[name] = slices.ContainsFunc(methods, func(m string) bool { return strings.HasSuffix(m, ".Run") })
		dialects[name] = slices.Contains(p.Imports, module+dialect)
	}
}

// methods returns the methods that a package declares, as Type.Method.
func methods(t *testing.T, p listed) (all []string) {
	t.Helper()
	for _, file := range p.GoFiles {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil {
				all = append(all, receiver(f.Recv.List[0].Type)+"."+f.Name.Name)
			}
		}
	}
	return all
}

// receiver returns the name of a method's type, without a pointer and type parameters.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

func isPlan(pkg string) bool { return binary(pkg) != "" && strings.HasSuffix(pkg, "/plan") }

func isPure(pkg string) bool {
	return isPlan(pkg) || rooms[pkg] || pkg == "internal/lb" || pkg == "ctl/explain" ||
		pkg == "controller/view"
}

// below reports whether pkg is root or lies below it.
func below(pkg string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(root string) bool { return pkg == root || strings.HasPrefix(pkg, root+"/") })
}

func ours(imported string) bool {
	return below(imported, "api", "internal", "e2e", "release") || binary(imported) != ""
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
		reason: "a decision must be testable as a value: plans, rooms and the vocabulary do no I/O and know no logger " +
			"and no chance",
		applies: isPure,
		forbidden: func(pkg, imported string) bool {
			if standard(imported) {
				return below(imported, "os", "log", "net/http", "io", "math/rand", "syscall", "context")
			}
			ownPlan := rooms[pkg] && isPlan(imported) && binary(imported) == binary(pkg)
			return !ownPlan && !below(imported, "internal/lb", "k8s.io/apimachinery/pkg/labels")
		},
	},
	{
		reason:    "binaries never import one another; what two share lives in internal",
		applies:   func(pkg string) bool { return binary(pkg) != "" },
		forbidden: func(pkg, imported string) bool { return binary(imported) != "" && binary(imported) != binary(pkg) },
	},
	{
		reason:  "only main imports actors and wires them together. Helpers of a slice may be shared",
		applies: func(pkg string) bool { return strings.Contains(pkg, "/") },
		forbidden: func(pkg, imported string) bool {
			return actors[imported] && !below(imported, pkg) && (!dialects[pkg] || imported != dialect)
		},
	},
	{
		reason:    "one dialect knows nothing of the other: what they share is in proxy/dialect and proxy/plan",
		applies:   func(pkg string) bool { return strings.Contains(pkg, "/") },
		forbidden: func(pkg, imported string) bool { return dialects[imported] && !below(pkg, imported) },
	},
	{
		reason:    "what is shared must not depend on who shares it",
		applies:   func(pkg string) bool { return below(pkg, "internal", "api") },
		forbidden: func(_, imported string) bool { return binary(imported) != "" },
	},
	{
		reason:    "tests, the lab and what makes a release stand outside of the product",
		applies:   func(pkg string) bool { return !below(pkg, "e2e", "release") },
		forbidden: func(_, imported string) bool { return below(imported, "e2e", "release") },
	},
	{
		reason:    "a release is made without the lab",
		applies:   func(pkg string) bool { return below(pkg, "release") },
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
	findParts(t)
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
	findParts(t)
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
		{"proxy/nftables", "proxy/conntrack", true},
		{"proxy/nftables", "proxy/rescue", true},
		{"proxy/nftables", "proxy/iptables", true},
		{"proxy/iptables", "proxy/feed", true},
		{"proxy/iptables", "proxy/dialect", false},
		{"proxy/rescue", "proxy/dialect", true},
		{"proxy/nft", "proxy/feed", true},
		{"proxy", "proxy/nftables", false},
		{"internal/lb", "proxy/plan", true},
		{"ctl", "e2e/lab", true},
		{"ctl/explain", "internal/kube", true},
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
	findParts(t)
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

// TestImpureCatches shows which expressions a pure package must not have.
func TestImpureCatches(t *testing.T) {
	for source, want := range map[string]bool{
		"time.Now()":          true,
		"time.NewTimer(0)":    true,
		"net.Dial":            true,
		"net.HardwareAddr{}":  false,
		"time.Second":         false,
		"f.Now":               false,
		"s.clock.time.Now":    false,
		"func() { net.IP{} }": true,
	} {
		parsed, err := parser.ParseExpr(source)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		ast.Inspect(parsed, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			found = found || ok && impure(sel)
			return true
		})
		if found != want {
			t.Errorf("%s is impure: %v, want %v", source, found, want)
		}
	}
}

// TestRoomsAreFound holds which packages are pure because of a State.Step.
func TestRoomsAreFound(t *testing.T) {
	findParts(t)
	for _, room := range []string{"handoff", "holders", "ownership", "partition", "routes"} {
		if !rooms["speaker/"+room] {
			t.Errorf("speaker/%s is not found to be a room", room)
		}
	}
	if !dialects["proxy/nftables"] || !dialects["proxy/iptables"] {
		t.Errorf("dialects %v", dialects)
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
