package chaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/flat"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

const (
	// warmUp is how many cycles come before figures count: caches fill, and pools of buffers grow.
	warmUp = 2
	// rest is how long the cluster is left alone before its figures are taken. Connections that have ended are gone from
	// conntrack by then.
	rest = 20 * time.Second
	// churned is how many Services of their own come and go in a busy round.
	churned = 6
)

// shortTimeouts has a node forget connections that have ended sooner than rest. Those that have not ended are
// remembered as long as ever.
const shortTimeouts = `cd /proc/sys/net/netfilter && for each in tcp_timeout_time_wait tcp_timeout_close \
	tcp_timeout_fin_wait tcp_timeout_last_ack tcp_timeout_syn_sent tcp_timeout_syn_recv udp_timeout udp_timeout_stream \
	icmp_timeout icmpv6_timeout; do echo 10 >nf_conntrack_$each || exit 1; done`

// SoakResult is what a soak showed.
type SoakResult struct {
	// Cycles ran after the warm-up, in which each figure was taken once; the counts below are of these.
	Cycles   int            `json:"cycles"`
	Events   int            `json:"events"`
	Samples  int            `json:"requestsOfClients"`
	Flows    int            `json:"connectionsOfClients"`
	Length   time.Duration  `json:"length"`
	Verdicts []flat.Verdict `json:"verdicts"` // the worst first
	Series   []flat.Series  `json:"series"`
}

// Soak runs cycles of churn for a time. Each ends in the state that it began with, and there all figures are taken. An
// error says that the run itself failed.
func Soak(ctx context.Context, length time.Duration, o Options) (result SoakResult, err error) {
	o.Story.Config = story.Config{Mode: "nftables", Direct: true}
	o.Lab.Values = values(o.Story.Config)
	o.Lab.Values["metrics"] = map[string]any{"secure": false}
	r, end, err := start(ctx, o)
	defer func() { err = errors.Join(err, end()) }()
	if err != nil {
		return result, err
	}
	for _, n := range r.lab.Cluster().Nodes {
		if _, err := r.lab.Exec(ctx, n.Name, "sh", "-c", shortTimeouts); err != nil {
			return result, err
		}
	}
	series := map[figure]*flat.Series{}
	var began time.Time
	for number := 0; number <= warmUp || time.Since(began) < length; number++ {
		if number == warmUp {
			began, result.Events, result.Samples, result.Flows = time.Now(), 0, 0, 0
		}
		found, err := r.cycle(ctx, number, &result)
		if err != nil {
			return result, fmt.Errorf("cycle %d: %w", number, err)
		}
		if number >= warmUp {
			result.Cycles++
			note(series, time.Since(began), found)
		}
	}
	result.Length = time.Since(began)
	for _, s := range series {
		result.Series = append(result.Series, *s)
		result.Verdicts = append(result.Verdicts, flat.Judge(*s))
	}
	slices.SortFunc(result.Series, func(a, b flat.Series) int { return strings.Compare(a.Of+a.Figure, b.Of+b.Figure) })
	slices.SortFunc(result.Verdicts, flat.Worse)
	return result, nil
}

// cycle runs a calm round and a busy one, waits, and takes the figures.
func (r *runner) cycle(ctx context.Context, number int, result *SoakResult) (map[figure]float64, error) {
	began := time.Now()
	before, err := r.asked(ctx)
	if err != nil {
		return nil, err
	}
	for _, round := range soakRounds(number, r.cast) {
		e, _, err := r.round(ctx, round)
		if err != nil {
			return nil, err
		}
		result.Events, result.Samples, result.Flows = result.Events+len(round.Events), result.Samples+len(e.Samples),
			result.Flows+len(e.Flows)
	}
	resting := time.Now()
	middle, err := r.asked(ctx)
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(rest):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	after, err := r.asked(ctx)
	if err != nil {
		return nil, err
	}
	rested, took := time.Since(resting), time.Since(began)
	found, err := r.figures(ctx)
	if err != nil {
		return nil, err
	}
	found[figure{allNodes, requests}] = (after - before) / took.Minutes()
	found[figure{allNodes, atRest}] = (after - middle) / rested.Minutes()
	r.journal.add("cycle %d: took %d figures", number, len(found))
	return found, nil
}

// soakRounds returns what happens in a cycle: each ends as it began. Nodes and Services take turns.
func soakRounds(number int, cast story.Cast) []story.Round {
	node := func(n int) string { return cast.Nodes[(number+n)%len(cast.Nodes)] }
	service := func(n int) string { return cast.Services[(number+n)%len(cast.Services)] }
	name := func(n int) string { return fmt.Sprintf("churn-%d", number*(churned+1)+n+1) }
	calm := story.Round{Number: 2*number + 1, Calm: true, Events: []story.Event{
		{Kind: story.AddService, Service: name(churned)},
		{Kind: story.DrainLabel, Node: node(0), For: time.Second},
		{Kind: story.Burst},
		{Kind: story.RollPod, Service: service(0), For: time.Second},
		{Kind: story.EditPool, For: time.Second},
		{Kind: story.RemoveService, Service: name(churned)},
		{Kind: story.DrainTaint, Node: node(1), For: time.Second},
	}}
	busy := story.Round{Number: 2*number + 2, Events: []story.Event{
		{Kind: story.Flood},
		{Kind: story.DrainTaint, Node: node(2), For: 3 * time.Second},
		{Kind: story.EditPool, At: time.Second, For: 2 * time.Second},
		{Kind: story.AddPeer, At: time.Second, For: 3 * time.Second},
		{Kind: story.RollPod, At: time.Second, Service: service(1), For: time.Second},
		{Kind: story.Unready},
		{Kind: story.Burst},
	}}
	for n := range churned {
		busy.Events = append(busy.Events, story.Event{Kind: story.AddService, Service: name(n)})
	}
	busy.Events = append(busy.Events, story.Event{Kind: story.Ready}, story.Event{Kind: story.Burst})
	for n := range churned {
		busy.Events = append(busy.Events, story.Event{Kind: story.RemoveService, Service: name(n)})
	}
	id := 0
	rounds := []story.Round{calm, busy}
	for _, round := range rounds {
		for i := range round.Events {
			id++
			round.Events[i].ID = number*100 + id
		}
	}
	return rounds
}

// note adds figures to their series. What is missing, such as the elements of a set that is not there now, is none.
func note(series map[figure]*flat.Series, at time.Duration, found map[figure]float64) {
	var times []time.Duration
	for _, s := range series {
		times = s.At
		break
	}
	for f := range found {
		if series[f] == nil {
			series[f] = &flat.Series{Of: f.of, Figure: f.name, Bound: boundOf(f.name), At: slices.Clone(times),
				Values: make([]float64, len(times))}
		}
	}
	for f, s := range series {
		s.At, s.Values = append(s.At, at), append(s.Values, found[f])
	}
}

// SoakReport says what a soak showed: of each figure the one that grew most.
func SoakReport(r SoakResult) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d cycles in %v after %d of warm-up: %d events, %d requests and %d connections of clients\n",
		r.Cycles, r.Length.Round(time.Second), warmUp, r.Events, r.Samples, r.Flows)
	worst, count := map[string]flat.Verdict{}, map[string]int{}
	for _, v := range r.Verdicts { // the worst first
		name := kindOf(v)
		if _, seen := worst[name]; !seen {
			worst[name] = v
		}
		count[name]++
	}
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "figure\tof\tseries\tfirst\tlast\tfit\tallowed\t")
	for _, name := range slices.Sorted(maps.Keys(worst)) {
		v := worst[name]
		judged := "NOT FLAT"
		if v.Flat {
			judged = "flat"
		}
		if boundOf(v.Figure).Shown {
			judged = "shown"
		}
		fmt.Fprintf(table, "%s\t%s\t%d\t%.1f\t%.1f\t%+.1f\t%+.1f\t%s\n", v.Figure, v.Of, count[name], v.First, v.Last, v.Fit,
			v.Allowed, judged)
	}
	_ = table.Flush() // into memory
	if bad := r.NotFlat(); len(bad) > 0 {
		fmt.Fprintf(&b, "%d of %d figures are not flat:\n", len(bad), len(r.Verdicts))
		for _, v := range bad {
			fmt.Fprintf(&b, "  %s: %s: %.1f, then %.1f\n", v.Of, v.Figure, v.First, v.Last)
		}
	} else {
		fmt.Fprintf(&b, "none of %d figures grows\n", len(r.Verdicts))
	}
	return b.String()
}

// kindOf returns under which name figures share a line: those of one program on all nodes do.
func kindOf(v flat.Verdict) string {
	for _, program := range []string{"controller", "speaker", "relay", "proxy"} {
		if _, rest, found := strings.Cut(v.Of, "-"+program); found {
			return program + rest + " " + v.Figure
		}
	}
	return v.Figure
}

// NotFlat returns the figures that are not.
func (r SoakResult) NotFlat() []flat.Verdict {
	return slices.DeleteFunc(slices.Clone(r.Verdicts), func(v flat.Verdict) bool { return v.Flat })
}
