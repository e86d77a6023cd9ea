// Bench measures Landfall's proxy beside kube-proxy: the same API server, the same Services, the
// same network namespaces, one run. It can run the other benchmarks too, and makes one report of all.
//
//	go run ./e2e/bench -services 1000,5000 -report report.md
//
// What it measures is described in docs/design/bench.md.
package main

import (
	"context"
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
	short        bool
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
	set.BoolVar(&o.short, "short", false, "to see that all runs: benchmarks with few objects, and those of Go once")
	set.IntVar(&o.quickAbove, "quick-above", 5000,
		"above so many Services changes of kube-proxy, which take seconds there, are measured a few times only")
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
