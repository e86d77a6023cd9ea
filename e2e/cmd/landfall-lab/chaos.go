package main

import (
	"context"
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
	onward  bool   // tell the whole story, whatever is violated
	shrink  int    // how often parts are run again to find the fewest events that violate
}

// makeTrouble runs it, and says how to run it again if it violates the contract.
func makeTrouble(ctx context.Context, out io.Writer, t trouble, options lab.Options) error {
	o := chaos.Options{Story: plot.New(t.seed), Length: time.Duration(t.minutes) * time.Minute, KeepGoing: t.onward,
		Lab: options, Progress: func(line string) { fmt.Fprintln(out, line) }}
	if t.only != "" {
		var ids []int
		for text := range strings.SplitSeq(t.only, ",") {
			id, err := strconv.Atoi(text)
			if err != nil {
				return fmt.Errorf("--only %q: want numbers of events with commas between them", t.only)
			}
			ids = append(ids, id)
		}
		o.Story, o.Length = plot.With(t.seed, chaos.Cast(), ids), 0
	}
	if t.without != "" {
		guard, known := chaos.Guards[t.without]
		if !known {
			return fmt.Errorf("no guard %q: want one of %v", t.without, slices.Sorted(maps.Keys(chaos.Guards)))
		}
		o.Without = guard
	}
	result, err := chaos.Run(ctx, o)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, chaos.Report(result))
	if len(result.Violations) == 0 {
		return nil
	}
	again, s := fmt.Sprintf("landfall-lab chaos --seed %d", t.seed), result.Told
	if t.without != "" {
		again += " --without " + t.without
	}
	if t.shrink > 0 {
		o.KeepGoing, o.Length = false, 0
		s = s.Until(result.Violations[0].Round)
		ids := plot.Shrink(s.IDs(), t.shrink, func(part []int) bool {
			o.Story = s.Only(part)
			fmt.Fprintf(out, "\nagain with %v\n", part)
			smaller, err := chaos.Run(ctx, o)
			if err != nil {
				fmt.Fprintf(out, "the run failed, which does not count: %v\n", err)
				return false
			}
			fmt.Fprintf(out, "%d violations\n", len(smaller.Violations))
			return chaos.Alike(result.Violations, smaller.Violations)
		})
		s = s.Only(ids)
		fmt.Fprintf(out, "\nthe fewest events that violate it:\n%s", chaos.Tell(s))
	}
	return fmt.Errorf("%w\nagain: %s --only %s", violated(result.Violations), again, joinedIDs(s.IDs()))
}

func violated(all []contract.Violation) error {
	return fmt.Errorf("the contract was violated %d times, first clause %d: %s", len(all), all[0].Clause, all[0].Name)
}

func joinedIDs(ids []int) string {
	var text []string
	for _, id := range ids {
		text = append(text, strconv.Itoa(id))
	}
	return strings.Join(text, ",")
}
