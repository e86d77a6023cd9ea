package main

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/ahead"
	"github.com/landfall-lb/landfall/speaker/gate"
	"github.com/landfall-lb/landfall/speaker/handoff"
	"github.com/landfall-lb/landfall/speaker/holders"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/neighbors"
	"github.com/landfall-lb/landfall/speaker/ownership"
	"github.com/landfall-lb/landfall/speaker/partition"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/routes"
	"github.com/landfall-lb/landfall/speaker/witness"
)

// step plans all that is dirty. Until everything is known that a plan needs, nothing is claimed:
// unknown is not absent. It returns when to look again even if nothing changes; 0 for not at all.
//
// It goes from room to room, in one direction: who holds VIPs, who is there, what BGP peers hear,
// who owns each VIP, what the proxy has to know, and then the actors.
func (s *speaker) step(now time.Time) (again time.Duration) {
	s.meet()
	waiting := s.from.missing()
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.phase.waiting != ""
	if s.phase.waiting = waiting; waiting != "" {
		return 0 // what is dirty stays so
	}
	s.phase.node = s.node()
	dirty := s.changes.take()
	dirty.all = s.asked() || dirty.all || first
	if dirty.links || dirty.all {
		dirty.all = s.look() || dirty.all
	}
	s.phase.installed = s.phase.installed || s.from.stays()
	then := func(wait time.Duration) {
		if wait > 0 {
			again = plan.Sooner(again, wait)
		}
	}

	without := s.hold(dirty)
	sight := s.from.liveness.Sight() // for the whole step
	divided, wait := s.divide(now, sight.Speakers, dirty.vips)
	then(wait)
	facts := s.facts()
	if dirty.all || dirty.nodes || dirty.links || divided {
		s.to.neighbors.Set(neighbors.Desired{Interfaces: facts.Interfaces, Nodes: s.others()})
	}
	services := s.lookup()
	claims := func(vip netip.Addr) map[string]plan.Claim { return s.from.members.Claims(vip, sight) }
	then(s.route(now, facts, dirty, services, claims))
	scouts, wait := s.scout(now, facts, dirty, divided, claims)
	then(wait)
	decided, changed, wait := s.own(now, facts, dirty.vips, services, sight)
	then(wait)
	s.handOff(now, dirty.nodes, decided) // before it is acted upon: the proxy has to know where a VIP comes from
	s.act(facts, decided, dirty.all || divided || changed || scouts, first)
	s.tell(now, facts, without, decided)
	s.traceDecided(now, decided, first)
	return again
}

// asked takes in whether the proxy asks what is unannounced, and reports whether that differs. It hears of all VIPs
// then, so the answer stays for the whole step.
func (s *speaker) asked() (differs bool) {
	before := s.phase.gates
	s.phase.gates = s.from.feed != nil && s.from.feed.Gates()
	return s.phase.gates != before
}

// meet tells gossip which nodes there are, which needs nothing but the list of them. A list without this node does not
// show that others are gone for good: it may have lost them all.
func (s *speaker) meet() {
	if !s.from.nodes.Synced() || !s.changes.takePeers() {
		return
	}
	others := addresses(s.from.nodes.All())
	_, listed := others[s.self]
	delete(others, s.self)
	s.from.members.SetPeers(others)
	if listed {
		s.from.liveness.Set(others)
	}
}

func addresses(nodes map[string]lb.Node) map[string][]netip.Addr {
	all := make(map[string][]netip.Addr, len(nodes))
	for name, node := range nodes {
		all[name] = node.Addresses
	}
	return all
}

// others returns the addresses of the other Nodes, true for those whose speaker lives. A node that
// may be cut off does not know: for it, all live that were not dead before.
func (s *speaker) others() map[netip.Addr]bool {
	speakers := s.rooms.partition.Speakers()
	live := make(map[string]bool, len(speakers.Live)+len(speakers.Missing))
	for _, name := range speakers.Live {
		live[name] = true
	}
	if s.rooms.partition.CutOff() {
		for _, name := range speakers.Missing {
			live[name] = true
		}
	}
	for _, name := range s.rooms.partition.Dead() {
		delete(live, name)
	}
	others := map[netip.Addr]bool{}
	for name, node := range s.from.nodes.All() {
		for _, addr := range node.Addresses {
			if name != s.self {
				others[addr] = others[addr] || live[name] // two Nodes may show one address
			}
		}
	}
	return others
}

// look reports whether the interfaces that may answer, are in a VRF or lead to a BGP peer differ from those of the last
// step, and tells gossip their addresses. On a busy node others come and go with each pod.
func (s *speaker) look() bool {
	facts := s.facts()
	s.from.members.SetMACs(plan.MACs(facts))
	candidates, peers := plan.Candidates(facts), s.from.routes.peers.All()
	locals := s.rooms.routes.Locals()
	for _, i := range facts.Interfaces {
		counts := i.VRF != "" || plan.IsUplink(i, peers, locals)
		if counts && !slices.ContainsFunc(candidates, i.Equal) {
			candidates = append(candidates, i)
		}
	}
	differ := !slices.EqualFunc(candidates, s.candidates, lb.Interface.Equal)
	s.candidates = candidates
	return differ
}

// hold takes in which VIPs the Services have that have changed, and adds those that they have or
// had to what is dirty. It returns the Services that have none, or some beyond the limit.
func (s *speaker) hold(dirty dirt) (without []lb.Key) {
	keys := dirty.services
	if dirty.all {
		keys = map[lb.Key]bool{}
		for key := range s.from.services.All() {
			keys[key] = true
		}
		for _, key := range s.rooms.holders.Services() {
			keys[key] = true
		}
	}
	changes := make(map[lb.Key]holders.Service, len(keys))
	for key := range keys {
		changes[key] = holders.Service{}
		if service, ok := s.from.services.Get(key); ok && service.Class == s.opts.class {
			assigned, _ := lb.FindCondition(service.Conditions, lb.ConditionAssigned)
			changes[key] = holders.Service{VIPs: service.VIPs(), Assigned: assigned, Created: service.Created}
		}
	}
	touched, without := s.rooms.holders.Step(changes)
	for vip := range touched {
		dirty.vips[vip] = true
	}
	return without
}

// divide takes in which speakers are there, and adds all VIPs to dirty if that changes what is
// decided of them, which it reports.
func (s *speaker) divide(now time.Time, speakers plan.Speakers, dirty map[netip.Addr]bool) (
	changed bool, again time.Duration) {
	interfaces, _ := s.from.interfaces()
	f := partition.Facts{Self: s.self, Speakers: speakers,
		Others: len(speakers.Live)+len(speakers.Missing) > 1 || len(s.from.nodes.All()) > 1}
	up, some := plan.Carriers(s.opts.exclude, s.from.advertisements.All(), interfaces)
	f.Carrier, f.Unplugged = up, some && len(up) == 0
	f.Said, f.Heard = s.to.witness.Outcome()
	if s.from.nodes.Synced() {
		f.IsNode = func(name string) bool { _, is := s.from.nodes.Get(name); return is }
	}
	f.Contact.Asked, f.Contact.Took = s.to.witness.Contact()
	f.Contact.Met, f.ReturnHold = s.from.members.Met(), s.opts.returnHold
	s.phase.wakes, f.Woke = s.from.wakes()
	was, booted := s.rooms.partition.Estranged(), s.rooms.partition.Speakers().Booted
	news, changed, again := s.rooms.partition.Step(now, f)
	changed = changed || !maps.Equal(booted, speakers.Booted) // handoff looks at all VIPs then
	if is := s.rooms.partition.Estranged(); is != was {
		logEstranged(s.log, is, f)
	}
	s.from.members.Seek(s.rooms.partition.EstrangedSince())
	if after := s.rooms.partition.ConfirmAfter(); !after.IsZero() {
		s.from.liveness.ConfirmAfter(after)
	}
	if news {
		said, heard := s.rooms.partition.Heard()
		s.log.Info("the other side of a partition reports over the API server", "heard", heard, "from",
			said.Node, "live", said.Live)
	}
	if changed {
		for _, vip := range s.rooms.holders.All() {
			dirty[vip] = true
		}
	}
	return changed, again
}

// node returns this node's object, nil if there never was one. It is called with mu held. Once it is deleted, which
// happens without a word ahead, the node leaves the cluster, and serves until others do.
func (s *speaker) node() *lb.Node {
	if node, ok := s.from.nodes.Get(s.self); ok {
		return &node
	}
	if s.phase.node == nil {
		return nil
	}
	gone := *s.phase.node
	gone.Leaving = cmp.Or(gone.Leaving, lb.ReasonNodeLeaving)
	return &gone
}

// facts are what this node knows that concerns all VIPs alike.
func (s *speaker) facts() plan.Facts {
	interfaces, _ := s.from.interfaces()
	speakers := s.rooms.partition.Speakers()
	f := plan.Facts{
		Self: s.self, Joined: s.from.members.Joined(), Stopping: s.phase.stopping, Pools: s.from.pools.All(),
		Advertisements: s.from.advertisements.All(), Interfaces: interfaces, Live: speakers.Live,
		Missing: speakers.Missing, Parted: s.rooms.partition.Parted(), Alone: speakers.Alone,
		Estranged:    s.rooms.partition.Estranged(),
		Trusted:      s.rooms.partition.Trusted(),
		Exclude:      s.opts.exclude,
		CordonDrains: s.opts.cordonDrains, IgnoreExclude: s.opts.ignoreExclude,
		IgnoreNetwork: s.opts.ignoreNetwork, RequireReady: s.opts.requireReady,
		CheckForwarding: s.opts.checkForwarding && s.from.feed != nil, OnConflict: s.opts.onConflict,
	}
	f.Node = s.phase.node
	if s.from.feed != nil {
		f.Gate = s.from.feed.Reason()
	}
	return f
}

// lookup returns a function that returns the Services on a VIP, with what the gate says of each, as
// of the first time that it is asked.
func (s *speaker) lookup() func(vip netip.Addr) []plan.Holder {
	found := map[netip.Addr][]plan.Holder{}
	return func(vip netip.Addr) []plan.Holder {
		if holders, ok := found[vip]; ok {
			return holders
		}
		var holders []plan.Holder
		joined := s.rooms.holders.Joined(vip)
		for i, key := range s.rooms.holders.Of(vip) {
			service, _ := s.from.services.Get(key)
			holders = append(holders, plan.Holder{Service: key, Labels: labels.Set(service.Labels),
				Delivery: s.delivery(service, key, vip), OnConflict: service.OnConflict, Joined: joined[i]})
		}
		found[vip] = holders
		return holders
	}
}

// delivery returns what the readiness source reports about a VIP of a Service.
func (s *speaker) delivery(service lb.Service, key lb.Key, vip netip.Addr) *lb.Delivery {
	switch {
	case s.from.feed != nil:
		return s.from.feed.Delivery(lb.DeliveryKey{Service: key, VIP: vip})
	case service.Key != key: // it is gone
		return nil
	}
	endpoints, _ := s.from.slices.Get(key)
	d := gate.Endpoints(service, vip, endpoints, s.self)
	return &d
}

// route decides what BGP peers hear, tells the actors, and adds the VIPs to what is dirty of which
// something else is so than before.
func (s *speaker) route(now time.Time, facts plan.Facts, dirty dirt, services func(netip.Addr) []plan.Holder,
	claims func(netip.Addr) map[string]plan.Claim) (again time.Duration) {
	from := s.from.routes
	f := routes.Facts{
		Node: facts, Unknown: from.missing(), Convergence: s.opts.convergence, Seen: s.to.routes.seen(),
		Rescue: s.from.feed != nil, Rescued: s.from.feed != nil && s.from.feed.Rescued(),
		BGP: plan.BGPFacts{
			Peers: from.peers.All(), Advertisements: from.advertisements.All(), Communities: from.communities.All(),
			Profiles: from.profiles.All(), Passwords: from.passwords.All(), Namespace: from.namespace,
			Restarting: s.phase.restarting, TrustVRFs: s.from.feed == nil, Listening: s.opts.bgpListens,
		},
	}
	if s.from.feed != nil {
		f.BGP.VRFs = s.from.feed.VRFs()
	}
	step := s.rooms.routes.Step(now, f, routes.Events{
		VIPs: dirty.vips, All: dirty.all || dirty.routes, Holders: services, Held: s.rooms.holders.All,
		Elsewhere: func(vip netip.Addr) bool {
			for _, claim := range claims(vip) {
				if claim.Routes != "" && claim.Unrouted == "" {
					return true
				}
			}
			return false
		},
	})
	for vip := range step.Changed {
		dirty.vips[vip] = true
	}
	if step.SessionsChanged {
		s.to.routes.bgp.Set(step.Sessions)
	}
	paths, changed := step.Paths, step.PathsChanged
	if s.beats != nil {
		paths, changed = s.beats.sessions(paths, changed)
	}
	if changed {
		s.to.routes.watch(paths)
	}
	s.announceSessions(step.News)
	writes, wait := s.rooms.routes.Status(now, f, routes.StatusEvents{
		Check: dirty.all || dirty.routes || dirty.status || dirty.nodes || dirty.services != nil,
		Held:  s.held,
	})
	if dirty.all || dirty.nodes {
		s.checkL2(facts)
	}
	if s.rooms.routes.Waiting() == "" {
		s.to.objects.Set(s.jobs(f, writes))
	}
	if wait > 0 {
		return plan.Sooner(step.Again, wait)
	}
	return step.Again
}

// checkL2 looks for what is wrong with L2Advertisements, where this node is the one to report it.
func (s *speaker) checkL2(facts plan.Facts) {
	s.rooms.advertised = nil
	if plan.Winner(netip.Addr{}, facts.Live) == s.self {
		s.rooms.advertised = plan.CheckL2(facts.Advertisements, facts.Pools, s.from.nodes.All())
	}
}

// held are the VIPs of all our Services.
func (s *speaker) held() []plan.BGPHeld {
	var held []plan.BGPHeld
	for _, key := range s.rooms.holders.Services() {
		service, _ := s.from.services.Get(key)
		for _, vip := range s.rooms.holders.VIPs(key) {
			held = append(held, plan.BGPHeld{VIP: vip, Service: key, Labels: service.Labels,
				Local: service.ExternalPolicy == lb.Local})
		}
	}
	return held
}

// scout decides which addresses to probe before Services get them, and adds those to what is dirty of
// which something else is known. It reports whether the actor for ARP and NDP has something else to
// do.
func (s *speaker) scout(now time.Time, facts plan.Facts, dirty dirt, divided bool,
	claims func(netip.Addr) map[string]plan.Claim) (changed bool, again time.Duration) {
	seen := s.to.l2.Outcome()
	f := ahead.Facts{
		Node: facts, Held: s.rooms.holders.Held, Served: s.rooms.ownership.Served,
		Room:   plan.MaxVIPs - s.rooms.holders.Count(),
		Claims: claims, Scouted: seen.Scouted, Version: seen.Version,
	}
	touched, changed, again := s.rooms.ahead.Step(now, f, ahead.Events{
		All: dirty.all || divided, Next: dirty.ahead, Heard: dirty.vips})
	for addr := range touched {
		dirty.vips[addr] = true
	}
	return changed, again
}

// own decides who owns the VIPs that are dirty, and reports whether the actor for ARP and NDP has
// something else to do.
func (s *speaker) own(now time.Time, facts plan.Facts, dirty map[netip.Addr]bool,
	services func(netip.Addr) []plan.Holder, sight plan.Sight,
) (decided map[netip.Addr]ownership.Decided, changed bool, again time.Duration) {
	seen := s.to.l2.Outcome()
	return s.rooms.ownership.Step(now, facts, ownership.Events{
		VIPs: dirty,
		Seen: ownership.Seen{Answering: seen.Answering, Probed: seen.Probed, ConflictingHosts: seen.ConflictingHosts,
			Rivals: seen.Rivals, Version: seen.Version},
		Input: func(vip netip.Addr) (plan.Input, bool) {
			if !s.rooms.holders.Held(vip) {
				return plan.Input{}, false
			}
			return plan.Input{
				VIP: vip, Holders: services(vip),
				Claims: s.from.members.Claims(vip, sight), Restarted: s.from.members.Restarted(vip, sight),
				Routed: s.rooms.routes.Routed(vip), Elsewhere: s.rooms.partition.Elsewhere(vip),
				Clear: s.rooms.ahead.Clear(s.self, vip),
			}, true
		},
	})
}

// handOff tells the proxy which other nodes may hold connections to VIPs, and which VIPs this node does
// not announce yet, if that differs. With nodes set, their addresses may.
func (s *speaker) handOff(now time.Time, nodes bool, decided map[netip.Addr]ownership.Decided) {
	if s.from.feed == nil {
		return
	}
	f := handoff.Facts{Self: s.self, Dead: s.rooms.partition.Dead(), CutOff: s.rooms.partition.CutOff(),
		Booted: s.rooms.partition.Speakers().Booted, Live: s.rooms.partition.Speakers().Live, Gates: s.phase.gates}
	if nodes {
		all := s.from.nodes.All()
		f.Addresses = addresses(all)
		for name, node := range all {
			if node.Labels[lb.LabelAnnouncedBy] != "" {
				f.Foreign = append(f.Foreign, name)
			}
		}
	}
	events := make(map[netip.Addr]*handoff.View, len(decided))
	for vip, d := range decided {
		events[vip] = nil
		if !d.Gone {
			events[vip] = &handoff.View{Claims: d.Claims, Owner: d.After.Owner, Rival: d.Rival,
				Announced: len(d.After.Routed.Peers) > 0,
				Routable:  s.rooms.routes.Routable(vip)}
			if s.phase.gates {
				events[vip].Unannounced = d.After.Unannounced()
			}
		}
	}
	if update, changed := s.rooms.handoff.Step(now, f, events); changed {
		s.from.feed.Tell(update)
	}
}

// act tells the actors what follows from the decisions. With work set, the one for ARP and NDP has
// something else to do, or interfaces may differ; with first set, gossip is told all claims.
func (s *speaker) act(facts plan.Facts, decided map[netip.Addr]ownership.Decided, work, first bool) {
	if s.phase.stopping {
		s.to.witness.Set(witness.Desired{})
	} else {
		d := s.rooms.partition.Desired(s.rooms.ownership.Unserved)
		s.to.witness.Set(witness.Desired{Heed: d.Heed, Tell: d.Tell, Rank: d.Rank, Says: d.Says})
	}
	if work {
		answers, probes := s.rooms.ownership.Desired()
		desired := l2.Desired{Interfaces: facts.Interfaces, Answers: make(map[netip.Addr]l2.Answer, len(answers)),
			Probes: maps.Clone(probes), Ahead: s.rooms.ahead.Desired(), Ours: s.from.members.MACs(),
			Mute: s.rooms.partition.Mute(), Wakes: s.phase.wakes}
		for vip, answer := range answers {
			desired.Answers[vip] = l2.Answer(answer)
		}
		s.to.l2.Set(desired)
	}
	claims := make(map[netip.Addr]*plan.Claim, len(decided))
	for vip := range decided {
		if claims[vip] = s.rooms.ownership.Claim(vip); claims[vip] == nil {
			claims[vip] = s.rooms.ahead.Claim(vip)
		}
	}
	if first {
		s.from.members.Begin(claims)
	} else {
		s.from.members.Update(claims)
	}
}
