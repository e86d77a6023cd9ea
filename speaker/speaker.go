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
	"github.com/landfall-lb/landfall/speaker/gate"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// table is what the API server has of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Synced() bool
}

// sources are where the speaker reads.
type sources struct {
	services       table[lb.Key, lb.Service]
	slices         table[lb.Key, []lb.Slice] // nil unless the gate looks at endpoints
	nodes          table[string, lb.Node]
	pools          table[string, lb.Pool]
	advertisements table[string, lb.L2Advertisement]
	interfaces     func() ([]lb.Interface, bool)
	feed           feed   // nil unless the gate is the proxy
	members        gossip // live nodes and their claims
}

type feed interface {
	Reason() lb.Reason
	Connected() bool
	Delivery(lb.DeliveryKey) *lb.Delivery
	Tell(lb.FeedNotice)
}

type gossip interface {
	Set(map[netip.Addr]lb.Claim)
	SetPeers(map[string][]netip.Addr)
	Live() []string
	Claims(netip.Addr) map[string]lb.Claim
	Former(netip.Addr) bool
	Dead() []string
	Joined() bool
}

// sinks are where the speaker acts.
type sinks struct {
	l2 interface {
		Set(l2.Desired)
		Outcome() l2.Outcome
	}
	report interface {
		Set(lb.Key, *lb.Condition)
	}
}

// speaker is the loop that owns the state: it plans the VIPs of which something has changed, and tells the actors.
type speaker struct {
	self  string
	class string // loadBalancerClass of the Services that are ours
	opts  options
	log   *slog.Logger
	from  sources
	to    sinks

	runner *loop.Runner

	// dirty is what has changed since the last step; the actors and watches add to it.
	dirtyMu sync.Mutex
	dirty   dirt

	// mu guards what follows, which only the step changes; the status page and the metrics read it.
	mu           sync.Mutex
	vips         map[lb.Key][]netip.Addr // of each of our Services
	holders      map[netip.Addr][]lb.Key // the Services on each VIP, sorted
	decisions    map[netip.Addr]plan.Decision
	answering    map[netip.Addr][]string // as the L2 actor last said
	rounds       map[netip.Addr]int
	fresh        map[netip.Addr]time.Time // VIPs that were first seen a moment ago, until when they count as fresh
	stopping     bool
	waiting      string // what the speaker waits for before its first plan; "" once it has planned
	ownerChanges int
}

// options are what an administrator may choose.
type options struct {
	exclude      []string // shell patterns of interfaces that answer only when named
	cordonDrains bool
}

// dirt names what has to be planned again.
type dirt struct {
	all      bool
	peers    bool            // the nodes to be met
	services map[lb.Key]bool // Services whose set of VIPs may differ, too
	vips     map[netip.Addr]bool
}

func newSpeaker(self, class string, log *slog.Logger) *speaker {
	s := &speaker{
		self: self, class: class, log: log, waiting: "the API server",
		vips: map[lb.Key][]netip.Addr{}, holders: map[netip.Addr][]lb.Key{}, decisions: map[netip.Addr]plan.Decision{},
		answering: map[netip.Addr][]string{}, rounds: map[netip.Addr]int{}, fresh: map[netip.Addr]time.Time{},
	}
	s.runner = loop.New(func(context.Context) (time.Duration, error) { return s.step(time.Now()), nil }, loop.Options{})
	return s
}

// The marks: each is called from whatever goroutine has learned of a change.

func (s *speaker) mark(f func(*dirt)) {
	s.dirtyMu.Lock()
	f(&s.dirty)
	s.dirtyMu.Unlock()
	s.runner.Poke()
}

func (s *speaker) markAll() { s.mark(func(d *dirt) { d.all = true }) }

func (s *speaker) markService(key lb.Key) {
	s.mark(func(d *dirt) {
		if d.services == nil {
			d.services = map[lb.Key]bool{}
		}
		d.services[key] = true
	})
}

// markVIPs marks some VIPs; nil stands for all.
func (s *speaker) markVIPs(vips []netip.Addr) {
	s.mark(func(d *dirt) {
		d.all = d.all || vips == nil
		if d.vips == nil {
			d.vips = map[netip.Addr]bool{}
		}
		for _, vip := range vips {
			d.vips[vip] = true
		}
	})
}

// markNode takes a change of a Node: the others are to be met, this one decides whether anything is claimed.
func (s *speaker) markNode(name string) {
	if name == s.self {
		s.markAll()
		return
	}
	s.mark(func(d *dirt) { d.peers = true })
}

// markSynced takes that some kind of object is known in full.
func (s *speaker) markSynced() {
	s.mark(func(d *dirt) { d.all, d.peers = true, true })
}

func peers(nodes map[string]lb.Node, self string) map[string][]netip.Addr {
	others := map[string][]netip.Addr{}
	for name, node := range nodes {
		if name != self {
			others[name] = node.Addresses
		}
	}
	return others
}

// stop makes the speaker hand over all VIPs.
func (s *speaker) stop() {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.markAll()
}

// freshFor is how long a VIP counts as fresh: longer than a change takes from the API server to each node's kernel.
const freshFor = time.Second

// step plans all that is dirty. Until everything is known that a plan needs, nothing is claimed: unknown is not absent. It returns
// when to look again even if nothing changes; 0 for not at all.
func (s *speaker) step(now time.Time) time.Duration {
	s.meet()
	if s.from.feed != nil {
		s.from.feed.Tell(lb.FeedNotice{Dead: s.from.members.Dead()})
	}
	if waiting := s.missing(); waiting != "" {
		s.mu.Lock()
		s.waiting = waiting
		s.mu.Unlock()
		return 0 // what is dirty stays so
	}
	s.dirtyMu.Lock()
	dirty := s.dirty
	s.dirty = dirt{peers: dirty.peers}
	s.dirtyMu.Unlock()

	s.mu.Lock()
	defer s.mu.Unlock()
	dirty.all = dirty.all || s.waiting != ""
	s.waiting = ""
	vips := s.gather(dirty)
	again := s.ripen(now, vips)
	facts := s.facts()
	touched := map[lb.Key]bool{}
	for vip := range vips {
		for _, key := range s.decisions[vip].Services {
			touched[key] = true
		}
		s.decide(facts, vip)
		for _, key := range s.decisions[vip].Services {
			touched[key] = true
		}
	}
	s.act(facts)
	for key := range touched {
		s.report(key)
	}
	return again
}

// ripen notes which VIPs are fresh, adds those that no longer are to vips, and returns when the next one ripens.
func (s *speaker) ripen(now time.Time, vips map[netip.Addr]bool) time.Duration {
	var next time.Duration
	for vip := range vips {
		if _, known := s.decisions[vip]; !known && len(s.holders[vip]) > 0 {
			s.fresh[vip] = now.Add(freshFor)
		}
	}
	for vip, until := range s.fresh {
		if wait := until.Sub(now); wait <= 0 {
			vips[vip] = true
			delete(s.fresh, vip)
		} else if next == 0 || wait < next {
			next = wait
		}
	}
	return next
}

// meet tells the actor which nodes there are, which needs nothing but the list of them.
func (s *speaker) meet() {
	s.dirtyMu.Lock()
	due := s.dirty.peers && s.from.nodes.Synced()
	s.dirty.peers = s.dirty.peers && !due
	s.dirtyMu.Unlock()
	if due {
		s.from.members.SetPeers(peers(s.from.nodes.All(), s.self))
	}
}

// missing says what a plan needs and is not known yet.
func (s *speaker) missing() string {
	_, linksKnown := s.from.interfaces()
	switch {
	case !s.from.services.Synced():
		return "the list of Services"
	case !s.from.nodes.Synced():
		return "the list of Nodes"
	case !s.from.pools.Synced():
		return "the list of IPAddressPools"
	case !s.from.advertisements.Synced():
		return "the list of L2Advertisements"
	case s.from.slices != nil && !s.from.slices.Synced():
		return "the list of EndpointSlices"
	case !linksKnown:
		return "the list of network interfaces"
	}
	return ""
}

// gather brings the index of VIPs up to date and returns the VIPs that are to be planned.
func (s *speaker) gather(dirty dirt) map[netip.Addr]bool {
	vips := dirty.vips
	if vips == nil {
		vips = map[netip.Addr]bool{}
	}
	services := dirty.services
	if dirty.all {
		services = map[lb.Key]bool{}
		for key := range s.from.services.All() {
			services[key] = true
		}
		for key := range s.vips {
			services[key] = true
		}
	}
	for key := range services {
		s.index(key, vips)
	}
	// What the L2 actor answers for is told to the others and may end a handover.
	answering := s.to.l2.Outcome().Answering
	for vip, on := range answering {
		if !slices.Equal(on, s.answering[vip]) {
			vips[vip] = true
		}
	}
	for vip := range s.answering {
		if _, ok := answering[vip]; !ok {
			vips[vip] = true
		}
	}
	s.answering = answering
	return vips
}

// index notes which VIPs a Service has now, and marks those that it has or had.
func (s *speaker) index(key lb.Key, vips map[netip.Addr]bool) {
	var now []netip.Addr
	if service, ok := s.from.services.Get(key); ok && service.Class == s.class {
		now = service.VIPs()
	}
	for _, vip := range s.vips[key] {
		vips[vip] = true
		s.holders[vip] = slices.DeleteFunc(s.holders[vip], func(k lb.Key) bool { return k == key })
		if len(s.holders[vip]) == 0 {
			delete(s.holders, vip)
		}
	}
	for _, vip := range now {
		vips[vip] = true
		if i, found := slices.BinarySearchFunc(s.holders[vip], key, lb.Key.Compare); !found {
			s.holders[vip] = slices.Insert(s.holders[vip], i, key)
		}
	}
	if len(now) > 0 {
		s.vips[key] = now
		return
	}
	delete(s.vips, key)
	s.to.report.Set(key, s.farewell(key))
}

// farewell corrects what a Service shows that has lost its addresses; nil when it shows nothing wrong or another node corrects it.
func (s *speaker) farewell(key lb.Key) *lb.Condition {
	service, ok := s.from.services.Get(key)
	stale := slices.ContainsFunc(service.Conditions, func(c lb.Condition) bool { return c.Type == lb.ConditionAnnounced })
	if !ok || !stale || s.stopping || service.Type != lb.LoadBalancer || service.Class != s.class ||
		plan.Winner(netip.Addr{}, s.from.members.Live()) != s.self {
		return nil
	}
	return &lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoAddress, Message: "the Service holds no address"}
}

func (s *speaker) facts() plan.Facts {
	interfaces, _ := s.from.interfaces()
	f := plan.Facts{
		Self: s.self, Joined: s.from.members.Joined(), Stopping: s.stopping, Pools: s.from.pools.All(),
		Advertisements: s.from.advertisements.All(), Interfaces: interfaces, Live: s.from.members.Live(),
		Exclude: s.opts.exclude, CordonDrains: s.opts.cordonDrains,
	}
	if node, ok := s.from.nodes.Get(s.self); ok {
		f.Node = &node
	}
	if s.from.feed != nil {
		f.Gate = s.from.feed.Reason()
	}
	return f
}

// decide plans one VIP and notes what follows.
func (s *speaker) decide(facts plan.Facts, vip netip.Addr) {
	keys, ok := s.holders[vip]
	if !ok {
		delete(s.decisions, vip)
		delete(s.rounds, vip)
		return
	}
	in := plan.Input{VIP: vip, Claims: s.from.members.Claims(vip), Answering: s.answering[vip], Former: s.from.members.Former(vip)}
	if len(in.Answering) > 0 || slices.ContainsFunc(slices.Collect(maps.Values(in.Claims)), func(c lb.Claim) bool { return c.Answering }) {
		delete(s.fresh, vip) // from now on, whoever can shall step in at once
	}
	_, in.Fresh = s.fresh[vip]
	for _, key := range keys {
		service, _ := s.from.services.Get(key)
		in.Holders = append(in.Holders, plan.Holder{Service: key, Labels: service.Labels, Delivery: s.delivery(key, vip)})
	}
	before, had := s.decisions[vip]
	now := plan.Decide(facts, in)
	if before.Rival != now.Rival {
		s.rounds[vip]++ // clients may have listened to the other one last
	}
	if had && before.Owner != now.Owner {
		s.ownerChanges++
	}
	s.decisions[vip] = now
	s.logChange(before, now)
}

// delivery returns what the gate says of a VIP of a Service.
func (s *speaker) delivery(key lb.Key, vip netip.Addr) *lb.Delivery {
	if s.from.feed != nil {
		return s.from.feed.Delivery(lb.DeliveryKey{Service: key, VIP: vip})
	}
	service, ok := s.from.services.Get(key)
	if !ok {
		return nil
	}
	slices, _ := s.from.slices.Get(key)
	d := gate.Endpoints(service, vip, slices, s.self)
	return &d
}

// logChange logs that a decision differs, not each time that it is made.
func (s *speaker) logChange(before, now plan.Decision) {
	was, is := before.Claim(false).Reason, now.Claim(false).Reason
	switch {
	case before.Owner != now.Owner && (now.Owner == s.self || before.Owner == s.self):
		s.log.Info("owner changes", "vip", now.VIP, "from", before.Owner, "to", now.Owner, "interfaces", now.Answer, "handover", now.Handover, "reason", is)
	case before.Owner != now.Owner || was != is:
		s.log.Debug("decision changes", "vip", now.VIP, "owner", now.Owner, "reason", is)
	}
}

// act tells the actors what follows from all decisions.
func (s *speaker) act(facts plan.Facts) {
	claims := make(map[netip.Addr]lb.Claim, len(s.decisions))
	answers := map[netip.Addr]l2.Answer{}
	for vip, d := range s.decisions {
		claims[vip] = d.Claim(len(s.answering[vip]) > 0)
		if len(d.Answer) > 0 {
			answers[vip] = l2.Answer{On: d.Answer, Round: s.rounds[vip]}
		}
	}
	s.to.l2.Set(l2.Desired{Interfaces: facts.Interfaces, Answers: answers})
	s.from.members.Set(claims)
}

// report says what is to be written to a Service, if it is for this node to say.
func (s *speaker) report(key lb.Key) {
	if len(s.vips[key]) == 0 {
		s.to.report.Set(key, s.farewell(key))
		return
	}
	var decisions []plan.Decision
	for _, vip := range s.vips[key] {
		decisions = append(decisions, s.decisions[vip])
	}
	if s.stopping {
		decisions = nil // the heir reports
	}
	if r, ok := plan.Summarize(s.self, decisions); ok {
		c := r.Condition()
		s.to.report.Set(key, &c)
	} else {
		s.to.report.Set(key, nil)
	}
}

// handOver stops the speaker and waits until the heirs answer, or nobody else claims, or the time is over.
func (s *speaker) handOver(ctx context.Context, timeout time.Duration) {
	s.stop()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for !s.quiet() {
		select {
		case <-ctx.Done():
			s.log.Warn("ending although not all addresses were taken over", "still answering for", len(s.to.l2.Outcome().Answering))
			return
		case <-ticker.C:
		}
	}
}

// quiet tells whether this node answers for nothing any more, after stop.
func (s *speaker) quiet() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopping {
		return false
	}
	for _, d := range s.decisions {
		if d.Refusal == nil || len(d.Answer) > 0 {
			return false // not planned since stop, or still handing over
		}
	}
	return len(s.to.l2.Outcome().Answering) == 0
}

// snapshot copies the decisions, sorted by VIP.
func (s *speaker) snapshot() []plan.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.decisions), func(a, b plan.Decision) int { return a.VIP.Compare(b.VIP) })
}
