package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// limit is how long a proxy may take for a start or a change. What takes longer is told in the report, and the other
// parts are measured all the same.
const limit = 10 * time.Minute

// errOverLimit is of what took longer.
var errOverLimit = fmt.Errorf("over the limit of %s", limit)

// bench is a run.
type bench struct {
	options
	lab      *lab.Lab
	programs map[string]string // path by program
	self     string            // path of this program
	fleet    *fleet
	// programmed are the nodes whose proxies have written all their rules. Of the others nothing is measured.
	programmed map[string]bool
	connected  map[string][]float64 // new connections per second, by measurement
	paths      []*path              // of the measurement from outside
	report     report
}

func run(ctx context.Context, o options) (err error) {
	b := &bench{options: o, programs: map[string]string{}, connected: map[string][]float64{},
		programmed: map[string]bool{}}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	repository, err := lab.FindRepository(".")
	if err != nil {
		return err
	}
	b.report.Machine = describe(ctx, repository)
	var failed error
	if !b.noChurn || !b.noLoad || !b.noOutside {
		failed = b.measureProxies(ctx, repository)
	}
	failed = errors.Join(failed, b.runBenchmarks(ctx, repository), b.write())
	b.report.print(os.Stdout) // also if not all is there
	return failed
}

// write writes the report as far as it is there, if one is asked for. It is called after each part: a run takes hours,
// and one that ends early leaves what it has.
func (b *bench) write() error {
	if b.options.report == "" {
		return nil
	}
	return b.report.write(b.options.report)
}

// measureProxies measures the proxies in a lab that ends with it.
func (b *bench) measureProxies(ctx context.Context, repository string) (err error) {
	b.leaveOut(ctx)
	if slices.ContainsFunc(b.contenders(), func(c contender) bool { return c.program == kubeProxy }) {
		if b.programs[kubeProxy], err = lab.Tool(ctx, repository, kubeProxy, progress); err != nil {
			return err
		}
		b.report.Machine.KubeProxy = firstLine(ctx, b.programs[kubeProxy], "--version")
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

// measure goes through the numbers of Services, and measures connections when there are a few Services and when there
// are most.
func (b *bench) measure(ctx context.Context) error {
	var parts parts
	load := !b.noLoad && parts.do(ctx, "connections", b.prepareLoad)
	if load {
		parts.do(ctx, "connections", func(ctx context.Context) error {
			return b.program(ctx, func(n loadNode) bool { return !n.full })
		})
	}
	outside := !b.noOutside && parts.do(ctx, "outside", b.prepareOutside)
	for _, n := range b.sizes() {
		grow := func(ctx context.Context) error { return b.fleet.grow(ctx, n) }
		if !parts.do(ctx, fmt.Sprintf("create %d Services", n), grow) {
			break
		}
		if outside {
			parts.do(ctx, "outside", func(ctx context.Context) error { return b.programOutside(ctx, n) })
		}
		if b.noChurn || !slices.Contains(b.services, n) {
			continue
		}
		parts.do(ctx, fmt.Sprintf("%s at %d Services", floor, n), func(ctx context.Context) error {
			return b.addRow(b.watchOnly(ctx, n))
		})
		for _, c := range b.contenders() {
			parts.do(ctx, fmt.Sprintf("%s at %d Services", c.name, n), func(ctx context.Context) error {
				return b.addRow(b.churn(ctx, c, n))
			})
		}
	}
	if load {
		parts.do(ctx, "connections", b.connections)
	}
	if outside {
		parts.do(ctx, "outside", b.outside)
	}
	return parts.failed(ctx)
}

// addRow adds a row to the report, unless it failed.
func (b *bench) addRow(row churnRow, err error) error {
	if err != nil {
		return err
	}
	progress(row.String())
	b.report.Churn = append(b.report.Churn, row)
	return b.write()
}

// parts are the parts of a run. If some fail, the others are done all the same.
type parts struct{ errs []error }

// do does a part, unless the run is over, and reports whether it succeeded.
func (p *parts) do(ctx context.Context, name string, part func(context.Context) error) bool {
	if ctx.Err() != nil {
		return false
	}
	err := part(ctx)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
		progress(err.Error())
		p.errs = append(p.errs, err)
	}
	return err == nil
}

func (p *parts) failed(ctx context.Context) error { return errors.Join(append(p.errs, ctx.Err())...) }

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
