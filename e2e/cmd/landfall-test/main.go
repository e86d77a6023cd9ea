// Landfall-test runs suites of Go tests one after the other and sums them up: the output of each test that
// fails, a table of the slowest tests, and how many tests passed, failed and were skipped.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

const usage = `usage:
  landfall-test [--verbose SUITE] [--summary FILE] [--again N] SUITE [VARIABLE=VALUE...] ARGUMENT... [-- SUITE ...]

Each suite is a run of "go test" with these arguments, under a name. Each begins when the one before
it has ended, whether that passed or not.
  --verbose SUITE  print the output of each test of a suite, not only of those that fail
  --summary FILE   write the table and the counts to a file as well
  --again N        when at most N test functions fail, run each of them alone, three times. Those that pass every time
                   are listed as flaky, and are no failure. Data races, panics and violations of the contract that
                   chaos sees stay failures. 0, the default: never
`

const (
	beat    = 10 * time.Second // how often the program says what is running
	repeats = 3                // how often a flaky test must pass, alone
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
	case err != nil:
		fmt.Fprintln(os.Stderr, "landfall-test:", err)
		os.Exit(1)
	}
}

// suite is a run of "go test".
type suite struct {
	name      string
	env, args []string
}

// parseSuites reads suites that are separated by "--".
func parseSuites(args []string) ([]suite, error) {
	var suites []suite
	for len(args) > 0 {
		end := slices.Index(args, "--")
		if end < 0 {
			end = len(args)
		}
		part := args[:end]
		args = args[min(end+1, len(args)):]
		if len(part) < 2 {
			return nil, fmt.Errorf("a suite needs a name and arguments, and there is %q", part)
		}
		s := suite{name: part[0], args: part[1:]}
		for len(s.args) > 0 && strings.Contains(s.args[0], "=") && s.args[0][0] != '-' {
			s.env, s.args = append(s.env, s.args[0]), s.args[1:]
		}
		suites = append(suites, s)
	}
	if len(suites) == 0 {
		return nil, flag.ErrHelp
	}
	return suites, nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("landfall-test", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	verbose := flags.String("verbose", "", "")
	summary := flags.String("summary", "", "")
	again := flags.Int("again", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	suites, err := parseSuites(flags.Args())
	if err != nil {
		return err
	}
	began := time.Now()
	r := newReport(out, *verbose)
	quiet := r.beatEvery(beat, began)
	errs := make([]error, len(suites))
	for i, s := range suites {
		errs[i] = s.run(ctx, r)
	}
	if *again > 0 && ctx.Err() == nil {
		runAgain(ctx, suites, errs, r, *again)
	}
	quiet()
	text := r.summary(time.Since(began))
	fmt.Fprint(out, text)
	if *summary != "" {
		errs = append(errs, os.WriteFile(*summary, []byte(text), 0o644))
	}
	return errors.Join(errs...)
}

// runAgain runs alone what failed in each suite, if that is little, and takes back the errors of suites
// whose tests are only flaky.
func runAgain(ctx context.Context, suites []suite, errs []error, r *report, most int) {
	functions := r.repeatable()
	if len(functions) == 0 || len(functions) > most {
		return
	}
	for _, t := range functions {
		i := slices.IndexFunc(suites, func(s suite) bool { return s.name == t.suite })
		r.print(fmt.Sprintf("  %s failed: running it alone, %d times\n", t, repeats))
		alone := newReport(printer{r}, r.verbose)
		err := suites[i].alone(t).run(ctx, alone)
		if err == nil && alone.passed >= repeats && alone.skipped == 0 {
			r.excuse(t)
		}
	}
	for i, s := range suites {
		if !r.isBroken(s.name) {
			errs[i] = nil
		}
	}
}

// alone is the suite's run of one test function, without the tests beside it.
func (s suite) alone(t test) suite {
	flags := s.args
	if i := slices.IndexFunc(flags, func(arg string) bool {
		return arg[0] != '-' && (arg[0] == '.' || strings.Contains(arg, "/"))
	}); i >= 0 {
		flags = flags[:i]
	}
	s.args = append(slices.Clone(flags), fmt.Sprintf("-count=%d", repeats), "-run", "^"+t.name+"$", t.pkg)
	return s
}

// run runs the suite and hands its events to the report.
func (s suite) run(ctx context.Context, r *report) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, s.args...)...)
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stderr = r.stderr()
	// Tests end in good order, and take their labs with them.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	began := time.Now()
	err = errors.Join(r.read(s.name, stdout), cmd.Wait())
	r.print(fmt.Sprintf("  suite %s took %.0f s, and %.0f s of processor time\n", s.name, time.Since(began).Seconds(),
		(cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()))
	if err != nil {
		return fmt.Errorf("suite %s: %w", s.name, err)
	}
	return nil
}
