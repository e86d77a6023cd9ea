package main

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/counters"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// proxy is the loop that owns the state: it plans the Services of which something has changed,
// tells the actors, and tells others what the kernel has confirmed.
type proxy struct {
	self     string
	settings settings
	// families are those that this node has.
	families []lb.Family
	log      *slog.Logger
	now      func() time.Time
	from     sources
	to       sinks

	mode string
	// counted returns what was counted of a Service; nil if nothing counts.
	counted func(lb.Key) (counters.Counts, bool)
	// found returns what keeps this node from delivering, beside the rules; nil if nobody looks.
	found func() []lb.Finding
	// trouble says why the program lacks what it reads from the API server; nil if nobody asks.
	trouble func() string
	// connections calls each for every open TCP connection in the kernel's table.
	connections func(each func(conntrack.Connection)) error

	spans  confirmations
	began  time.Time
	runner *loop.Runner
	// settled is closed once the kernel's writer has tried all Services for the first time.
	settled chan struct{}

	// dirty are the Services that have changed, since when; the watches add to it. tell are others that are to be told
	// for whose sake they are refused frontends, since when.
	dirtyMu sync.Mutex
	dirty   map[lb.Key]time.Time
	tell    map[lb.Key]time.Time
	// yielded is set while Services wait that have let the others go first, turn is the namespace of the last large one
	// that was planned, and tellFrontends is the constant. Only the step uses them.
	yielded       bool
	turn          string
	tellFrontends int

	// nodesChanged is set by the watch of Nodes, gatesChanged by that of pods, factsChanged by whatever the
	// facts are read from.
	nodesChanged, gatesChanged, factsChanged atomic.Bool
	// ending is set when the proxy is about to remove its rules.
	ending atomic.Bool

	// mu guards what follows, which only the step changes; the status page and the metrics read it.
	mu       sync.Mutex
	records  map[lb.Key]*record
	waiting  string // what is needed before anything can be planned; "" once it is there
	facts    facts
	begun    bool // the kernel's writer has been told of all Services
	complete bool // the kernel's writer has tried all but those that it writes in parts
	written  bool // the kernel's writer has tried them all
	counts   counts
	// unconfirmed are the Services with changes that the kernel has not confirmed.
	unconfirmed map[lb.Key]bool
	// clusterNodes are the Nodes as they last were.
	clusterNodes *plan.Nodes
	// path is what is known of the way to endpoints; walked is set once it is known, or if nothing looks.
	path   plan.Path // without endpoints, see lost
	lost   plan.Lost
	walked bool
	// leftOut are the endpoints that do not answer probes, by Service. probed are the Services that ask for
	// a probe, telling those of which there may be something to tell.
	leftOut         map[lb.Key]plan.LeftOut
	probed, telling map[lb.Key]bool
	// scope says which addresses may be asked, askers how many nodes ask.
	scope  plan.ProbeScope
	askers int
	budget plan.ProbeBudget
	claims *plan.Claims
	shares *plan.Shares
	// relayShares are those of what the relay is told.
	relayShares *plan.Shares
	// affinity are those of the kernel's memory for session affinity.
	affinity *plan.AffinityShares
	lingers  lingers
	heard    bool            // a speaker
	dead     map[string]bool // nodes, as the speaker says
	direct   direct
	gates    gates
	// unannounced says of each VIP of the speaker why this node does not announce it yet, as the speaker says or said
	// last; the zero value if there is nothing to wait for. spoke is set once a speaker has said that. unspoken is since
	// when none does, zero while one does; unnamed are the VIPs of which the last one said nothing when it ended.
	unannounced map[netip.Addr]lb.Unannounced
	unnamed     map[netip.Addr]bool
	spoke       bool
	unspoken    time.Time
	requests    requests
	origins     map[netip.Addr]rescue.Origins // where connections to VIPs may be known, as speakers have said
}

// gap folds bursts of changes into one step. It is short, as a new Service and its slice come a few
// milliseconds apart, and the second of them would wait for the rest of it. What takes long is
// folded by those who do it: they take all that has come in the meantime.
const gap = time.Millisecond

// After burst steps that came sooner, as with many Services that are created one after the other,
// there is one step in each interval: each has a cost of its own.
const (
	interval = 5 * time.Millisecond
	burst    = 100
)

func newProxy(self string, settings settings, families []lb.Family, log *slog.Logger, now func() time.Time) *proxy {
	p := &proxy{
		self: self, settings: settings, families: families, log: log, now: now,
		settled: make(chan struct{}), began: now(), dirty: map[lb.Key]time.Time{}, tell: map[lb.Key]time.Time{},
		tellFrontends: tellFrontends, records: map[lb.Key]*record{},
		waiting: "the first step",
		counts:  newCounts(), unconfirmed: map[lb.Key]bool{}, lingers: newLingers(), direct: newDirect(), gates: newGates(),
		requests: newRequests(), leftOut: map[lb.Key]plan.LeftOut{}, probed: map[lb.Key]bool{}, telling: map[lb.Key]bool{},
		lost: plan.Lost{}, claims: plan.NewClaims(), shares: plan.NewShares(settings.limit),
		relayShares: plan.NewWholeShares(plan.MaxRelayedTogether, plan.MaxRelayedOfNode),
		affinity:    plan.NewAffinityShares(0, 0),
		origins:     map[netip.Addr]rescue.Origins{}, unannounced: map[netip.Addr]lb.Unannounced{},
	}
	p.runner = loop.New(p.step, loop.Options{Gap: gap, Every: interval, Burst: burst})
	return p
}

// markNode takes that a Node has changed.
func (p *proxy) markNode(string) {
	p.nodesChanged.Store(true)
	p.markFacts()
}

// markFacts takes that something has changed of which the facts are made: Nodes, interfaces,
// ServiceCIDRs, pools, or that one of the lists has come.
func (p *proxy) markFacts() {
	p.factsChanged.Store(true)
	p.runner.PokeNow()
}

// leave has health ports answer that this node shall not attract traffic any more.
func (p *proxy) leave() {
	p.ending.Store(true)
	p.runner.PokeNow()
}

// step does all that is due. It costs what has changed, not what there is.
func (p *proxy) step(ctx context.Context) (time.Duration, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	if (p.factsChanged.Swap(false) || p.waiting != "") && !p.look(now) {
		return 0, nil // unknown is not absent: whatever a predecessor wrote stays
	}
	p.hear(now)
	walked := p.walk(now)
	p.heed(now)
	p.meetGated(now)
	p.expire(now)
	early, _ := p.collect(now) // a large plan shall not delay the news of others
	if len(early) > 0 {
		p.announce(early)
	}
	dirty, told := p.takeDirty()
	touched := p.plan(ctx, dirty, told, now)
	p.tellDirect()
	p.retarget(dirty)
	p.probe(dirty, now)
	p.announce(p.with(touched, walked)) // before the rules: what goes is withdrawn first
	p.apply(touched)
	confirmed, all := p.collect(now)
	p.announce(confirmed)
	leaving := p.facts.leaving
	if p.ending.Load() {
		leaving = lb.ReasonNodeLeaving
	}
	p.to.health.SetNode(health.Node{Known: p.facts.known, Leaving: leaving, Unapplied: p.unapplied()})
	if !p.complete && (all || p.onlyPartsLeft()) && p.walked {
		p.completed()
	}
	if p.complete && all && !p.written {
		p.wrote()
	}
	p.serve()
	p.tellRequests()
	forget(p, dirty)
	forget(p, early)
	forget(p, confirmed)
	return sooner(p.lingers.next(now), p.direct.next(now), p.tellProbes(now), p.openGates(now)), nil
}

// sooner returns the shortest of some waits, of which 0 is none.
func sooner(waits ...time.Duration) (shortest time.Duration) {
	for _, wait := range waits {
		if wait > 0 && (shortest == 0 || wait < shortest) {
			shortest = wait
		}
	}
	return shortest
}

// look reads the facts, and reports whether they are complete.
func (p *proxy) look(now time.Time) bool {
	facts, waiting := p.settings.facts(p.self, p.from, p.facts)
	if waiting != p.waiting {
		p.waiting = waiting
		if waiting != "" {
			p.log.Info("waiting before writing rules", "for", waiting)
		}
	}
	if waiting != "" {
		return false
	}
	if p.clusterNodes == nil || p.nodesChanged.Swap(false) {
		nodes, before := p.from.nodes.All(), p.clusterNodes
		if p.clusterNodes = plan.NewNodes(nodes); before != nil && !p.clusterNodes.Equal(before) {
			p.markThose(slices.Collect(maps.Keys(p.direct.asking)), now)
			p.markThose(p.targeting(p.clusterNodes.Moved(before)), now) // which are pods, the Nodes decide too
			p.rerequest()
		}
		p.to.rescue.SetNodes(nodes[p.self].Addresses, otherNodes(nodes, p.self))
	}
	facts.external.Nodes = p.clusterNodes
	p.learn(facts, now)
	p.rescope(now)
	if len(p.settings.direct) > 0 {
		p.meet(p.from.nodes.All(), now)
	}
	return true
}

// onlyPartsLeft reports whether the kernel's writer has tried all Services but some that it writes in parts
// or that it cannot write: no other Service waits for those.
func (p *proxy) onlyPartsLeft() bool {
	for key := range p.unconfirmed {
		if r := p.records[key]; r.untried && len(r.alone) == 0 {
			return false
		}
	}
	return len(p.unconfirmed) > 0 // else the writer says so itself
}

// completed is for when the kernel's writer has tried all Services for the first time, but for those that
// it writes in parts: the speaker hears of all, and of those that what it heard before stays valid.
func (p *proxy) completed() {
	p.complete = true
	if !p.spoke {
		p.unspoken = p.now() // the speaker is asked from now on
	}
	if n := len(p.unconfirmed); n > 0 {
		p.log.Info("wrote the rules of all Services but some that are large or refused", "those", n)
	}
	deliveries := make(map[lb.Key][]lb.Delivery, len(p.records))
	for key, r := range p.records {
		deliveries[key] = r.deliveries
	}
	p.to.feed.Begin(deliveries)
}

// wrote is for when the kernel's writer has tried all Services for the first time, or has written one in
// parts for so long that its end is not waited for: from now on those without an outcome are not in the
// kernel.
func (p *proxy) wrote() {
	p.written = true
	p.log.Info("wrote the rules of all Services for the first time", "services", len(p.records))
	applied, unknown := make(map[lb.Key]plan.Service, len(p.records)), map[lb.Key]bool{}
	for key, r := range p.records {
		applied[key] = r.applied
		if slices.ContainsFunc(r.deliveries, func(d lb.Delivery) bool { return d.Unknown }) {
			unknown[key] = true
		}
	}
	p.announce(unknown)
	p.to.flows.Begin(applied)
	if p.to.counters != nil {
		p.to.counters.Begin(applied)
	}
	if p.to.loads != nil {
		p.to.loads.Begin(applied)
	}
	if p.to.relay != nil {
		p.to.relay.Begin(relayed(p, p.records))
	}
	close(p.settled)
}

// learn takes over what is known of the node.
func (p *proxy) learn(f facts, now time.Time) {
	before, first := p.facts, p.facts.self == ""
	p.facts = f
	if first || !f.sameRules(before) {
		p.to.rules.Configure(f.config)
		p.to.health.SetAddresses(f.healthAddresses)
	}
	if p.to.relay != nil {
		p.to.relay.SetAddresses(f.relayAddresses(p.families), f.nodePorts())
	}
	if first || !f.samePlans(before) {
		p.markAll(now)
	}
	p.markThose(p.claims.Configure(f.external, f.own), now)
}

// announce tells the feed and the health servers what is so for the named Services.
func (p *proxy) announce(keys map[lb.Key]bool) {
	if p.begun && len(keys) == 0 {
		return
	}
	deliveries := make(map[lb.Key][]lb.Delivery, len(keys))
	checks := make(map[lb.Key]health.Service, len(keys))
	for key := range keys {
		r := p.records[key]
		p.counts.add(r, -1)
		before, path := r.deliveries, r.along(p.path)
		r.deliveries = plan.Report(r.planned, r.applied, r.failure, path)
		if !p.written && r.starting() {
			r.deliveries = unknown(r.deliveries, plan.Report(r.planned, r.planned, nil, path))
		}
		p.spans.told(p.now(), p.complete, r.planned.Age.UID, before, r.deliveries)
		p.counts.add(r, 1)
		deliveries[key] = r.deliveries
		checks[key] = health.Service{Port: r.planned.HealthPort, Local: plan.Health(r.planned, r.applied, path)}
	}
	p.to.feed.Update(deliveries)
	if p.to.relay != nil {
		p.to.relay.Update(relayed(p, keys))
	}
	if p.begun {
		p.to.health.Update(checks)
	} else {
		p.to.health.Begin(checks)
	}
}
