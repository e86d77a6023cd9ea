// Bench measures Landfall's proxy beside kube-proxy: the same API server, the same Services, the
// same network namespaces, one run. It can run the other benchmarks too, and makes one report of all.
//
//	go run ./e2e/bench -services 1000,5000 -report report.md
//
// What it measures is described in docs/design/bench.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Commands of the helpers that this program starts in the namespaces of clients and pods.
const (
	loadCommand  = "load"
	serveCommand = "serve"
)

type options struct {
	services     []int
	proxies      []string
	report       string
	seconds      int
	rounds       int
	noChurn      bool
	noLoad       bool
	quickAbove   int
	changes      int
	newServices  int
	bursts       int
	faults       int
	metallb      bool
	goBenchmarks bool
	// Of the measurement from outside.
	outsideServices []int
	outsideRounds   int
	noOutside       bool
}

func main() {
	if err := start(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func start(args []string) error {
	if len(args) > 0 && args[0] == loadCommand {
		return load(args[1:])
	}
	if len(args) > 0 && args[0] == serveCommand {
		return serve(args[1:])
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	return run(ctx, o)
}

func parse(args []string) (o options, err error) {
	set := flag.NewFlagSet("bench", flag.ContinueOnError)
	sizes := set.String("services", "1,100,1000,5000,10000,30000", "numbers of Services to measure at, in rising order")
	proxies := set.String("proxies", strings.Join(contenderNames(), ","), "which proxies to measure")
	set.StringVar(&o.report, "report", "", "`file`.md for the report; plots and figures go to the folder file")
	set.IntVar(&o.faults, "faults", 0,
		"how often each fault of nodes is measured; 0 leaves them out, and is once with -metallb")
	set.BoolVar(&o.metallb, "metallb", false, "measure MetalLB too, which is built from its module")
	set.BoolVar(&o.goBenchmarks, "go", false, "run the Go benchmarks too")
	set.IntVar(&o.quickAbove, "quick-above", 5000,
		"above so many Services kube-proxy, which takes seconds for a change there, is measured a few times only, "+
			"and not with connections")
	set.IntVar(&o.changes, "changes", 20, "endpoint changes to measure")
	set.IntVar(&o.newServices, "new", 10, "new Services to measure")
	set.IntVar(&o.bursts, "bursts", 3, "changes behind 200 others to measure")
	set.IntVar(&o.seconds, "load-seconds", 3, "length of one measurement of new connections")
	set.IntVar(&o.rounds, "load-rounds", 5, "measurements of new connections of each kind; the median counts")
	set.BoolVar(&o.noChurn, "no-churn", false, "leave out how fast changes are programmed")
	set.BoolVar(&o.noLoad, "no-load", false, "leave out new connections per second")
	outside := set.String("outside-services", "10,300,5000,10000",
		"numbers of Services at which to measure what a client outside the node gets")
	set.IntVar(&o.outsideRounds, "outside-rounds", 100, "measurements from outside of each kind; the median counts")
	set.BoolVar(&o.noOutside, "no-outside", false, "leave out what a client outside the node gets, beside a bare node")
	if err := set.Parse(args); err != nil {
		return o, err
	}
	if o.services, err = parseSizes("services", *sizes); err != nil {
		return o, err
	}
	if o.outsideServices, err = parseSizes("outside-services", *outside); err != nil {
		return o, err
	}
	if o.report != "" && filepath.Ext(o.report) != ".md" {
		return o, fmt.Errorf("-report: %q does not end in .md", o.report)
	}
	o.proxies = strings.Split(*proxies, ",")
	for _, name := range o.proxies {
		if !slices.Contains(contenderNames(), name) {
			return o, fmt.Errorf("-proxies: %q is none of %s", name, strings.Join(contenderNames(), ", "))
		}
	}
	return o, nil
}

// parseSizes reads numbers of Services.
func parseSizes(option, text string) (sizes []int, err error) {
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || n > 50000 {
			return nil, fmt.Errorf("-%s: %q is not a number from 1 to 50000", option, word)
		}
		sizes = append(sizes, n)
	}
	if !slices.IsSorted(sizes) {
		return nil, fmt.Errorf("-%s: want them in rising order", option)
	}
	return sizes, nil
}

func progress(line string) { fmt.Fprintln(os.Stderr, time.Now().Format(time.TimeOnly), line) }

// bench is a run.
type bench struct {
	options
	lab       *lab.Lab
	programs  map[string]string // path by program
	self      string            // path of this program
	fleet     *fleet
	connected map[string][]float64 // new connections per second, by measurement
	paths     []*path              // of the measurement from outside
	report    report
}

func run(ctx context.Context, o options) (err error) {
	b := &bench{options: o, programs: map[string]string{}, connected: map[string][]float64{}}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	repository, err := lab.FindRepository(".")
	if err != nil {
		return err
	}
	// What is there is written after each part: a run takes hours.
	failed := errors.Join(b.measureProxies(ctx, repository), b.write(), b.runBenchmarks(ctx, repository))
	b.report.print(os.Stdout) // also if not all is there
	return failed
}

// write writes the report as far as it is there, if one is asked for.
func (b *bench) write() error {
	if b.options.report == "" {
		return nil
	}
	return b.report.write(b.options.report)
}

// measureProxies measures the proxies in a lab that ends with it.
func (b *bench) measureProxies(ctx context.Context, repository string) (err error) {
	if slices.ContainsFunc(b.contenders(), func(c contender) bool { return c.program == "kube-proxy" }) {
		if b.programs["kube-proxy"], err = lab.Tool(ctx, repository, "kube-proxy", progress); err != nil {
			return err
		}
	}
	folder, err := os.MkdirTemp("", "landfall-bench")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	if b.programs[landfall], err = build(ctx, repository, folder, "landfall-proxy", "./proxy"); err != nil {
		return err
	}
	if b.programs[floor], err = build(ctx, repository, folder, floor, "./e2e/bench/floor"); err != nil {
		return err
	}
	b.report.Machine = b.describe(ctx, repository)
	if b.lab, err = lab.Start(ctx, b.cluster(),
		lab.Options{NoAgents: true, Repository: repository, Progress: progress}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.lab.Close()) }()
	b.fleet = newFleet(b.lab)
	if err := b.fleet.createTarget(ctx); err != nil {
		return err
	}
	return b.measure(ctx)
}

// measure goes through the numbers of Services, and measures connections when there is one Service
// and when there are most.
func (b *bench) measure(ctx context.Context) error {
	if !b.noLoad {
		if err := b.prepareLoad(ctx); err != nil {
			return fmt.Errorf("connections: %w", err)
		}
	}
	if !b.noOutside {
		if err := b.prepareOutside(ctx); err != nil {
			return fmt.Errorf("outside: %w", err)
		}
	}
	for _, n := range b.sizes() {
		if err := b.fleet.grow(ctx, n); err != nil {
			return fmt.Errorf("create %d Services: %w", n, err)
		}
		if err := b.programOutside(ctx, n); err != nil {
			return fmt.Errorf("outside, at %d Services: %w", n, err)
		}
		if b.noChurn || !slices.Contains(b.services, n) {
			continue
		}
		row, err := b.watchOnly(ctx, n)
		if err != nil {
			return fmt.Errorf("%s at %d Services: %w", floor, n, err)
		}
		b.report.Churn = append(b.report.Churn, row)
		for _, c := range b.contenders() {
			row, err := b.churn(ctx, c, n)
			if err != nil {
				return fmt.Errorf("%s at %d Services: %w", c.name, n, err)
			}
			b.report.Churn = append(b.report.Churn, row)
			progress(row.String())
		}
	}
	if !b.noLoad {
		if err := b.connections(ctx); err != nil {
			return fmt.Errorf("connections: %w", err)
		}
	}
	if !b.noOutside {
		if err := b.outside(ctx); err != nil {
			return fmt.Errorf("outside: %w", err)
		}
	}
	return nil
}

// sizes returns all numbers of Services at which something is measured.
func (b *bench) sizes() []int {
	var all []int
	if !b.noChurn || !b.noLoad {
		all = append(all, b.services...)
	}
	if !b.noOutside {
		all = append(all, b.outsideServices...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
