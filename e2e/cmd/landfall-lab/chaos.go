package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos"
	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	plot "github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// trouble says which run of chaos is wanted.
type trouble struct {
	seed    uint64
	minutes int
	only    string // numbers of events, with commas between them; empty for all
	without string // a guard to take out
	commit  string // what was built, for the report
	onward  bool   // tell the whole story, whatever is violated
	shrink  int    // how often parts are run again to find the fewest events that violate
}

// makeTrouble runs it, and says how to run it again if it violates the contract or fails.
func makeTrouble(ctx context.Context, out io.Writer, t trouble, options lab.Options) error {
	o, err := t.options()
	if err != nil {
		return err
	}
	o.Lab, o.Progress = options, func(line string) { fmt.Fprintln(out, line) }
	return tellTrouble(ctx, out, t, o, chaos.Run)
}

// options returns what the run is to be.
func (t trouble) options() (o chaos.Options, err error) {
	o = chaos.Options{Story: plot.New(t.seed), Length: time.Duration(t.minutes) * time.Minute, KeepGoing: t.onward}
	if t.only != "" {
		var ids []int
		for text := range strings.SplitSeq(t.only, ",") {
			id, err := strconv.Atoi(text)
			if err != nil || id < 1 {
				return o, fmt.Errorf("--only %q: want numbers of events, from 1 on, with commas between them", t.only)
			}
			ids = append(ids, id)
		}
		o.Story, o.Length = plot.With(t.seed, chaos.Cast(), ids), 0
	} else if t.minutes < 1 {
		return o, fmt.Errorf("--minutes %d: want 1 or more", t.minutes)
	}
	if t.without != "" {
		guard, known := chaos.Guards[t.without]
		if !known {
			return o, fmt.Errorf("no guard %q: want one of %v", t.without, slices.Sorted(maps.Keys(chaos.Guards)))
		}
		o.Without = guard
	}
	return o, nil
}

// tellTrouble runs it by run, and prints what was seen, also of a run that failed.
func tellTrouble(ctx context.Context, out io.Writer, t trouble, o chaos.Options, run runChaos) error {
	result, failed := run(ctx, o)
	if len(result.Told.Rounds) == 0 {
		return failed
	}
	if t.commit != "" {
		fmt.Fprintln(out, "Landfall", t.commit)
	}
	fmt.Fprintln(out, chaos.Report(result))
	if failed == nil && len(result.Violations) == 0 {
		return nil
	}
	s := result.Told
	if t.shrink > 0 && len(result.Violations) > 0 {
		s = fewest(ctx, out, t.shrink, o, run, result)
		fmt.Fprintf(out, "\nthe fewest events that violate it:\n%s", chaos.Tell(s))
	}
	again := fmt.Sprintf("landfall-lab chaos --seed %d", t.seed)
	if t.without != "" {
		again += " --without " + t.without
	}
	fmt.Fprintf(out, "again: %s --only %s\n", again, joinedIDs(s.IDs()))
	return errors.Join(failed, violated(result.Violations))
}

// runChaos is [chaos.Run], or what stands for it.
type runChaos func(context.Context, chaos.Options) (chaos.Result, error)

// fewest returns the smallest part of a story that still violates a clause that it violated.
func fewest(ctx context.Context, out io.Writer, tries int, o chaos.Options, run runChaos,
	result chaos.Result) plot.Story {
	o.KeepGoing, o.Length = false, 0
	s := result.Told.Until(result.Violations[0].Round)
	return s.Only(plot.Shrink(s.IDs(), tries, func(part []int) bool {
		o.Story = s.Only(part)
		fmt.Fprintf(out, "\nagain with %v\n", part)
		smaller, err := run(ctx, o)
		if err != nil {
			fmt.Fprintf(out, "the run failed: %v\n", err)
		}
		fmt.Fprintf(out, "%d violations\n", len(smaller.Violations))
		return chaos.Alike(result.Violations, smaller.Violations)
	}))
}

func violated(all []contract.Violation) error {
	if len(all) == 0 {
		return nil
	}
	return fmt.Errorf("the contract was violated %d times, first clause %d: %s", len(all), all[0].Clause, all[0].Name)
}

func joinedIDs(ids []int) string {
	var text []string
	for _, id := range ids {
		text = append(text, strconv.Itoa(id))
	}
	return strings.Join(text, ",")
}
