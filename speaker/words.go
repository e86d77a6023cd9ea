package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
)

// What the speaker says of BGP at the API server: each node its word on each BGPPeer, and one of
// all nodes the rest.

// checkEvery is the least time between two looks at what is wrong with advertisements, which goes
// through all Services.
const checkEvery = time.Second

// writers write into the status of objects.
type writers struct {
	// peerNode writes the word of a node on a peer, or takes it back if it is nil; drop takes back
	// those of nodes that are gone.
	peerNode      func(ctx context.Context, peer, node string, word *lb.PeerNode) error
	drop          func(ctx context.Context, peer string, nodes []string) error
	advertisement func(context.Context, lb.BGPAdvertisement, lb.Condition) (wrote bool, err error)
	// event tells of a change of a session.
	event func(p lb.Peer, good bool, reason lb.Reason, message string)
}

// words is what the loop keeps to say such things.
type words struct {
	due        bool // a look at what is wrong with advertisements
	checked    time.Time
	conditions map[string]lb.Condition // by advertisement; nil where another node reports
	strays     map[string][]string     // by peer, the nodes that are gone and still have a word in its status
}

// refused is the state of a session that the node does not have, in the status of its peer.
const refused = "Refused"

// speak says what is to be written, and returns when to look again.
func (s *speaker) speak(now time.Time, facts plan.Facts) time.Duration {
	if s.routing.waiting != "" {
		return 0
	}
	again := s.checkAdvertisements(now, facts)
	jobs := map[string]report.Job{}
	for name, p := range s.from.routes.peers.All() {
		if job, ok := s.peerJob(p); ok {
			jobs["BGPPeer "+name] = job
		}
		if strays := s.routing.words.strays[name]; len(strays) > 0 && !s.stopping {
			jobs["strays of BGPPeer "+name] = report.Job{Word: strings.Join(strays, " "), Do: func(ctx context.Context) error {
				return s.to.writers.drop(ctx, name, strays)
			}}
		}
	}
	for name, c := range s.routing.words.conditions {
		ad, ok := s.from.routes.advertisements.Get(name)
		if !ok || s.stopping || slices.Contains(ad.Conditions, c) {
			continue
		}
		jobs["BGPAdvertisement "+name] = report.Job{Word: fmt.Sprint(c), Do: func(ctx context.Context) error {
			_, err := s.to.writers.advertisement(ctx, ad, c)
			return err
		}}
	}
	s.to.objects.Set(jobs)
	return again
}

// peerJob makes the status of a peer show this node's word; ok is false when it does already.
func (s *speaker) peerJob(p lb.Peer) (job report.Job, ok bool) {
	word := s.peerWord(p.Name)
	have, had := p.Status[s.self]
	switch {
	case s.stopping && (s.routing.restarting || !had): // the next speaker here has a word of its own
		return job, false
	case word == nil && !had, word != nil && had && *word == have:
		return job, false
	}
	return report.Job{Word: fmt.Sprint(word), Do: func(ctx context.Context) error {
		return s.to.writers.peerNode(ctx, p.Name, s.self, word)
	}}, true
}

// peerWord is what this node says of its session with a peer; nil when it is to have none.
func (s *speaker) peerWord(name string) *lb.PeerNode {
	r := &s.routing
	d, ok := r.book.Peers()[name]
	switch {
	case !ok || s.stopping:
		return nil
	case d.Refusal != nil:
		return &lb.PeerNode{State: refused, Reason: d.Refusal.Reason, Message: d.Refusal.Message}
	}
	word := r.brief[name].Word()
	switch w := r.paths.by[name]; {
	case word.State != string(bgp.Established) || word.Reason != "":
	case d.Warning != nil:
		word.Reason, word.Message = d.Warning.Reason, d.Warning.Message
	case w != nil:
		word.Message = s.pathSentence(*w)
	}
	return &word
}

// pathSentence says whether BFD watches the path to a peer.
func (s *speaker) pathSentence(w watch) string {
	o, ok := s.to.routes.bfd.Outcomes()[w.key]
	switch {
	case !ok:
		return ""
	case o.Refused != nil:
		return o.Refused.Message
	case o.State == bfd.Up:
		return "BFD is Up"
	case o.Problem != "":
		return "BFD is " + o.State.String() + ": " + o.Problem
	}
	return "BFD is " + o.State.String()
}

// announceSessions sends Events for sessions that are up or were lost since before.
func (s *speaker) announceSessions(before, now map[string]bgp.Status) {
	for name, status := range now {
		p, ok := s.from.routes.peers.Get(name)
		if !ok {
			continue
		}
		up, wasUp := upSince(status), upSince(before[name])
		switch {
		case !up.IsZero() && up != wasUp:
			s.to.writers.event(p, true, lb.ReasonEstablished, "the session with "+s.self+" is established")
		case up.IsZero() && !wasUp.IsZero():
			s.to.writers.event(p, false, status.Reason, fmt.Sprintf("the session with %s is lost: %s", s.self, status.LastError))
		}
	}
}

// checkAdvertisements looks for what is wrong with advertisements, and for words of nodes that are
// gone, where this node is the one to report it. It returns when the next look is due; 0 for not
// before something changes.
func (s *speaker) checkAdvertisements(now time.Time, facts plan.Facts) time.Duration {
	w := &s.routing.words
	if !w.due {
		return 0
	}
	if wait := checkEvery - now.Sub(w.checked); wait > 0 {
		return wait
	}
	w.due, w.checked, w.conditions, w.strays = false, now, nil, nil
	if plan.Winner(netip.Addr{}, facts.Live) != s.self {
		return 0
	}
	w.conditions = plan.CheckBGP(s.routeFacts(), facts.Pools, s.held())
	w.strays = map[string][]string{}
	nodes := s.from.nodes.All()
	for name, p := range s.from.routes.peers.All() {
		for _, node := range sortedKeys(p.Status) {
			if _, ok := nodes[node]; !ok {
				w.strays[name] = append(w.strays[name], node)
			}
		}
	}
	return 0
}

// held are the VIPs of all our Services.
func (s *speaker) held() []plan.BGPHeld {
	var held []plan.BGPHeld
	for key, vips := range s.vips {
		service, _ := s.from.services.Get(key)
		for _, vip := range vips {
			held = append(held, plan.BGPHeld{VIP: vip, Service: key, Labels: service.Labels,
				Local: service.ExternalPolicy == lb.Local})
		}
	}
	return held
}
