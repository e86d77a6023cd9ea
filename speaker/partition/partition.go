// Package partition decides what a node makes of the speakers that it does not see: whether it may
// be cut off, for how long it yields to the others, and what it says or reads over the API server.
package partition

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Reunion is how long a node that sees a majority again goes on yielding: time for the newest
// claims of all to arrive. Before, the nodes would go by what was said before they were parted.
const Reunion = 2 * time.Second

// standby is how many nodes stand by to renew the Lease, one for the other.
const standby = 3

// Facts are what the node sees and hears.
type Facts struct {
	Self     string
	Speakers plan.Speakers
	// Said is what another node has said over the API server, if Heard is set.
	Said  lb.Witness
	Heard bool
	// IsNode reports whether the cluster has a Node of this name; nil while that is unknown.
	IsNode func(name string) bool
	// Others is set when the cluster has other nodes.
	Others bool
	// Carrier are the interfaces with a carrier on which this node may answer. Unplugged is set if it
	// has such interfaces, and all are without a carrier.
	Carrier   []string
	Unplugged bool
	// Woke is when the process last went on after it had been frozen; the zero time if it never was.
	Woke    time.Time
	Contact Contact
	// ReturnHold is how long the node waits to hear another speaker that may have been cut off; 0 for
	// not at all.
	ReturnHold time.Duration
}

// State is what is remembered from one step to the next. The zero value is ready.
type State struct {
	self   string
	seen   plan.Speakers
	others lb.Witness // what a majority says that this node does not see
	heard  bool
	// As of the last step: apart is set when the node saw no majority, half when it saw exactly half
	// of the speakers, and few when it saw no more.
	apart, half, few bool
	only             bool      // it saw no other speaker, in a cluster with other nodes
	calm             time.Time // when it has seen more than half of them for long enough
	parted           bool
	alone            bool      // as of the last step
	until            time.Time // how long a node that sees a majority again counts as parted, and goes on yielding

	estrangement estrangement
	estranged    bool
	mute         bool
	deadSince    map[string]time.Time // nodes that are dead, or were until this node may have been cut off
}

// Step takes in who is there. It reports whether a majority elsewhere has said something new, and
// whether that or anything else changes what is decided of all VIPs. again is when to look again;
// 0 for not at all.
func (s *State) Step(now time.Time, f Facts) (news, changed bool, again time.Duration) {
	// Decisions keep these lists: one for all of them while they are the same.
	if slices.Equal(f.Speakers.Live, s.seen.Live) {
		f.Speakers.Live = s.seen.Live
	}
	if slices.Equal(f.Speakers.Missing, s.seen.Missing) {
		f.Speakers.Missing = s.seen.Missing
	}
	// Those who count this node among them speak of the time before they lost it, if they have: they do
	// not say who serves what it does not.
	f.Heard = f.Heard && !slices.Contains(f.Said.Live, f.Self)
	if f.Heard && f.Speakers.Majority && outweighed(f) {
		f.Speakers = f.Speakers.Outweighed()
	}
	s.self, s.seen = f.Self, f.Speakers
	s.only = f.Others && len(f.Speakers.Live) == 1
	s.bury(now)
	said, heard := f.Said, f.Heard
	lost := !s.apart && (!s.seen.Majority || s.seen.Half && !s.half) // of two halves, either may be cut off
	found := s.seen.Most() && s.few
	if !s.seen.Majority || s.apart {
		// From the first look at which they are together again, as nothing may have called for one in
		// between.
		s.until = now.Add(Reunion)
	}
	if !s.seen.Most() || s.few {
		s.calm = now.Add(Reunion)
	}
	s.apart, s.half, s.few = !s.seen.Majority, s.seen.Half, !s.seen.Most()
	s.estrangement.step(now, f, look{lost: lost, found: found, calm: !now.Before(s.calm)})
	until := s.until
	if woke := s.estrangement.woke; !woke.IsZero() && until.Before(woke.Add(Reunion)) {
		until = woke.Add(Reunion) // others may have taken over while this node was frozen
	}
	parted := now.Before(until)
	if s.seen.Majority {
		heard, said = s.heard && parted, s.others
		if parted {
			again = until.Sub(now)
		}
	}
	estranged, mute := s.estrangement.on, s.estrangement.mute(now, f)
	if next := s.estrangement.next(now, f); !next.IsZero() {
		again = plan.Sooner(again, next.Sub(now))
	}
	news = heard != s.heard || heard && !said.Same(s.others)
	changed = news || parted != s.parted || f.Speakers.Alone != s.alone || estranged != s.estranged || mute != s.mute
	s.alone = f.Speakers.Alone
	s.others, s.heard, s.parted, s.estranged, s.mute = said, heard, parted, estranged, mute
	return news, changed, again
}

// outweighed reports whether the side that has written the Lease is to serve, and not the one that this node sees,
// although each takes itself for the majority: a speaker that starts while the cluster is parted is counted by
// the side that it has met, and knows nobody of the other one. Both sides apply this rule, and come to the same. On
// a side of more than standby nodes not all read the Lease; it goes on. Names without a Node do not count: whoever
// writes the Lease can make up any number of them.
func outweighed(f Facts) bool {
	ours, theirs := f.nodes(f.Speakers.Live), f.nodes(f.Said.Live)
	if len(f.Speakers.Live) > standby || len(theirs) == 0 {
		return false
	}
	return len(theirs) > len(ours) || len(theirs) == len(ours) && theirs[0] < ours[0]
}

// nodes returns those of sorted names that are Nodes, each once; all of them while it is unknown which are.
func (f Facts) nodes(names []string) []string {
	var nodes []string
	for _, name := range slices.Compact(slices.Clone(names)) {
		if f.IsNode == nil || f.IsNode(name) {
			nodes = append(nodes, name)
		}
	}
	return nodes
}

// Speakers are those that the node saw in the last step.
func (s *State) Speakers() plan.Speakers { return s.seen }

// Parted reports whether the node sees no majority of the speakers, or has seen none a moment ago.
func (s *State) Parted() bool { return s.parted }

// Estranged reports whether the node may have been cut off and has heard no other speaker since: it
// has no address that it did not answer for before.
func (s *State) Estranged() bool { return s.estranged }

// EstrangedSince returns from when on another speaker has to be heard; the zero time if none has,
// or if none can be.
func (s *State) EstrangedSince() time.Time {
	if !s.estranged || s.estrangement.unplugged {
		return time.Time{}
	}
	return s.estrangement.since
}

// CutOff reports whether this node may be cut off from the others, or was until a moment ago. One
// that sees no majority and hears of none, and is estranged no more, has outlived the others.
func (s *State) CutOff() bool { return s.estranged || s.parted && (s.seen.Majority || s.heard) }

// Dead are the nodes that are dead. A node that comes back finds the others one by one, and may see
// a majority before it has found all: until it has, only those count as dead that were dead for
// sure before it was cut off.
func (s *State) Dead() []string {
	if !s.CutOff() {
		return s.seen.Dead
	}
	var dead []string
	for _, node := range slices.Sorted(maps.Keys(s.deadSince)) {
		if s.deadSince[node].Before(s.estrangement.trusted) {
			dead = append(dead, node)
		}
	}
	return dead
}

// bury notes since when nodes are dead.
func (s *State) bury(now time.Time) {
	maps.DeleteFunc(s.deadSince, func(node string, _ time.Time) bool {
		return !slices.Contains(s.seen.Missing, node) && !slices.Contains(s.seen.Silent, node) // not missed, but dead
	})
	for _, node := range s.seen.Dead {
		if _, known := s.deadSince[node]; !known {
			if s.deadSince == nil {
				s.deadSince = map[string]time.Time{}
			}
			s.deadSince[node] = now
		}
	}
}

// Trusted returns until when a node that is estranged was not, for sure: what it has taken since
// then it gives up.
func (s *State) Trusted() time.Time { return s.estrangement.trusted }

// ConfirmAfter returns after which moment the kernels of the others have to be asked once more, for this node to know
// that it has outlived them; the zero time for not.
func (s *State) ConfirmAfter() time.Time { return s.estrangement.confirmAfter }

// Mute reports whether the process was frozen and has heard no other speaker since: it answers for
// nothing.
func (s *State) Mute() bool { return s.mute }

// Heard returns what a majority says that this node does not see.
func (s *State) Heard() (said lb.Witness, heard bool) { return s.others, s.heard }

// Elsewhere reports whether a majority that this node does not see answers for the VIP.
func (s *State) Elsewhere(vip netip.Addr) bool { return s.heard && s.others.Serves(s.self, vip) }

// Desired is what the node makes of the Lease by which the sides of a partition hear of one
// another.
type Desired struct {
	// Heed is set when the node reads it, Tell when it renews it.
	Heed, Tell bool
	// Rank is the node's place among those that renew it.
	Rank int
	Says lb.Witness
}

// Desired returns what the node makes of the Lease: it reads it while it sees no majority, or no other speaker
// at all, and renews it while it sees a majority and misses somebody. unserved are the VIPs that no node answers for,
// sorted.
func (s *State) Desired(unserved func() []netip.Addr) Desired {
	switch {
	case !s.seen.Majority, !s.seen.Lost && (s.estranged || s.only):
		return Desired{Heed: true} // also to learn whether the API server answers
	case !s.seen.Lost:
		return Desired{}
	case s.seen.Rank >= standby && s.estranged:
		return Desired{Heed: true}
	case s.seen.Rank >= standby:
		return Desired{}
	}
	return Desired{Tell: true, Rank: s.seen.Rank,
		Says: lb.Witness{Node: s.self, Live: s.seen.Live, Unserved: unserved()}}
}
