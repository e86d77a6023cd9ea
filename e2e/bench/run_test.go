package main

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A part that fails does not keep the others from being measured, until the run is over.
func TestParts(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var p parts
	var done []string
	part := func(name string, err error) bool {
		return p.do(ctx, name, func(context.Context) error {
			done = append(done, name)
			return err
		})
	}
	broken := errors.New("broken")
	if !part("one", nil) || part("two", broken) || !part("three", nil) {
		t.Error("a part that fails succeeds, or one that does not fails")
	}
	cancel()
	part("four", nil)
	if d := cmp.Diff([]string{"one", "two", "three"}, done); d != "" {
		t.Error(d)
	}
	if err := p.failed(ctx); !errors.Is(err, broken) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v does not tell of what failed", err)
	}
}

// What takes longer than the limit is in the report, and is no failure of the run.
func TestOverLimit(t *testing.T) {
	late := overLimit(t.Context(), errors.New("no answer"))
	if err := unlessOver(fmt.Errorf("start: %w", late)); err != nil {
		t.Errorf("what takes long fails the run: %v", err)
	}
	broken := errors.New("the Service is not deleted")
	if err := unlessOver(fmt.Errorf("new: %w", errors.Join(late, broken))); !errors.Is(err, broken) {
		t.Errorf("a failure beside what takes long is lost: %v", err)
	}
	if err := unlessOver(errors.Join(late, fmt.Errorf("again: %w", late))); err != nil {
		t.Errorf("what takes long twice fails the run: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := unlessOver(overLimit(ctx, late)); !errors.Is(err, context.Canceled) {
		t.Errorf("a run that was ended counts as one that takes long: %v", err)
	}
	r := report{
		Churn: []churnRow{{Proxy: "slow", Services: 30000, Over: ofStart},
			{Proxy: "slow", Services: 10000, Start: 5, Change: quantiles{1, 2, 1}, Over: ofNew},
			{Proxy: "busy", Services: 10000, Start: 5, Over: ofStartCPU},
			{Proxy: "busy", Services: 5000, Start: 5, Behind: quantiles{1, 2, 1}, StartCPU: 3, Over: ofCPU}},
		Connections: []connectionRow{{Path: "slow at 30000 Services", Over: true}},
		Outside:     []outsideRow{{Path: "slow", Services: 30000, Over: true}},
	}
	text := r.markdown("performance")
	for _, want := range []string{
		"| 30,000 | slow | over 10 min |  |  |  |  |  |  |\n",
		"| 10,000 | slow | 5 | 1.0 / 2.0 (1.0) | over 10 min |  |  |  |  |\n",
		"| 10,000 | busy | 5 |  |  |  |  | over 10 min |  |\n",
		"| 5,000 | busy | 5 |  |  | 1.0 / 2.0 (1.0) |  | 3.00 | over 10 min |\n",
		"| slow at 30000 Services | over 10 min |  |  |  |\n",
		"| slow |  | 30,000 | over 10 min |  |  |  |  |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in the report:\n%s", want, text)
		}
	}
}

// By default kube-proxy's connections are measured with as many Services as Landfall's.
func TestConnectionsAtTheSameSizes(t *testing.T) {
	o, err := parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	b := bench{options: o}
	of := map[string][]string{}
	for _, n := range b.loadNodes() {
		of[n.contender.name] = append(of[n.contender.name], fmt.Sprint("full=", n.full))
	}
	for _, p := range b.outsidePlans() {
		if p.contender.name != "" {
			of[p.contender.name] = append(of[p.contender.name], fmt.Sprint(p.services))
		}
	}
	for _, c := range all {
		if d := cmp.Diff(of[all[0].name], of[c.name]); d != "" {
			t.Errorf("%s is measured otherwise than %s:\n%s", c.name, all[0].name, d)
		}
	}
}

// The report says why IPVS is not there.
func TestLeaveOut(t *testing.T) {
	o, err := parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	b := bench{options: o}
	b.leaveOut(t.Context())
	measured := slices.ContainsFunc(b.contenders(), func(c contender) bool { return c.mode == ipvs })
	if said := strings.Contains(b.report.markdown(""), "kube-proxy-ipvs is not measured: "); said == measured {
		t.Errorf("IPVS is measured: %v, the report says that it is not: %v", measured, said)
	}
	if want := len(all) - len(b.report.LeftOut); len(b.contenders()) != want {
		t.Errorf("%d contenders are left, want %d", len(b.contenders()), want)
	}
}

// Benchmarks of which a turn takes minutes run once, however often the others do; all exist.
func TestCalls(t *testing.T) {
	long := "^Benchmark(BGPServices|DirectRacksAtRest|FiveHundredServices|ManyAddresses|Racks)$"
	metallb := []string{"LANDFALL_BENCH_METALLB=1"}
	got := options{faults: 50, metallb: true}.calls()
	want := []testCall{
		{nil, []string{"-bench", ".", "-skip", long, "-benchtime", "50x", "-timeout", "9h20m0s", "./e2e"}},
		{nil, []string{"-bench", long, "-benchtime", "1x", "-timeout", "3h0m0s", "./e2e"}},
		{metallb, []string{"-bench", "MetalLB", "-skip", "MetalLB/^(500|bgp)$", "-benchtime", "50x", "-timeout", "9h20m0s",
			"./e2e"}},
		{metallb, []string{"-bench", "MetalLB/^(500|bgp)$", "-benchtime", "1x", "-timeout", "3h0m0s", "./e2e"}},
	}
	if d := cmp.Diff(want, got, cmp.AllowUnexported(testCall{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	all := benchmarksOf(t, "..")
	for _, name := range once {
		if !slices.Contains(all, name) {
			t.Errorf("there is no Benchmark%s", name)
		}
	}
}

// benchmarksOf returns the names of all benchmarks in a folder.
func benchmarksOf(t *testing.T, folder string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests in %s: %v", folder, err)
	}
	for _, file := range files {
		names = append(names, benchmarksIn(t, file)...)
	}
	return names
}

// benchmarksIn returns the names of all benchmarks in a file.
func benchmarksIn(t *testing.T, file string) (names []string) {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range parsed.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
			if name, ok := strings.CutPrefix(f.Name.Name, "Benchmark"); ok {
				names = append(names, name)
			}
		}
	}
	return names
}
