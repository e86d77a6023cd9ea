package chaos

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	requestTimeout = 5 * time.Second
	// settleTime is how long the cluster may take after a round until every clause about its state holds. It is much
	// more than it needs on a quiet machine: a few seconds, and up to half a minute where clients of the API server
	// wait before they try again.
	settleTime = 2 * time.Minute
	lookEvery  = 500 * time.Millisecond
	tellEvery  = 5 * time.Second
	flowsEach  = 2
)

// Options say what to run.
type Options struct {
	// Story is told as it is, unless there is a Length: then rounds of its seed are drawn until that time is up, from
	// when all was well first.
	Story  story.Story
	Length time.Duration
	// Without is a guard to take out.
	Without Guard
	// Lab are the lab's name, programs and tool, if not the usual ones.
	Lab lab.Options
	// KeepGoing tells the whole story, whatever is violated.
	KeepGoing bool
	// Progress gets a line for each thing that happens; nil drops them.
	Progress func(line string)
}

// rounds returns those to run.
func (o Options) rounds() iter.Seq[story.Round] {
	if o.Length == 0 {
		return slices.Values(o.Story.Rounds)
	}
	return func(yield func(story.Round) bool) {
		began := time.Now()
		for round := range story.Draw(o.Story.Seed, Cast()) {
			if time.Since(began) >= o.Length || !yield(round) {
				return
			}
		}
	}
}

// Result is what a run showed.
type Result struct {
	// Told is what was run of the story.
	Told       story.Story
	Violations []contract.Violation
	// Journal is what happened in the first round with a violation and the minute before it, and what the agents logged;
	// so too of the round in which the run failed.
	Journal string
	// Samples and Flows count the requests and connections of clients; Settled is how long the cluster took to settle, by
	// round, and Length how long the rounds took.
	Samples, Flows int
	Settled        []time.Duration
	Length         time.Duration
	// Changes are how often the API server took a change from the run, and Fastest how often in one second.
	Changes, Fastest int
	// LoadBefore and LoadAfter are the machine's load averages when the run began and ended.
	LoadBefore, LoadAfter string
}

// runner is a run. Events run in goroutines of their own; what they share is guarded by mu.
type runner struct {
	lab      *lab.Lab
	cast     story.Cast
	services []lab.Service // those that are always there
	wire     *wire
	macs     map[string]string
	expected map[string][]netip.Addr
	journal  *journal
	traffic  *traffic
	seed     uint64
	without  Guard

	rounds []mark // the beginning of each

	mu      sync.Mutex
	spans   []contract.Span
	logged  map[int]bounds // by event
	holders []contract.Holder
	rolled  int
	idle    bool // the pods of the idle Service are not ready
	led     int  // which controller led when the API server last said so
}

// start starts a lab with all that is always there, and returns once all is well with it. end takes it down; it must
// be called in any case.
func start(ctx context.Context, o Options) (r *runner, end func() error, err error) {
	l, err := lab.Start(ctx, cluster(), o.Lab)
	if err != nil {
		return nil, func() error { return nil }, err
	}
	r = &runner{lab: l, cast: Cast(), services: configured(o.Story.Config), journal: &journal{progress: o.Progress},
		seed: o.Story.Seed, without: o.Without, macs: map[string]string{}, expected: map[string][]netip.Addr{}}
	r.journal.add("seed %d: %s", o.Story.Seed, o.Story.Config)
	w, err := openWire(l)
	if err != nil {
		return nil, l.Close, err
	}
	r.wire = w
	end = func() error { return errors.Join(w.close(), l.Close()) }
	if err := r.prepare(ctx); err != nil {
		return nil, end, fmt.Errorf("before the first round: %w", err)
	}
	return r, end, nil
}

// values are those of the chart that a story asks for.
func values(c story.Config) map[string]any {
	return map[string]any{"relay": map[string]any{"enabled": true},
		"proxy": map[string]any{"mode": c.Mode, "directForwarding": c.Direct}}
}

// Run starts a lab, tells the story, and stops after the first round that violates a clause, unless it is to keep
// going. An error says that the run itself failed; the result is what it showed until then.
func Run(ctx context.Context, o Options) (result Result, err error) {
	var wrote writes
	o.Lab.Args, o.Lab.Values, o.Lab.Wrote = o.Without.Args, values(o.Story.Config), wrote.note
	o.Lab.Values["controller"] = map[string]any{"replicas": controllers}
	r, end, err := start(ctx, o)
	defer func() { err = errors.Join(err, end()) }()
	if err != nil {
		return result, err
	}
	began, load := time.Now(), loadAverages()
	result, err = tell(ctx, o, r.journal, r.round, r.decisions)
	result.Changes, result.Fastest = wrote.since(began)
	result.LoadBefore, result.LoadAfter = load, loadAverages()
	return result, err
}

// tell runs one round after the other, judges each, and keeps what happened before the first violation: from a minute
// before its round, which may have taken long to settle. A round that fails is judged too, and is the last. One that
// was interrupted is not: the cluster had no time to settle.
func tell(ctx context.Context, o Options, j *journal,
	run func(context.Context, story.Round) (contract.Evidence, time.Duration, error),
	decisions func(since time.Time) string) (result Result, err error) {
	result.Told = story.New(o.Story.Seed)
	first := time.Now()
	for round := range o.rounds() {
		began := time.Now()
		evidence, took, err := run(ctx, round)
		if ctx.Err() != nil {
			return result, ctx.Err()
		}
		result.Told.Rounds = append(result.Told.Rounds, round)
		result.Length = time.Since(first)
		result.Samples += len(evidence.Samples)
		result.Flows += len(evidence.Flows)
		result.Settled = append(result.Settled, took)
		bad := contract.Judge(evidence)
		for _, v := range bad {
			j.add("%s clause %d, %s: %s", contract.Violated, v.Clause, v.Name, v.Text)
		}
		if err != nil {
			err = fmt.Errorf("round %d: %w", round.Number, err)
			j.add("FAILED %v", err)
		}
		if err != nil || len(bad) > 0 && len(result.Violations) == 0 {
			since := began.Add(-time.Minute)
			result.Journal += j.since(since) + decisions(since)
		}
		result.Violations = append(result.Violations, bad...)
		if err != nil {
			return result, err
		}
		if len(bad) > 0 && !o.KeepGoing {
			break
		}
	}
	return result, nil
}

// prepare creates the objects, and waits until all is well.
func (r *runner) prepare(ctx context.Context) error {
	if err := r.findMACs(); err != nil {
		return err
	}
	if err := r.applyObjects(ctx); err != nil {
		return err
	}
	for _, s := range r.services {
		if err := r.lab.AddService(ctx, s); err != nil {
			return err
		}
	}
	s, _ := r.settle(ctx)
	if bad := contract.Unsettled(s); len(bad) > 0 {
		return fmt.Errorf("the cluster does not get well: %v", bad)
	}
	for _, svc := range s.Services {
		r.expected[svc.Name] = svc.Addresses
		r.journal.add("%s holds %v", svc.Name, svc.Addresses)
	}
	return nil
}

// now is the time; a method, so that evidence is stamped in one place.
func (r *runner) now() time.Time { return time.Now() }

// settle looks at the cluster until nothing is wrong with it, or for [settleTime].
func (r *runner) settle(ctx context.Context) (s contract.Snapshot, took time.Duration) {
	began, told := time.Now(), time.Now()
	for {
		s = r.look(ctx)
		took = time.Since(began)
		bad := contract.Unsettled(s)
		if len(bad) == 0 || took > settleTime || ctx.Err() != nil {
			return s, took
		}
		if time.Since(told) > tellEvery {
			told = time.Now()
			r.journal.add("%d things are not as they should be, the first: %s: %s", len(bad), bad[0].Name, bad[0].Text)
		}
		time.Sleep(lookEvery)
	}
}

// round runs one round, lets the cluster settle, and returns what was seen.
func (r *runner) round(ctx context.Context, round story.Round) (e contract.Evidence, took time.Duration, err error) {
	name := map[bool]string{true: "calm", false: "storm"}[round.Calm]
	r.journal.add("round %d: %s", round.Number, name)
	r.rounds = append(r.rounds, mark{r.now(), r.logs(deciders...).lengths()})
	r.mu.Lock()
	r.spans, r.holders, r.logged = nil, nil, map[int]bounds{}
	r.mu.Unlock()
	r.traffic = startTraffic(ctx, r.lab, func(what string) {
		if round.Calm {
			r.journal.add("LOST %s", what)
		}
	})
	for _, s := range r.services {
		if s.Name == idleService {
			continue
		}
		for _, t := range targetsOf(r.lab.Cluster(), s, r.expected[s.Name]) {
			r.traffic.sample(ctx, t, sampleEvery)
			for range flowsEach {
				if round.Calm && t.network == "tcp" {
					r.traffic.flow(t)
				}
			}
		}
	}
	holders := r.watchHolders(ctx)
	if round.Calm {
		err = r.inTurn(ctx, round.Events)
	} else {
		err = errors.Join(r.atOnce(ctx, round.Events), r.redo(ctx, round))
	}
	s, took := r.settle(ctx)
	r.journal.add("round %d: settled after %v", round.Number, took.Round(100*time.Millisecond))
	holders()
	e = contract.Evidence{Round: round, Settled: s}
	e.Samples, e.Flows = r.traffic.stop()
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.spans {
		r.returned(&r.spans[i])
	}
	e.Spans, e.Holders = r.spans, r.holders
	slices.SortFunc(e.Spans, func(a, b contract.Span) int { return a.Began.Compare(b.Began) })
	return e, took, err
}

// inTurn does one event after the other.
func (r *runner) inTurn(ctx context.Context, events []story.Event) error {
	for _, e := range events {
		if err := r.event(ctx, e, true); err != nil {
			return err
		}
		time.Sleep(lookEvery)
	}
	return nil
}

// atOnce does events at their times. Churn is done in its order, so that what is removed was added before.
func (r *runner) atOnce(ctx context.Context, events []story.Event) error {
	began := time.Now()
	var g lab.Group
	do := func(events []story.Event) {
		g.Run(func() error {
			for _, e := range events {
				time.Sleep(time.Until(began.Add(e.At)))
				if err := r.event(ctx, e, false); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var churn []story.Event
	for _, e := range events {
		if e.Kind.IsChurn() {
			churn = append(churn, e)
		} else {
			do([]story.Event{e})
		}
	}
	do(churn)
	return g.Wait()
}

// event does one event, and notes how it went. All that it did has ended when it returns, save what stays.
func (r *runner) event(ctx context.Context, e story.Event, calm bool) error {
	span := contract.Span{Event: e, Began: r.now()}
	logged := bounds{began: r.logs("speaker").lengths()}
	r.mu.Lock()
	r.spans = append(r.spans, span) // a loss may be seen before the event ends
	r.mu.Unlock()
	if e.Node != "" {
		if v, err := r.view(ctx, e.Node); err == nil {
			span.OwnedBefore, span.Known = v.answering(), true
		}
	}
	r.journal.add("begin %s", e)
	if e.Kind.TakesNode() {
		r.journal.add("%s owns %v", e.Node, span.OwnedBefore)
	}
	err := r.do(ctx, deed{e, &span, calm})
	span.Ended = r.now()
	r.journal.add("end   %s", e)
	now := r.logs("speaker")
	logged.ended = now.lengths()
	r.finish(&span, now.after(logged.began))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.logged[e.ID] = logged
	for i := range r.spans {
		if r.spans[i].ID == e.ID {
			r.spans[i] = span
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", e, err)
	}
	return nil
}

// watchHolders notes who holds which address, as often as the API server answers, until what it returns is called.
func (r *runner) watchHolders(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			r.noteHolders(ctx)
			time.Sleep(lookEvery)
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

func (r *runner) noteHolders(ctx context.Context) {
	services, err := r.listServices(ctx)
	if err != nil {
		return // it is away, which is not judged here
	}
	at := r.now()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range services {
		for _, a := range s.Addresses {
			r.holders = append(r.holders, contract.Holder{Seen: at, Service: s.Name, Share: s.Share, Address: a})
		}
	}
}
