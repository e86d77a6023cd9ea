package chaos

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// Guard is something that keeps addresses from being black holes, as it is taken out.
type Guard struct {
	// Args are the arguments that do it, by container.
	Args map[string][]string
	// Sudden has programs killed that would be stopped, so that a speaker cannot hand over.
	Sudden bool
}

// Guards are all of them, by name. A run without one must find a violation.
var Guards = map[string]Guard{
	"detection": {Args: map[string][]string{"speaker": {"--bfd-neighbors=0", "--probe-interval=1m"}}},
	"gate":      {Args: map[string][]string{"speaker": {"--gate=none"}}},
	"hold":      {Args: map[string][]string{"speaker": {"--restart-hold=0s"}}},
	"handover":  {Sudden: true},
	"rescue":    {Args: map[string][]string{"proxy": {"--rescue=false"}}},
	"return": {Args: map[string][]string{"speaker": {"--return-hold=0s", "--bfd-neighbors=0"},
		"proxy": {"--path-check=off"}}},
}

// mostShown is how many violations of one clause a report shows.
const mostShown = 5

// Report says what a run showed.
func Report(r Result) string {
	var b strings.Builder
	slowest := time.Duration(0)
	for _, took := range r.Settled {
		slowest = max(slowest, took)
	}
	fmt.Fprintf(&b, "seed %d: %s, %d rounds, %d events in %v, %d requests and %d connections; settled after at most %v\n",
		r.Told.Seed, r.Told.Config, len(r.Told.Rounds), len(r.Told.IDs()), r.Length.Round(time.Second), r.Samples, r.Flows,
		slowest.Round(100*time.Millisecond))
	fmt.Fprintf(&b, "%d changes of objects, up to %d in a second; %s\n", r.Changes, r.Fastest, kinds(r.Told))
	fmt.Fprintf(&b, "load of the machine: %s at the beginning, %s at the end\n", r.LoadBefore, r.LoadAfter)
	if len(r.Violations) == 0 {
		b.WriteString("every clause held\n")
	}
	shown := map[string]int{}
	for _, v := range r.Violations {
		if shown[v.Name]++; shown[v.Name] <= mostShown {
			fmt.Fprintf(&b, "%s in round %d: clause %d, %s: %s\n", contract.Violated, v.Round, v.Clause, v.Name, v.Text)
		}
	}
	for _, v := range r.Violations {
		if n := shown[v.Name]; n > mostShown {
			fmt.Fprintf(&b, "%s: %d in all\n", v.Name, n)
			shown[v.Name] = 0
		}
	}
	if r.Journal != "" {
		fmt.Fprintf(&b, "what happened from a minute before the first round that went wrong on:\n%s", r.Journal)
	}
	return b.String()
}

// loadAverages returns those of the machine, over 1, 5 and 15 minutes.
func loadAverages() string {
	text, _ := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(text))
	return strings.Join(fields[:min(3, len(fields))], " ")
}

// kinds says how many events of each kind a story has.
func kinds(s story.Story) string {
	count := map[story.Kind]int{}
	for _, r := range s.Rounds {
		for _, e := range r.Events {
			count[e.Kind]++
		}
	}
	var texts []string
	for _, kind := range slices.Sorted(maps.Keys(count)) {
		texts = append(texts, fmt.Sprintf("%s %d", kind, count[kind]))
	}
	return strings.Join(texts, ", ")
}

// Tell returns a story's events, a line each.
func Tell(s story.Story) string {
	var b strings.Builder
	for _, r := range s.Rounds {
		for _, e := range r.Events {
			fmt.Fprintf(&b, "  round %d, after %v: %s\n", r.Number, e.At, e)
		}
	}
	return b.String()
}

// Alike reports whether two runs violate a clause that is the same.
func Alike(a, b []contract.Violation) bool {
	return slices.ContainsFunc(a, func(v contract.Violation) bool {
		return slices.ContainsFunc(b, func(w contract.Violation) bool { return v.Name == w.Name })
	})
}
