package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// labPackage has the benchmarks of the lab.
const labPackage = "e2e"

// benchmark is one line of "go test -bench".
type benchmark struct {
	Package string   `json:"package"`
	Name    string   `json:"name"`
	Runs    int      `json:"runs"`
	Figures []figure `json:"figures"`
}

// figure is a value with its unit, as ns/op, B/op or what the benchmark reports.
type figure struct {
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

// once are the benchmarks of the lab of which a turn takes minutes: they run once, the others as often as is asked for.
var once = []string{"BGPServices", "DirectRacksAtRest", "FiveHundredServices", "ManyAddresses", "Racks"}

// longTimeout is for all of them together.
const longTimeout = 3 * time.Hour

// runBenchmarks runs the benchmarks that are asked for and adds what they say to the report. If some
// fail, the others run all the same.
func (b *bench) runBenchmarks(ctx context.Context, repository string) (failed error) {
	for _, call := range b.calls() {
		if ctx.Err() == nil {
			failed = errors.Join(failed, b.goTest(ctx, repository, call), b.write())
		}
	}
	return failed
}

// testCall is a call of "go test".
type testCall struct{ variables, args []string }

// calls returns what to call for the benchmarks that are asked for.
func (o options) calls() (all []testCall) {
	add := func(variables []string, args ...string) {
		if o.short {
			args = append([]string{"-short"}, args...)
		}
		all = append(all, testCall{variables, args})
	}
	lab := func(turns int, timeout time.Duration, variables []string, args ...string) {
		add(variables, append(args, "-benchtime", fmt.Sprintf("%dx", turns), "-timeout", timeout.String(), "./e2e")...)
	}
	// A turn of all others takes some five minutes.
	some := func(turns int) time.Duration { return time.Hour + time.Duration(turns)*10*time.Minute }
	long := "^Benchmark(" + strings.Join(once, "|") + ")$"
	if o.faults > 0 {
		lab(o.faults, some(o.faults), nil, "-bench", ".", "-skip", long)
		lab(1, longTimeout, nil, "-bench", long)
	}
	if o.metallb {
		variables, long := []string{"LANDFALL_BENCH_METALLB=1"}, "MetalLB/^(500|bgp)$"
		turns := max(o.faults, 1)
		lab(turns, some(turns), variables, "-bench", "MetalLB", "-skip", long)
		lab(1, longTimeout, variables, "-bench", long)
	}
	if o.goBenchmarks {
		turns := "1s"
		if o.short {
			turns = "1x"
		}
		add(nil, "-bench", ".", "-benchmem", "-benchtime", turns, "-timeout", "2h", "./api/...", "./controller/...",
			"./ctl/...", "./internal/...", "./proxy/...", "./speaker/...")
	}
	return all
}

// inGroup has a program end with all that it has started, when its context ends: "go test" leaves the test's program
// behind, which goes on and holds the pipe open.
func inGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
}

// goTest runs benchmarks.
func (b *bench) goTest(ctx context.Context, repository string, call testCall) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-vet=off", "-run", "^$"}, call.args...)...)
	cmd.Dir, cmd.Stderr, cmd.Env = repository, os.Stderr, append(os.Environ(), call.variables...)
	inGroup(cmd)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	found, unreadable := readBenchmarks(io.TeeReader(out, os.Stderr))
	b.report.Benchmarks = append(b.report.Benchmarks, found...)
	if err := errors.Join(cmd.Wait(), unreadable); err != nil {
		return fmt.Errorf("go %s: %w", strings.Join(cmd.Args[1:], " "), err)
	}
	return nil
}

// readBenchmarks reads what "go test -bench" prints.
func readBenchmarks(from io.Reader) (all []benchmark, err error) {
	lines := bufio.NewScanner(from)
	folder := ""
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "pkg: "); ok {
			folder = strings.TrimPrefix(name, module+"/")
		}
		if b, ok := parseBenchmark(lines.Text()); ok {
			b.Package = folder
			all = append(all, b)
		}
	}
	return all, lines.Err()
}

// module is the module's path.
const module = "github.com/landfall-lb/landfall"

// parseBenchmark reads a line as "BenchmarkName-2  10  123 ns/op  4 B/op".
func parseBenchmark(text string) (b benchmark, ok bool) {
	fields := strings.Fields(text)
	if len(fields) < 4 || len(fields)%2 != 0 || !strings.HasPrefix(fields[0], "Benchmark") {
		return b, false
	}
	b.Name = strings.TrimPrefix(fields[0], "Benchmark")
	if i := strings.LastIndexByte(b.Name, '-'); i > 0 { // the number of processors
		b.Name = b.Name[:i]
	}
	var err error
	if b.Runs, err = strconv.Atoi(fields[1]); err != nil {
		return b, false
	}
	for i := 2; i < len(fields); i += 2 {
		value, err := strconv.ParseFloat(fields[i], 64)
		if err != nil {
			return b, false
		}
		b.Figures = append(b.Figures, figure{value, fields[i+1]})
	}
	return b, true
}
