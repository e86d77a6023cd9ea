package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
)

const (
	modulePath = "github.com/landfall-lb/landfall/"
	slowest    = 10 // rows of the table

	messages      = 12  // of a test that failed, in the summary
	messageLength = 600 // bytes
)

// event is a line of "go test -json".
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64
}

// test names a test function or one of its subtests.
type test struct{ suite, pkg, name string }

// top is the test function that a subtest belongs to.
func (t test) top() test {
	t.name, _, _ = strings.Cut(t.name, "/")
	return t
}

func (t test) String() string {
	where := strings.TrimPrefix(t.pkg, modulePath)
	if t.name == "" {
		return where
	}
	return where + " " + t.name
}

// report collects events. Its units are test functions, and subtests that run beside others of their
// function, which "go test" does not count into the function's time. Its methods may be called from several goroutines.
type report struct {
	verbose string // the suite whose tests all print their output

	mu                      sync.Mutex
	out                     io.Writer
	passed, failed, skipped int
	took                    map[test]float64       // units that have ended, in seconds
	running                 map[test]time.Time     // units that have not
	parallel                map[test]bool          // subtests that run beside others of their function
	output                  map[test]*bytes.Buffer // what functions wrote, and packages outside of them
	said                    map[test][]string      // the first message of each place in a test's code
	broken                  []test                 // what failed
	fatal                   map[test]bool          // functions with a panic, time-out, data race or violation
	flaky                   []test                 // functions that failed, and passed when they ran again
}

func newReport(out io.Writer, verbose string) *report {
	return &report{out: out, verbose: verbose, took: map[test]float64{}, running: map[test]time.Time{},
		parallel: map[test]bool{}, output: map[test]*bytes.Buffer{}, said: map[test][]string{}, fatal: map[test]bool{}}
}

// read takes the events of a suite until they end. A line that is no event is printed.
func (r *report) read(suite string, events io.Reader) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				r.print(string(line))
			} else {
				r.take(suite, e)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) take(suite string, e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := test{suite, cmp.Or(e.Package, e.ImportPath), e.Test}
	switch e.Action {
	case "run":
		if t == t.top() {
			r.running[t] = time.Now()
		}
	case "pause": // until its turn comes among the parallel tests
		delete(r.running, t)
		r.parallel[t] = true
	case "cont":
		if t != t.top() {
			delete(r.running, t.top()) // it only waits for its subtests
		}
		r.running[t] = time.Now()
	case "output", "build-output":
		r.note(t, e.Output)
		r.keep(t, e.Output)
	case "pass", "fail", "skip":
		r.end(t, e)
	}
}

// place is where a message of a test comes from.
var place = regexp.MustCompile(`^ +\w+_test\.go:\d+: `)

// note keeps the first message of each place in a test's code, for the summary of what failed. go test
// does not tell errors from other messages.
func (r *report) note(t test, text string) {
	at := strings.TrimSpace(place.FindString(text))
	if at == "" || len(r.said[t]) == messages || slices.ContainsFunc(r.said[t], func(message string) bool {
		return strings.HasPrefix(message, at)
	}) {
		return
	}
	message := strings.TrimSpace(text)
	r.said[t] = append(r.said[t], message[:min(len(message), messageLength)])
}

// keep keeps what a test wrote until the test function has ended.
func (r *report) keep(t test, text string) {
	t = t.top()
	if strings.HasPrefix(text, "panic: ") || strings.HasPrefix(text, "WARNING: DATA RACE") ||
		strings.HasPrefix(strings.TrimLeft(text, " "), contract.Violated+" ") {
		r.fatal[t] = true
	}
	if r.output[t] == nil {
		r.output[t] = &bytes.Buffer{}
	}
	r.output[t].WriteString(text)
}

// end notes how a test or a package ended.
func (r *report) end(t test, e event) {
	if t.name == "" {
		r.endPackage(t, e.Action)
		return
	}
	switch e.Action {
	case "pass":
		r.passed++
		delete(r.said, t)
	case "skip":
		r.skipped++
	default:
		r.failed++
		r.broken = append(r.broken, t)
	}
	delete(r.running, t)
	if t == t.top() || r.parallel[t] {
		r.took[t] = e.Elapsed
	}
	if t != t.top() {
		return
	}
	if text := r.output[t]; text != nil && (e.Action == "fail" || t.suite == r.verbose) {
		fmt.Fprint(r.out, text)
	}
	delete(r.output, t)
}

// repeatable is the test functions that failed, and nothing if something failed that running a function
// again cannot excuse: a build, a panic, a data race, a violation of the contract.
func (r *report) repeatable() []test {
	r.mu.Lock()
	defer r.mu.Unlock()
	var functions []test
	for _, t := range r.broken {
		if t.name == "" || r.fatal[t.top()] {
			return nil
		}
		if !slices.Contains(functions, t.top()) {
			functions = append(functions, t.top())
		}
	}
	return functions
}

// excuse counts a function and its subtests as passed, and lists it as flaky.
func (r *report) excuse(function test) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := len(r.broken)
	for _, t := range r.broken {
		if t != function && t.top() == function {
			r.said[function] = append(r.said[function], r.said[t]...)
		}
	}
	r.broken = slices.DeleteFunc(r.broken, func(t test) bool { return t.top() == function })
	r.failed -= before - len(r.broken)
	r.passed += before - len(r.broken)
	r.flaky = append(r.flaky, function)
}

// isBroken reports whether something of a suite failed and is not excused.
func (r *report) isBroken(suite string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.broken, func(t test) bool { return t.suite == suite })
}

// endPackage prints the line that "go test" ends a package with. Of a package that failed it prints
// all that was not printed, such as what the compiler said, or the test that a panic ended.
func (r *report) endPackage(pkg test, action string) {
	for t := range r.running {
		if t.pkg == pkg.pkg && t.suite == pkg.suite {
			delete(r.running, t)
			if action == "fail" {
				r.failed++
				r.broken = append(r.broken, t)
				r.fatal[t.top()] = true
			}
		}
	}
	var rest []test
	for t := range r.output {
		// The compiler's output is of an import path such as "x [x.test]".
		name, _, _ := strings.Cut(t.pkg, " ")
		if t.suite == pkg.suite && strings.TrimSuffix(name, ".test") == pkg.pkg {
			rest = append(rest, t)
		}
	}
	slices.SortFunc(rest, func(a, b test) int { return cmp.Or(cmp.Compare(b.name, a.name), cmp.Compare(b.pkg, a.pkg)) })
	for _, t := range rest {
		for line := range strings.Lines(r.output[t].String()) {
			if action == "fail" || strings.HasPrefix(line, "ok ") {
				fmt.Fprint(r.out, line)
			}
		}
		delete(r.output, t)
	}
	if action == "fail" && !slices.ContainsFunc(r.broken, func(t test) bool {
		return t.suite == pkg.suite && t.pkg == pkg.pkg
	}) {
		r.failed++
		r.broken = append(r.broken, pkg)
	}
}

// print writes a line of its own.
func (r *report) print(line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprint(r.out, line)
}

// stderr returns a writer that does not write into other lines.
func (r *report) stderr() io.Writer { return printer{r} }

type printer struct{ r *report }

func (p printer) Write(text []byte) (int, error) {
	p.r.print(string(text))
	return len(text), nil
}

// beatEvery says now and then what is running, until the function that it returns is called.
func (r *report) beatEvery(every time.Duration, began time.Time) (stop func()) {
	tick := time.NewTicker(every)
	end := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case now := <-tick.C:
				r.print(r.progress(now, began))
			case <-end:
				return
			}
		}
	})
	return func() {
		tick.Stop()
		close(end)
		group.Wait()
	}
}

// progress is a line about what has ended and what is running, the longest first.
func (r *report) progress(now, began time.Time) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	tests := slices.SortedFunc(maps.Keys(r.running), func(a, b test) int { return r.running[a].Compare(r.running[b]) })
	var names []string
	for _, t := range tests[:min(4, len(tests))] {
		names = append(names, fmt.Sprintf("%s %.0f s", t, now.Sub(r.running[t]).Seconds()))
	}
	line := fmt.Sprintf("  %.0f s: %d passed, %d failed", now.Sub(began).Seconds(), r.passed, r.failed)
	if len(names) == 0 {
		return line + "; compiling\n"
	}
	return line + "; running: " + strings.Join(names, ", ") + "\n"
}

// summary is the table of the slowest tests, what failed, and the counts.
func (r *report) summary(took time.Duration) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	tests := slices.SortedFunc(maps.Keys(r.took), func(a, b test) int {
		return cmp.Or(cmp.Compare(r.took[b], r.took[a]), cmp.Compare(a.String(), b.String()))
	})
	fmt.Fprintf(&b, "\nThe %d slowest tests:\n", min(slowest, len(tests)))
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "  SECONDS\tTEST\tPACKAGE")
	for _, t := range tests[:min(slowest, len(tests))] {
		fmt.Fprintf(table, "  %7.1f\t%s\t%s\n", r.took[t], t.name, strings.TrimPrefix(t.pkg, modulePath))
	}
	_ = table.Flush() // a strings.Builder takes everything
	if len(r.broken) > 0 {
		fmt.Fprintln(&b, "\nFailed:")
		for _, t := range r.broken {
			r.writeFailed(&b, t)
		}
	}
	if len(r.flaky) > 0 {
		fmt.Fprintf(&b, "\nFlaky: failed, and passed %d times alone. Each is a defect, of the test or of what it tests:\n",
			repeats)
		for _, t := range r.flaky {
			r.writeFailed(&b, t)
		}
	}
	fmt.Fprintf(&b, "\n%d tests passed, %d failed, %d were skipped, in %.0f s (subtests are counted too)\n", r.passed,
		r.failed, r.skipped, took.Seconds())
	return b.String()
}

// writeFailed writes the name of a test that failed, and what it said.
func (r *report) writeFailed(out io.Writer, t test) {
	fmt.Fprintf(out, "  %s\n", t)
	for _, message := range r.said[t] {
		fmt.Fprintf(out, "    %s\n", message)
	}
}
