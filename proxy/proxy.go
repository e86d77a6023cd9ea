package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/across"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/counters"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/path"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/readiness"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// table is what the API server has of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Keys() []K
	Synced() bool
}

// sources are where the proxy reads.
type sources struct {
	services   table[lb.Key, lb.Service]
	slices     table[lb.Key, []lb.Slice]
	nodes      table[string, lb.Node]
	interfaces func() ([]lb.Interface, bool)
	// update returns which nodes are dead and what else the speaker has said since the last call, if
	// there is one.
	update   func() (lb.FeedUpdate, bool)
	networks table[string, []netip.Prefix] // of cluster IPs
	pools    table[string, []lb.Range]     // the addresses of IPAddressPools
	routers  table[string, lb.Router]      // of BGPPeers
	// gated are this node's pods with a readiness gate; nil if none waits for the proxy.
	gated table[lb.Key, lb.GatedPod]
	// path returns what of the way to endpoints has changed, and whether it is known; nil if nothing
	// looks.
	path func() (news path.News, known bool)
	// vrfs returns why the kernel does not deliver what comes in through each VRF, or "", and whether that is known; nil
	// if nothing looks.
	vrfs func() (states map[string]string, known bool)
	// probes returns of which Services it has changed which endpoints do not answer this node's probes,
	// with all of these; nil if nothing probes.
	probes func() map[lb.Key]plan.LeftOut
	// relayPorts returns where the node's relay accepts connections; nil if the rules need not know.
	relayPorts func() map[lb.Family]uint16
}

// updates are how an actor of Services is told: see actor.Updater.
type updates[V any] interface {
	Begin(all map[lb.Key]V)
	Update(changes map[lb.Key]V)
}

// sinks are where the proxy acts.
type sinks struct {
	rules interface {
		updates[plan.Service]
		Configure(plan.Config)
		Outcomes() (outcomes map[lb.Key]plan.Outcome, all bool)
	}
	flows updates[plan.Service]
	// counters count what Services get; nil if nothing does.
	counters updates[plan.Service]
	// loads counts connections for schedulers that choose by them; nil in a mode that has none of these.
	loads  updates[plan.Service]
	health interface {
		updates[health.Service]
		SetNode(health.Node)
		SetAddresses(map[lb.Family][]netip.Addr)
	}
	feed updates[[]lb.Delivery]
	// targets are the endpoints whose way is looked at; nil if none is.
	targets updates[[]plan.Target]
	// probes asks endpoints whether they answer; nil if nothing does.
	probes updates[plan.Probing]
	// rescue hands over packets of connections that this node does not know.
	rescue interface {
		Begin(all map[netip.Addr]*rescue.Origins)
		Update(changes map[netip.Addr]*rescue.Origins)
		SetGone(nodes []netip.Addr, cutOff bool)
		SetNodes(self, others []netip.Addr)
		SetHanded(links []int)
		SetDirect(vips, far []netip.Addr)
		Confirm(number uint64)
	}
	// senders finds out the MAC addresses of nodes that hand packets over; nil if nothing does.
	senders interface {
		Set(nodes []netip.Addr)
		Known() []lb.MAC
	}
	// across finds out which nodes behind routers take what is handed over; nil if nothing does.
	across interface {
		Set(across.Nodes)
		States() map[netip.Addr]across.State
	}
	// relay tells the relay what is relayed; nil without one.
	relay interface {
		updates[*plan.Relayed]
		SetAddresses(relay map[lb.Family]netip.Addr, nodePorts []netip.Addr)
		SetBlocked(ways map[plan.RelayWay]bool)
		State() relayfeed.State
	}
	// gates opens readiness gates; nil if no pod waits for the proxy.
	gates interface {
		Set(open map[lb.Key]readiness.Gate)
	}
	// warn reports something wrong with a Service.
	warn func(s lb.Service, reason lb.Reason, message string)
	// probed reports what probes have found of a Service.
	probed func(s lb.Service, reason lb.Reason, message string)
	// latency is told how long it took from a change to its confirmation by the kernel.
	latency func(time.Duration)
	// programmed is told the same from the change's own time, if that is known.
	programmed func(time.Duration)
}

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

	// dirty are the Services that have changed, since when; the watches add to it.
	dirtyMu sync.Mutex
	dirty   map[lb.Key]dirt
	// yielded is set while large Services wait that have let the others go first. Only the step uses it.
	yielded bool

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
	path   plan.Path
	walked bool
	// leftOut are the endpoints that do not answer probes, by Service. probed are the Services that ask for
	// a probe, telling those of which there may be something to tell.
	leftOut         map[lb.Key]plan.LeftOut
	probed, telling map[lb.Key]bool
	// scope says which addresses may be asked, askers how many nodes ask.
	scope   plan.ProbeScope
	askers  int
	budget  plan.ProbeBudget
	claims  *plan.Claims
	lingers lingers
	heard   bool            // a speaker
	dead    map[string]bool // nodes, as the speaker says
	direct  direct
	gates   gates
	origins map[netip.Addr]rescue.Origins // where connections to VIPs may be known, as speakers have said
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
		settled: make(chan struct{}), began: now(), dirty: map[lb.Key]dirt{}, records: map[lb.Key]*record{},
		waiting: "the first step",
		counts:  newCounts(), unconfirmed: map[lb.Key]bool{}, lingers: newLingers(), direct: newDirect(), gates: newGates(),
		leftOut: map[lb.Key]plan.LeftOut{}, probed: map[lb.Key]bool{}, telling: map[lb.Key]bool{},
		claims: plan.NewClaims(), origins: map[netip.Addr]rescue.Origins{},
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
func (p *proxy) step(context.Context) (time.Duration, error) {
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
	dirty := p.takeDirty()
	touched := p.plan(dirty, now)
	target(p, dirty)
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
			target(p, p.records)
			p.markThose(slices.Collect(maps.Keys(p.direct.asking)), now)
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

// plan plans the dirty Services, and those on which their plans bear, which become dirty too. It
// returns those whose plans changed.
func (p *proxy) plan(dirty map[lb.Key]time.Time, now time.Time) map[lb.Key]bool {
	var concerned []lb.Key
	for _, key := range slices.SortedFunc(maps.Keys(dirty), lb.Key.Compare) {
		concerned = append(concerned, p.planLive(key, now)...)
	}
	for _, key := range append(concerned, p.lingers.changed(now, p.claims)...) {
		if _, ok := dirty[key]; !ok {
			dirty[key] = now
		}
	}
	touched := map[lb.Key]bool{}
	for key, since := range dirty {
		r := p.records[key]
		planned := p.claims.Grant(r.live)
		p.advise(r, planned)
		if p.lingers.policy(key) {
			planned = planned.AsCluster()
		}
		planned = planned.WithLingering(slices.Concat(p.lingers.of(key)...))
		if p.replan(r, planned, since) {
			touched[key] = true
		} else if !r.pending() {
			r.programming = time.Time{} // it changed nothing here
		}
	}
	return touched
}

// planLive plans one Service by what the API server has, and lets the VIPs that it loses linger. It
// returns the other Services on whose frontends that bears.
func (p *proxy) planLive(key lb.Key, now time.Time) []lb.Key {
	r := p.records[key]
	if r == nil {
		r = &record{live: plan.Service{Key: key}, planned: plan.Service{Key: key}, applied: plan.Service{Key: key}}
		p.records[key] = r
		p.counts.add(r, 1)
	}
	whole := plan.Service{Key: key}
	svc, ok := p.from.services.Get(key)
	named, _ := p.from.slices.Get(key)
	named = p.admit(key, svc.Selector, named)
	endpoints := named
	if ok {
		whole = plan.New(svc, plan.Without(endpoints, p.dead), p.nodeFor(svc))
		r.trigger(endpoints, p.began)
	}
	whole, endpoints = p.freeze(r, whole, svc, endpoints)
	live := whole
	if len(live.VIPs) > 0 {
		live = live.Reaching(p.path.Lost)
	}
	live = p.answering(r, svc, endpoints, live)
	if gone := plan.Withdrawn(r.planned, live); len(gone) > 0 && p.settings.drain > 0 {
		p.lingers.add(key, gone, now.Add(p.settings.drain))
	}
	if plan.Tightened(r.live, live) && p.settings.drain > 0 {
		p.lingers.addPolicy(key, now.Add(p.settings.drain))
	}
	if r.relayRefused = ""; live.Relay {
		if r.relayRefused = plan.RefuseRelay(endpoints, p.scope); r.relayRefused != "" {
			live.Relay, live.ProxyProtocol = false, 0
		}
	}
	if r.whole = nil; !live.Equal(whole) {
		r.whole = &whole
	}
	if !r.live.Equal(live) { // else they are worth keeping once
		r.live, r.families = live, live.Families()
	}
	if svc.Forwarding != "" || p.direct.asking[key] || p.direct.held[key] {
		p.forward(r, svc, named, now)
	}
	return p.claims.Set(r.live)
}

// freeze returns the plan of a Service and its endpoints cut down to what it had, if it is too large, and else
// as they are. What routes and probes leave out of a plan it still has.
func (p *proxy) freeze(r *record, now plan.Service, svc lb.Service, endpoints []lb.Slice) (plan.Service, []lb.Slice) {
	tooLarge, before := r.tooLarge, r.live
	if r.whole != nil {
		before = *r.whole
	}
	r.tooLarge = nil
	if tooLarge != nil && now.Excess == nil && now.Equal(before) {
		now.Excess = tooLarge
	}
	if now.Excess == nil {
		return now, endpoints // fit stays, as the kernel's writer may refuse it
	}
	if r.fit == nil {
		r.fit = &before
	}
	return r.fit.Frozen(now, svc, plan.Without(endpoints, p.dead), p.nodeFor(svc)), r.fit.Listed(endpoints)
}

// sized takes in whether the kernel's writer finds a Service too large, which then gets what it had. If
// that is unknown, as after a restart, the kernel keeps what it has.
func (p *proxy) sized(r *record) (frozen bool) {
	var tooLarge plan.TooLarge
	switch {
	case r.planned.Excess != nil || r.pending() && r.failure == nil:
	case r.failure == nil:
		r.fit = nil
	case errors.As(r.failure, &tooLarge) && len(r.applied.Ports) > 0 && r.applied.UID == r.live.UID:
		if r.fit == nil {
			before := r.applied
			r.fit = &before
		}
		r.tooLarge = &tooLarge
		p.mark(r.live.Key)
		return true
	}
	return false
}

// replan notes a new plan, and returns whether it differs from the one before.
func (p *proxy) replan(r *record, planned plan.Service, since time.Time) bool {
	same := planned.Policy == r.planned.Policy && slices.Equal(planned.VIPs, r.planned.VIPs) &&
		slices.Equal(planned.Denied, r.planned.Denied) && (planned.Excess == nil) == (r.planned.Excess == nil)
	for i, family := range allFamilies {
		if plan.SameRules(r.planned, planned, family) {
			continue
		}
		same = false
		if r.since[i].IsZero() {
			r.since[i] = since
			p.unconfirmed[planned.Key] = true
		}
	}
	r.planned = planned
	return !same
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
		before := r.deliveries
		r.deliveries = plan.Report(r.planned, r.applied, r.failure, p.path)
		if !p.written && r.starting() {
			r.deliveries = unknown(r.deliveries, plan.Report(r.planned, r.planned, nil, p.path))
		}
		p.spans.told(p.now(), p.complete, r.planned.Age.UID, before, r.deliveries)
		p.counts.add(r, 1)
		deliveries[key] = r.deliveries
		checks[key] = health.Service{Port: r.planned.HealthPort, Local: plan.Health(r.planned, r.applied, p.path)}
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

// apply hands new plans to the kernel's writer; at first those of all Services.
func (p *proxy) apply(keys map[lb.Key]bool) {
	changes := make(map[lb.Key]plan.Service, len(keys))
	for key := range keys {
		changes[key] = p.records[key].planned
	}
	switch {
	case !p.begun:
		p.begun = true
		for key := range keys {
			p.records[key].untried = true
		}
		p.to.rules.Begin(changes)
	case len(changes) > 0:
		p.to.rules.Update(changes)
	}
}

// collect takes over what the kernel's writer has found out, and returns the Services concerned;
// all reports whether the writer has tried all of them.
func (p *proxy) collect(now time.Time) (keys map[lb.Key]bool, all bool) {
	keys = map[lb.Key]bool{}
	flows := map[lb.Key]plan.Service{}
	outcomes, all := p.to.rules.Outcomes()
	for key, o := range outcomes {
		r := p.records[key]
		if r == nil {
			continue // forgotten
		}
		keys[key] = true
		p.counts.add(r, -1)
		r.applied, r.failure, r.alone, r.delivers = o.Applied, o.Err, o.Alone, nil
		r.untried = false
		flows[key] = o.Applied
		p.direct.confirmed(o.Applied)
		for i, family := range allFamilies {
			if !r.since[i].IsZero() && plan.SameRules(r.planned, r.applied, family) {
				p.to.latency(now.Sub(r.since[i]))
				r.since[i] = time.Time{}
			}
		}
		if !r.pending() {
			delete(p.unconfirmed, key)
			if !r.programming.IsZero() {
				p.to.programmed(now.Sub(r.programming))
				r.programming = time.Time{}
			}
		}
		p.counts.add(r, 1)
		if !p.sized(r) {
			p.warn(r)
		}
	}
	if len(p.unconfirmed) == 0 {
		p.unconfirmed = map[lb.Key]bool{} // a map that was large once is slow to go through for ever
	}
	if len(flows) > 0 {
		p.to.flows.Update(flows)
		if p.to.counters != nil {
			p.to.counters.Update(flows)
		}
		if p.to.loads != nil {
			p.to.loads.Update(flows)
		}
	}
	return keys, all
}

// warn reports a failure once.
func (p *proxy) warn(r *record) {
	said := ""
	if r.failure != nil {
		said = r.failure.Error()
	}
	if said != "" && said != r.warned {
		if svc, ok := p.from.services.Get(r.planned.Key); ok {
			about := "the kernel refused the rules: "
			if errors.As(r.failure, new(plan.TooLarge)) {
				about = "the Service is too large: "
			}
			p.to.warn(svc, lb.ReasonNotProgrammed, p.self+": "+about+said)
		}
	}
	r.warned = said
}

// unapplied returns, for each family of the node, when the oldest change came that is not in the
// kernel; zero if there is none. A Service that fails by itself in a family does not count there,
// as it would turn away the traffic of all others.
func (p *proxy) unapplied() map[lb.Family]time.Time {
	oldest := map[lb.Family]time.Time{}
	for i, family := range allFamilies {
		if !slices.Contains(p.families, family) {
			continue
		}
		var at time.Time
		for key := range p.unconfirmed {
			r := p.records[key]
			if since := r.since[i]; !since.IsZero() && !slices.Contains(r.alone, family) && (at.IsZero() || since.Before(at)) {
				at = since
			}
		}
		oldest[family] = at
	}
	return oldest
}
