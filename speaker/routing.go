package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// routeSources are where the speaker reads what concerns BGP only.
type routeSources struct {
	peers          table[string, lb.Peer]
	advertisements table[string, lb.BGPAdvertisement]
	communities    table[string, lb.CommunityNames]
	profiles       table[string, lb.BFDProfile]
	passwords      table[string, string] // of the Secrets in namespace
	namespace      string
}

// routeSinks are where the speaker acts for BGP.
type routeSinks struct {
	bgp interface {
		Set(map[string]lb.BGPSession)
		Statuses() map[string]bgp.Status
		Brief() map[string]bgp.Status
		Announced(netip.Prefix) []string
	}
	bfd interface {
		Set(map[bfd.Key]bfd.Profile)
		Outcomes() map[bfd.Key]bfd.Outcome
		Health() bfd.Health
	}
}

// routing is what the loop keeps for BGP.
type routing struct {
	book  plan.BGPBook
	paths paths

	waiting string // what is needed before the first plan; "" once there is one
	planned bool
	// restarting is set, while the speaker stops, when a successor is expected on this node.
	restarting bool
	brief      map[string]bgp.Status // as the actor last said
	heard      map[netip.Addr][]string
	// pending are the VIPs of which other peers may hear now than heard says.
	pending map[netip.Addr]bool
	// leaving are the VIPs whose end routers are told of, until when they are announced yet.
	leaving map[netip.Addr]*departure

	words words
}

// departure is the planned end of a VIP's announcement.
type departure struct {
	until time.Time
	over  bool
}

func newRouting() routing {
	return routing{
		waiting: "the API server", heard: map[netip.Addr][]string{}, pending: map[netip.Addr]bool{},
		leaving: map[netip.Addr]*departure{},
		paths:   paths{by: map[string]*watch{}}, words: words{},
	}
}

// unrouted says what a plan of routes needs and is not known yet. Until then no session is opened:
// a router that has kept the routes of this speaker's predecessor drops those that it does not hear
// again.
func (s *speaker) unrouted(facts plan.Facts) string {
	from := s.from.routes
	switch {
	case s.routing.planned:
		return ""
	case !from.peers.Synced():
		return "the list of BGPPeers"
	case !from.advertisements.Synced():
		return "the list of BGPAdvertisements"
	case !from.communities.Synced():
		return "the list of Communities"
	case !from.profiles.Synced():
		return "the list of BFDProfiles"
	case !facts.Joined:
		return "the other speakers" // to know where connections are that routers move here
	case facts.Gate == lb.ReasonFeedUnknown:
		return "the proxy's first word"
	}
	for _, p := range from.peers.All() {
		if p.PasswordSecret != nil && !from.passwords.Synced() {
			return "the list of Secrets in namespace " + from.namespace
		}
	}
	return ""
}

// route plans what BGP peers hear, tells the actors, and adds the VIPs to vips of which something
// else is so than before. With all set, more may have changed than the VIPs in vips. It returns
// when to look again; 0 for not at all.
func (s *speaker) route(now time.Time, facts plan.Facts, all bool, vips map[netip.Addr]bool) time.Duration {
	r := &s.routing
	if r.waiting = s.unrouted(facts); r.waiting != "" {
		return 0
	}
	all = all || !r.planned
	r.planned = true
	s.observe(vips)
	s.part(now, vips)
	r.paths.judge(now, s.to.routes.bfd.Outcomes())

	b := s.routeFacts()
	changed := false
	planned := vips
	if all {
		inputs := make([]plan.BGPInput, 0, len(s.holders))
		for vip := range s.holders {
			in, _ := s.routeInput(vip)
			inputs = append(inputs, in)
		}
		before := r.book.VIPs()
		changed = r.book.PlanAll(facts, b, inputs)
		planned = map[netip.Addr]bool{}
		for vip := range before {
			planned[vip] = true
		}
		for vip := range r.book.VIPs() {
			planned[vip] = true
		}
	} else {
		planned, changed = r.book.Plan(facts, b, vips, s.routeInput)
	}
	for vip := range planned {
		vips[vip] = true
		r.pending[vip] = true
		s.depart(now, vip)
	}
	if changed {
		s.to.routes.bgp.Set(r.book.Sessions())
	}
	if r.paths.plan(&r.book, r.brief, facts.Interfaces, s.to.routes.bfd.Outcomes()) {
		s.to.routes.bfd.Set(r.paths.desired())
	}
	s.observe(vips) // an actor that was told something may have done it already
	return s.routeAgain(now)
}

// observe notes which peers hear of the VIPs for which that may have changed.
func (s *speaker) observe(vips map[netip.Addr]bool) {
	r := &s.routing
	brief := s.to.routes.bgp.Brief()
	settled := true
	for _, status := range brief {
		settled = settled && (status.Synced || status.State != bgp.Established)
	}
	flapped := false
	for name := range r.book.Sessions() {
		flapped = flapped || upSince(brief[name]) != upSince(r.brief[name])
	}
	if flapped || len(brief) != len(r.brief) {
		for vip := range r.book.VIPs() {
			r.pending[vip] = true
		}
		s.announceSessions(r.brief, brief)
	}
	r.brief = brief
	for vip := range r.pending {
		peers := s.hearing(r.book.VIP(vip).Prefixes)
		if !slices.Equal(peers, r.heard[vip]) {
			vips[vip] = true
			r.heard[vip] = peers
		}
		if len(peers) == 0 {
			delete(r.heard, vip)
		}
	}
	if settled {
		clear(r.pending)
	}
}

// upSince is when a session was established; zero while it is not.
func upSince(s bgp.Status) time.Time {
	if s.State != bgp.Established {
		return time.Time{}
	}
	return s.Since
}

// hearing are the peers that hear of one of the prefixes, sorted.
func (s *speaker) hearing(prefixes []netip.Prefix) []string {
	var peers []string
	for _, p := range prefixes {
		peers = append(peers, s.to.routes.bgp.Announced(p)...)
	}
	slices.Sort(peers)
	return slices.Compact(peers)
}

// part adds to vips those whose departure is over.
func (s *speaker) part(now time.Time, vips map[netip.Addr]bool) {
	for vip, d := range s.routing.leaving {
		if !d.over && !now.Before(d.until) {
			d.over = true
			vips[vip] = true
		}
	}
}

// depart notes that the end of a VIP's announcement has begun, or that there is none.
func (s *speaker) depart(now time.Time, vip netip.Addr) {
	r := &s.routing
	v, known := r.book.VIPs()[vip]
	switch {
	case !known || v.Refusal == nil:
		delete(r.leaving, vip)
	case v.Leaving && r.leaving[vip] == nil:
		r.leaving[vip] = &departure{until: now.Add(s.opts.convergence)}
	}
}

func (s *speaker) routeAgain(now time.Time) time.Duration {
	next := s.routing.paths.again(now)
	for _, d := range s.routing.leaving {
		if !d.over {
			next = sooner(next, d.until.Sub(now))
		}
	}
	return next
}

// sooner returns the lesser of two waits, of which 0 is for ever; a wait that is over already is as
// short as can be.
func sooner(a, b time.Duration) time.Duration {
	if b <= 0 {
		b = time.Nanosecond
	}
	if a == 0 || b < a {
		return b
	}
	return a
}

func (s *speaker) routeFacts() plan.BGPFacts {
	from := s.from.routes
	return plan.BGPFacts{
		Peers: from.peers.All(), Advertisements: from.advertisements.All(), Communities: from.communities.All(),
		Profiles:  from.profiles.All(),
		Passwords: from.passwords.All(), Namespace: from.namespace, BFDDown: s.routing.paths.lost(),
		Restarting: s.routing.restarting,
	}
}

// routeInput is what this node knows of a VIP for BGP; ok is false when no Service holds it.
func (s *speaker) routeInput(vip netip.Addr) (in plan.BGPInput, ok bool) {
	keys, ok := s.holders[vip]
	if !ok {
		return in, false
	}
	in = plan.BGPInput{VIP: vip, Holders: s.holdersOf(keys, vip), Announced: len(s.routing.heard[vip]) > 0}
	for _, h := range in.Holders {
		in.Labels = append(in.Labels, h.Labels)
	}
	if d := s.routing.leaving[vip]; d != nil {
		in.Converged = d.over
	}
	return in, true
}

func (s *speaker) holdersOf(keys []lb.Key, vip netip.Addr) []plan.Holder {
	var holders []plan.Holder
	for _, key := range keys {
		service, _ := s.from.services.Get(key)
		holders = append(holders, plan.Holder{Service: key, Labels: labels.Set(service.Labels),
			Delivery: s.delivery(key, vip), OnConflict: service.OnConflict})
	}
	return holders
}

// routed is what has become of a VIP over BGP.
func (s *speaker) routed(vip netip.Addr) plan.Routed {
	if s.routing.waiting != "" {
		return plan.Routed{}
	}
	return s.routing.book.VIP(vip).Routed(slices.Clone(s.routing.heard[vip]))
}

// routesQuiet tells whether nothing is on its way to any peer, and no end of an announcement has to
// be waited for, after stop.
func (s *speaker) routesQuiet() bool {
	r := &s.routing
	if r.waiting != "" {
		return true // there are no sessions
	}
	for _, v := range r.book.VIPs() {
		if v.Leaving || v.Refusal == nil {
			return false
		}
	}
	for _, status := range s.to.routes.bgp.Brief() {
		if status.State == bgp.Established && !status.Synced {
			return false
		}
	}
	return true
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
