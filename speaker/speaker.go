package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/ahead"
	"github.com/landfall-lb/landfall/speaker/handoff"
	"github.com/landfall-lb/landfall/speaker/holders"
	"github.com/landfall-lb/landfall/speaker/ownership"
	"github.com/landfall-lb/landfall/speaker/partition"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/routes"
	"github.com/landfall-lb/landfall/speaker/spans"
)

// speaker is the loop: it collects what has changed, has the rooms decide what follows, and tells
// the actors.
type speaker struct {
	self    string
	opts    options
	log     *slog.Logger
	from    sources
	to      sinks
	runner  *loop.Runner
	changes changes
	beats   *beats // nil where no neighbors are watched
	// found returns what keeps announcements of this node from clients; nil if nobody looks.
	found func() []lb.Finding
	// trace takes spans; nil without --otlp-endpoint.
	trace func(lb.Span)
	// trouble says why the program lacks what it reads from the API server; nil if nobody asks.
	trouble func() string
	// candidates are the interfaces that decide something, as of the last step. Only the step uses them.
	candidates []lb.Interface
	// conflictLines bounds what is logged of conflicting hosts.
	conflictLines loop.Lines

	// mu guards what follows, which only the step changes; the status page and the metrics read it.
	mu    sync.Mutex
	phase phase
	rooms rooms
}

// options are what an administrator may choose.
type options struct {
	class        string   // loadBalancerClass of the Services that are ours
	exclude      []string // shell patterns of interfaces that answer only when named
	cordonDrains bool
	// ignoreExclude has a node with plan.LabelExclude announce all the same.
	ignoreExclude bool
	// See plan.Facts.
	ignoreNetwork, requireReady, checkForwarding bool

	convergence time.Duration // that routers get to choose other routes before a planned withdrawal
	bgpListens  bool          // peers can open sessions
	// flapInterval is how often a VIP that flaps is announced anew.
	flapInterval time.Duration
	onConflict   plan.OnConflict
	returnHold   time.Duration // that a node which may have been cut off waits for the others
}

// phase is where in its life the speaker is.
type phase struct {
	waiting   string // what the speaker waits for before its first plan; "" once it has planned
	installed bool   // the DaemonSet was there
	stopping  bool
	// restarting is set, while the speaker stops, when a successor is expected on this node.
	restarting bool
	wakes      uint64 // how often the process has woken up, as of the last step
	gates      bool   // the proxy asks what is unannounced, as of the last step
	// node is this node's object as of the last step, or, once it is deleted, as it was; nil if there never was one.
	node *lb.Node
}

// rooms are the sub-states of the loop. Each decides from values, and knows neither the loop nor
// the others; the step takes from one what the next has to know.
type rooms struct {
	holders   holders.State
	ahead     ahead.State
	partition partition.State
	routes    routes.State
	ownership ownership.State
	handoff   handoff.State
	spans     spans.State
	// advertised are the Ready conditions of L2Advertisements; nil where another node reports them.
	advertised map[string]lb.Condition
}

func newSpeaker(self string, opts options, log *slog.Logger) *speaker {
	s := &speaker{
		self: self, opts: opts, log: log, phase: phase{waiting: "the API server"},
		rooms: rooms{routes: routes.New(opts.flapInterval), ownership: ownership.New(opts.flapInterval)},
	}
	s.runner = loop.New(func(context.Context) (time.Duration, error) { return s.step(time.Now()), nil }, often())
	s.changes.poke, s.changes.now = s.runner.Poke, s.runner.PokeNow
	return s
}

// often returns how often the step runs. Each new Service causes a dozen changes on every node: those of
// its object, what the proxy reports, the claims of the others and what this node then answers for. One or
// two Services a second do not use up the burst; while more keep coming, ten steps a second take them in.
// Without a burst, the rest of loop.Bulk alone allows 40 a second, so more than half of these are no moderate rate.
func often() loop.Options {
	o := loop.Bulk()
	o.Every, o.Burst, o.Regain = 100*time.Millisecond, 60, 50*time.Millisecond
	return o
}
