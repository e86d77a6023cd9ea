package routes

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// What the speakers show of BGP at the API server: each node writes about its session with each
// BGPPeer, and one of all nodes writes the rest.

// CheckEvery is the least time between two looks at what is wrong with advertisements, which goes
// through all Services.
const CheckEvery = time.Second

// refused is the state of a session that the node does not have, in the status of its peer.
const refused = "Refused"

// maxMessage is the most characters of a message, as in the schema of BGPPeers.
const maxMessage = 512

// checks is what is remembered of the looks at advertisements.
type checks struct {
	due        bool
	at         time.Time               // of the last look
	conditions map[string]lb.Condition // by advertisement; nil where another node reports
}

// Writes are what the status of objects lacks.
type Writes struct {
	// Peers are what this node has to say of its sessions, by peer; nil takes back what it said.
	Peers map[string]*lb.PeerNode
	// Conditions are by BGPAdvertisement.
	Conditions map[string]lb.Condition
}

// StatusEvents are what may change what is written.
type StatusEvents struct {
	// Check is set when something was changed that may be wrong with advertisements.
	Check bool
	// Held returns all VIPs with their Services. It is called when advertisements are looked at, which
	// is not in each step.
	Held func() []plan.BGPHeld
}

// Status returns what is to be written, and when to look again; 0 for not at all.
func (s *State) Status(now time.Time, f Facts, e StatusEvents) (w Writes, again time.Duration) {
	s.checks.due = s.checks.due || e.Check
	if s.waiting != "" {
		return w, 0
	}
	again = s.check(now, f, e)
	w = Writes{Peers: map[string]*lb.PeerNode{}, Conditions: map[string]lb.Condition{}}
	for name, p := range f.BGP.Peers {
		if status, differs := s.peerStatus(f, p); differs {
			w.Peers[name] = status
		}
	}
	for name, c := range s.checks.conditions {
		ad, ok := f.BGP.Advertisements[name]
		if ok && !f.Node.Stopping && !slices.Contains(ad.Conditions, c) {
			w.Conditions[name] = c
		}
	}
	return w, again
}

// peerStatus is what a peer's status shall show of this node; differs is false when it does
// already.
func (s *State) peerStatus(f Facts, p lb.Peer) (status *lb.PeerNode, differs bool) {
	have, had := p.Status[f.Node.Self]
	if f.Node.Stopping {
		// The next speaker here has something to say of its own.
		return nil, had && !f.BGP.Restarting
	}
	status, known := s.session(p.Name, f.Seen)
	switch {
	case !known:
		return nil, false
	case status == nil:
		return nil, had
	}
	status.Message = fmt.Sprintf("%.*s", maxMessage, status.Message)
	return status, !had || *status != have
}

// session is what this node says of its session with a peer; nil when it is to have none. known is
// false until the actor has begun with it: unknown is not absent.
func (s *State) session(name string, seen Seen) (shown *lb.PeerNode, known bool) {
	d, ok := s.book.Peers()[name]
	switch {
	case !ok:
		return nil, true
	case d.Refusal != nil:
		return &lb.PeerNode{State: refused, Reason: d.Refusal.Reason, Message: d.Refusal.Message}, true
	}
	session, ok := seen.Sessions[name]
	if !ok {
		return nil, false
	}
	status := session.Status
	switch w := s.paths.by[name]; {
	case !session.Established || status.Reason != "":
	case d.Warning != nil:
		status.Reason, status.Message = d.Warning.Reason, d.Warning.Message
	case w != nil:
		status.Message = seen.Paths[w.path].Message
	}
	return &status, true
}

// check looks for what is wrong with advertisements, where this node is the one to report it. It
// returns when the next look is due; 0 for not before something changes.
func (s *State) check(now time.Time, f Facts, e StatusEvents) time.Duration {
	c := &s.checks
	if !c.due {
		return 0
	}
	if wait := CheckEvery - now.Sub(c.at); wait > 0 {
		return wait
	}
	*c = checks{at: now}
	if plan.Winner(netip.Addr{}, f.Node.Live) != f.Node.Self {
		return 0
	}
	c.conditions = plan.CheckBGP(f.BGP, f.Node.Pools, e.Held())
	return 0
}
