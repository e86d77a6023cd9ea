package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/gate"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/plan"
)

func peers(nodes map[string]lb.Node, self string) map[string][]netip.Addr {
	others := map[string][]netip.Addr{}
	for name, node := range nodes {
		if name != self {
			others[name] = node.Addresses
		}
	}
	return others
}

// freshFor is how long a VIP counts as fresh: longer than a change takes from the API server to
// each node's kernel.
const freshFor = time.Second

// step plans all that is dirty. Until everything is known that a plan needs, nothing is claimed:
// unknown is not absent. It returns when to look again even if nothing changes; 0 for not at all.
func (s *speaker) step(now time.Time) time.Duration {
	s.meet()
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
	s.installed = s.installed || s.from.daemonSet != nil && s.stays()
	vips := s.gather(dirty)
	seen := s.quorum.gather(s, now, vips)
	again := s.ripen(now, vips)
	facts := s.facts()
	w := &s.routing.words
	w.due = w.due || dirty.all || dirty.routes || dirty.services != nil
	for _, wait := range []time.Duration{seen, s.route(now, facts, dirty.all || dirty.routes, vips), s.speak(now, facts)} {
		if wait > 0 {
			again = sooner(again, wait)
		}
	}
	touched := map[lb.Key]bool{}
	for vip := range vips {
		for _, key := range s.decisions[vip].Services {
			touched[key] = true
		}
		s.decide(now, facts, vip)
		for _, key := range s.decisions[vip].Services {
			touched[key] = true
		}
	}
	s.tell() // before it is acted upon: the proxy has to know where a VIP comes from
	s.act(facts, dirty.all, vips)
	for key := range touched {
		s.report(key)
	}
	return again
}

// ripen notes which VIPs are fresh, adds those that no longer are to vips, and returns when the
// next one ripens.
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
	var others map[string][]netip.Addr
	if due {
		s.routing.words.due = true
		others = peers(s.from.nodes.All(), s.self)
		s.from.members.SetPeers(others)
	}
	s.mu.Lock()
	s.untold = s.rings.meet(s.from.nodes, s.from.members.Dead(), others) || s.untold
	s.mu.Unlock()
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
	outcome := s.to.l2.Outcome()
	s.conflicts.gather(outcome, vips)
	answering := outcome.Answering
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
	s.tellReporter(key, s.farewell(key))
}

func (s *speaker) facts() plan.Facts {
	interfaces, _ := s.from.interfaces()
	f := plan.Facts{
		Self: s.self, Joined: s.from.members.Joined(), Stopping: s.stopping, Pools: s.from.pools.All(),
		Advertisements: s.from.advertisements.All(), Interfaces: interfaces, Live: s.quorum.live, Missing: s.quorum.missing,
		Parted:  s.quorum.parted,
		Exclude: s.opts.exclude, CordonDrains: s.opts.cordonDrains, OnConflict: s.opts.onConflict,
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
func (s *speaker) decide(now time.Time, facts plan.Facts, vip netip.Addr) {
	keys, ok := s.holders[vip]
	if !ok {
		delete(s.decisions, vip)
		delete(s.rounds, vip)
		s.conflicts.forget(vip)
		delete(s.formers, vip)
		s.rings.forget(vip)
		s.untold = true
		return
	}
	in := plan.Input{VIP: vip, Claims: s.from.members.Claims(vip), Answering: s.answering[vip],
		Former: s.from.members.Former(vip), Routed: s.routed(vip)}
	if len(in.Answering) > 0 ||
		slices.ContainsFunc(slices.Collect(maps.Values(in.Claims)), func(c lb.Claim) bool { return c.Answering }) {
		delete(s.fresh, vip) // from now on, whoever can shall step in at once
	}
	_, in.Fresh = s.fresh[vip]
	in.Holders = s.holdersOf(keys, vip)
	s.conflicts.fill(&in)
	in.Elsewhere = s.quorum.elsewhere(s.self, vip)
	before, had := s.decisions[vip]
	next := plan.Decide(facts, in)
	if before.Rival != next.Rival {
		s.rounds[vip]++ // clients may have listened to the other one last
	}
	if had && before.Owner != next.Owner {
		s.ownerChanges++
	}
	s.decisions[vip] = next
	s.conflicts.record(next)
	s.untold = s.formers.note(vip, in.Claims, next.Owner) || !had || s.untold
	possible := s.routing.waiting != "" || s.routing.book.VIP(vip).Selected
	s.rings.note(now, vip, in.Claims, len(in.Routed.Peers) > 0, possible)
	s.logChange(before, next)
	s.logConflict(before, next)
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
	was, is := before.Obstacle(), now.Obstacle()
	switch {
	case before.Owner != now.Owner && (now.Owner == s.self || before.Owner == s.self):
		s.log.Info("owner changes", "vip", now.VIP, "from", before.Owner, "to", now.Owner, "interfaces", now.Answer,
			"handover", now.Handover, "reason", is)
	case before.Owner != now.Owner || was != is:
		s.log.Debug("decision changes", "vip", now.VIP, "owner", now.Owner, "reason", is)
	}
}

// act tells the actors what follows from the decisions on the VIPs; with all set, interfaces may
// differ as well.
func (s *speaker) act(facts plan.Facts, all bool, vips map[netip.Addr]bool) {
	claims := make(map[netip.Addr]*lb.Claim, len(vips))
	work := all
	for vip := range vips {
		claims[vip] = nil
		d, ok := s.decisions[vip]
		if ok {
			claim := d.Claim(len(s.answering[vip]) > 0)
			claims[vip] = &claim
		}
		work = s.assign(d, vip) || work
	}
	s.from.members.SetMACs(plan.MACs(facts))
	s.to.witness.Set(s.quorum.desired(s))
	if work {
		s.to.l2.Set(l2.Desired{Interfaces: facts.Interfaces, Answers: maps.Clone(s.answers), Probes: maps.Clone(s.probes),
			Ours: s.from.members.MACs()})
	}
	s.from.members.Set(claims)
}

// assign notes what the L2 actor has to do for a VIP, and tells whether that is something new.
func (s *speaker) assign(d plan.Decision, vip netip.Addr) bool {
	was, probed := s.answers[vip], s.probes[vip]
	delete(s.answers, vip)
	delete(s.probes, vip)
	if len(d.Answer) > 0 {
		s.answers[vip] = l2.Answer{On: d.Answer, Round: s.rounds[vip]}
	} else if len(d.Probe) > 0 {
		s.probes[vip] = d.Probe
	}
	is := s.answers[vip]
	return !slices.Equal(was.On, is.On) || was.Round != is.Round || !slices.Equal(probed, s.probes[vip])
}
