package main

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// table is what the API server has of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Synced() bool
}

// sources are where the proxy reads.
type sources struct {
	services   table[lb.Key, lb.Service]
	slices     table[lb.Key, []lb.Slice]
	nodes      table[string, lb.Node]
	interfaces func() ([]lb.Interface, bool)
}

// dialect is what writes rules.
type dialect interface {
	Configure(plan.Config)
	Set(map[lb.Key]plan.Service)
	Outcomes() map[lb.Key]plan.Outcome
	Synced() bool
}

// sinks are where the proxy acts.
type sinks struct {
	rules dialect
	flows interface {
		Set(map[lb.Key]plan.Service)
	}
	health interface {
		Set(health.State)
		SetAddresses(map[lb.Family][]netip.Addr)
	}
	feed interface {
		Set(lb.Key, []lb.Delivery)
		Complete()
	}
	// warn reports something wrong with a Service.
	warn func(s lb.Service, reason lb.Reason, message string)
	// latency is told how long it took from a change to its confirmation by the kernel.
	latency func(time.Duration)
}

// proxy is the loop that owns the state: it plans the Services of which something has changed, tells the actors, and tells others
// what the kernel has confirmed.
type proxy struct {
	self     string
	settings settings
	// families are those that this node has.
	families []lb.Family
	log      *slog.Logger
	now      func() time.Time
	from     sources
	to       sinks

	runner *loop.Runner

	// dirty are the Services that have changed, since when; the watches add to it.
	dirtyMu sync.Mutex
	dirty   map[lb.Key]time.Time

	// mu guards what follows, which only the step changes; the status page and the metrics read it.
	mu       sync.Mutex
	records  map[lb.Key]*record
	waiting  string // what is needed before anything can be planned; "" once it is there
	facts    facts
	complete bool // the feed is
}

// record is what the proxy knows of one Service.
type record struct {
	service lb.Service
	live    plan.Service // what the API server asks for
	planned plan.Service // with what lingers
	lingers []lingering
	applied plan.Service
	failure error
	alone   bool // the failure is this Service's own
	// since is when the oldest change came that the kernel has not confirmed, by family.
	since map[lb.Family]time.Time
	// warned is the last failure that was reported.
	warned string
}

// lingering are frontends of VIPs that were taken away.
type lingering struct {
	ports []plan.Port
	until time.Time
}

// gap folds bursts of changes into one step.
const gap = 10 * time.Millisecond

func newProxy(self string, settings settings, families []lb.Family, log *slog.Logger, now func() time.Time) *proxy {
	p := &proxy{
		self: self, settings: settings, families: families, log: log, now: now,
		dirty: map[lb.Key]time.Time{}, records: map[lb.Key]*record{}, waiting: "the first step",
	}
	p.runner = loop.New(p.step, loop.Options{Gap: gap})
	return p
}

// mark notes that something of a Service has changed. It never blocks.
func (p *proxy) mark(key lb.Key) {
	p.dirtyMu.Lock()
	if _, ok := p.dirty[key]; !ok {
		p.dirty[key] = p.now()
	}
	p.dirtyMu.Unlock()
	p.runner.Poke()
}

// markAll notes that every Service has to be planned again.
func (p *proxy) markAll(at time.Time) {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	for key := range p.from.services.All() {
		if _, ok := p.dirty[key]; !ok {
			p.dirty[key] = at
		}
	}
}

func (p *proxy) takeDirty() map[lb.Key]time.Time {
	p.dirtyMu.Lock()
	defer p.dirtyMu.Unlock()
	dirty := p.dirty
	p.dirty = map[lb.Key]time.Time{}
	return dirty
}

// step does all that is due.
func (p *proxy) step(context.Context) (time.Duration, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	facts, waiting := p.settings.facts(p.self, p.from, p.facts)
	if waiting != p.waiting {
		p.waiting = waiting
		if waiting != "" {
			p.log.Info("no rule is written before all is known", "waiting for", waiting)
		}
	}
	if waiting != "" {
		return 0, nil // unknown is not absent: whatever a predecessor wrote stays
	}
	p.learn(facts, now)
	touched := p.plan(p.takeDirty(), now)
	p.announce(touched) // before the rules: what goes is withdrawn first
	p.apply(touched)
	confirmed := p.collect(now)
	p.announce(confirmed)
	p.reportHealth()
	if !p.complete && p.to.rules.Synced() {
		p.complete = true
		p.log.Info("the kernel holds what is wanted", "services", len(p.records))
		p.to.feed.Complete()
	}
	p.forget(now)
	return p.nextLinger(now), nil
}

// learn takes over what is known of the node.
func (p *proxy) learn(f facts, now time.Time) {
	before, first := p.facts, p.facts.self == ""
	p.facts = f
	if first || !f.sameRules(before) {
		p.to.rules.Configure(f.config)
		p.to.health.SetAddresses(f.config.NodePortAddresses)
	}
	if first || !f.samePlans(before) {
		p.markAll(now)
	}
}

// plan plans the dirty Services, and those on which their plans bear. It returns what changed.
func (p *proxy) plan(dirty map[lb.Key]time.Time, now time.Time) map[lb.Key]bool {
	for key, r := range p.records {
		if slices.ContainsFunc(r.lingers, func(l lingering) bool { return !now.Before(l.until) }) {
			r.lingers = slices.DeleteFunc(r.lingers, func(l lingering) bool { return !now.Before(l.until) })
			if _, ok := dirty[key]; !ok {
				dirty[key] = now
			}
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(dirty), lb.Key.Compare) {
		p.planLive(key, now)
	}
	p.yield(dirty, now)
	touched := map[lb.Key]bool{}
	for key, since := range dirty {
		r := p.records[key]
		planned := r.live
		for _, l := range r.lingers {
			planned = planned.WithLingering(l.ports)
		}
		if !p.replan(r, planned, since) {
			continue
		}
		touched[key] = true
	}
	return touched
}

// planLive plans one Service by what the API server has, and lets the VIPs that it loses linger.
func (p *proxy) planLive(key lb.Key, now time.Time) {
	r := p.records[key]
	if r == nil {
		r = &record{live: plan.Service{Key: key}, planned: plan.Service{Key: key}, applied: plan.Service{Key: key}, since: map[lb.Family]time.Time{}}
		p.records[key] = r
	}
	live := plan.Service{Key: key}
	if svc, ok := p.from.services.Get(key); ok {
		endpoints, _ := p.from.slices.Get(key)
		live = plan.New(svc, endpoints, p.facts.node)
		r.service = svc
	}
	if gone := plan.Withdrawn(r.live, live); len(gone) > 0 && p.settings.drain > 0 {
		r.lingers = append(r.lingers, lingering{ports: gone, until: now.Add(p.settings.drain)})
	}
	r.live = live
}

// yield ends the lingering of frontends that some Service serves now. Services that lose some become dirty.
func (p *proxy) yield(dirty map[lb.Key]time.Time, now time.Time) {
	for key, r := range p.records {
		for i, l := range r.lingers {
			left := l.ports
			for _, other := range p.records {
				left = plan.Yield(left, other.live)
			}
			if count(left) == count(l.ports) {
				continue
			}
			r.lingers[i].ports = left
			if _, ok := dirty[key]; !ok {
				dirty[key] = now
			}
		}
		r.lingers = slices.DeleteFunc(r.lingers, func(l lingering) bool { return len(l.ports) == 0 })
	}
}

func count(ports []plan.Port) int {
	n := 0
	for _, port := range ports {
		n += len(port.Frontends)
	}
	return n
}

// replan notes a new plan, and returns whether it differs from the one before.
func (p *proxy) replan(r *record, planned plan.Service, since time.Time) bool {
	same := planned.Policy == r.planned.Policy && slices.Equal(planned.VIPs, r.planned.VIPs)
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if plan.SameRules(r.planned, planned, family) {
			continue
		}
		same = false
		if r.since[family].IsZero() {
			r.since[family] = since
		}
	}
	r.planned = planned
	return !same
}

// announce tells the feed what is so for the named Services.
func (p *proxy) announce(keys map[lb.Key]bool) {
	for key := range keys {
		r := p.records[key]
		p.to.feed.Set(key, plan.Report(r.planned, r.applied, r.failure))
	}
}

// apply hands new plans to the kernel's writer. The first call names all Services, even if there are none.
func (p *proxy) apply(keys map[lb.Key]bool) {
	changes := make(map[lb.Key]plan.Service, len(keys))
	for key := range keys {
		changes[key] = p.records[key].planned
	}
	if len(changes) > 0 || !p.complete {
		p.to.rules.Set(changes)
	}
}

// collect takes over what the kernel's writer has found out, and returns the Services concerned.
func (p *proxy) collect(now time.Time) map[lb.Key]bool {
	keys := map[lb.Key]bool{}
	flows := map[lb.Key]plan.Service{}
	for key, o := range p.to.rules.Outcomes() {
		r := p.records[key]
		if r == nil {
			continue // forgotten
		}
		keys[key] = true
		r.applied, r.failure, r.alone = o.Applied, o.Err, o.Alone
		flows[key] = o.Applied
		for family, since := range r.since {
			if plan.SameRules(r.planned, r.applied, family) {
				p.to.latency(now.Sub(since))
				delete(r.since, family)
			}
		}
		p.warn(r)
	}
	if len(flows) > 0 {
		p.to.flows.Set(flows)
	}
	return keys
}

// warn reports a failure once.
func (p *proxy) warn(r *record) {
	said := ""
	if r.failure != nil {
		said = r.failure.Error()
	}
	if said != "" && said != r.warned && r.service.UID != "" {
		p.to.warn(r.service, lb.ReasonNotProgrammed, p.self+": the kernel did not take the rules: "+said)
	}
	r.warned = said
}

// reportHealth tells the health servers what is so.
func (p *proxy) reportHealth() {
	state := health.State{
		Services: map[lb.Key]health.Service{}, Known: p.facts.known, Leaving: p.facts.leaving, Unapplied: p.unapplied(),
	}
	for key, r := range p.records {
		if local := plan.Health(r.planned, r.applied); len(local) > 0 {
			state.Services[key] = health.Service{Port: r.planned.HealthPort, Local: local}
		}
	}
	p.to.health.Set(state)
}

// unapplied returns, for each family of the node, when the oldest change came that is not in the kernel; zero if there is none. A
// Service that fails by itself does not count, as it would else turn away the traffic of all others.
func (p *proxy) unapplied() map[lb.Family]time.Time {
	oldest := map[lb.Family]time.Time{}
	for _, family := range p.families {
		oldest[family] = time.Time{}
		for _, r := range p.records {
			if since := r.since[family]; !since.IsZero() && !r.alone && (oldest[family].IsZero() || since.Before(oldest[family])) {
				oldest[family] = since
			}
		}
	}
	return oldest
}

// forget drops Services that are gone from everywhere.
func (p *proxy) forget(time.Time) {
	maps.DeleteFunc(p.records, func(key lb.Key, r *record) bool {
		_, exists := p.from.services.Get(key)
		return !exists && len(r.planned.Ports)+len(r.applied.Ports)+len(r.since)+len(r.lingers) == 0 && r.failure == nil
	})
}

// nextLinger returns how long to wait until something stops lingering; 0 when nothing lingers.
func (p *proxy) nextLinger(now time.Time) time.Duration {
	var next time.Duration
	for _, r := range p.records {
		for _, l := range r.lingers {
			if wait := max(l.until.Sub(now), time.Millisecond); next == 0 || wait < next {
				next = wait
			}
		}
	}
	return next
}
