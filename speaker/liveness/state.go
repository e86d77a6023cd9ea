package liveness

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// A speaker that crashes does not take its node with it: the kernel there still forwards, and
// clients that know the way go on. So the addresses that it announced are reserved for a while, in
// the hope that the speaker is back before a client has to ask for the way. The same holds for a
// speaker that gets no CPU time, and for one whose gossip a packet filter drops. A node that has
// crashed, is cut off or is frozen answers no probe, and the others take over at once.

// staleFor is how long the claims of a node that was lost and has come back count as stale, unless
// the node replaces them sooner. After that the node has had nothing else to say.
const staleFor = time.Second

// followEvery is how often a node is asked that is not waited for any more, and that may hold connections: one that was
// drained may be switched off at any time, and gossip does not see that.
const followEvery = 10 * time.Second

// Probe asks whether the kernel of a node answers.
type Probe struct {
	Node string
	Addr netip.AddrPort

	doubt     uint64    // of a suspect
	held      uint64    // of a node that is waited for, or that may go down after its speaker
	alarm     time.Time // of a node on a lost path
	condemned uint64    // of a node that gossip still knows
	confirms  time.Time // of a dead node that is asked once more, after that moment
	witness   bool      // of a node that nothing is held against: see witness.go
	late      bool      // of a witness that is asked once another node has not answered for a while
}

// buries reports whether a node counts as dead if it does not answer.
func (p Probe) buries() bool { return !p.witness && p.confirms.IsZero() && p.condemned == 0 }

// Answer is what has come of a Probe.
type Answer struct {
	Probe
	Answered bool
}

// State judges what has become of the speakers of other nodes, from what gossip reports and from
// probes. It is a value without a clock: each method is given the time.
type State struct {
	self     string
	hold     time.Duration
	interval time.Duration // between two probes of gossip by one node
	ring     int           // successors on the ring whose paths this node watches
	nodes    map[string]*peer
	boots    boots
	previous reserved  // for this node, by the others
	turn     uint64    // counts the draws of nodes that are asked as witnesses
	doubting time.Time // since when answers count of those asked while this node may be cut off
	unsure   bool      // a silence of the last round shows nothing
	sure     bool      // enough have answered since, and the suspects of that time are asked once more
	// confirmAfter is after which moment the dead are to be asked once more, the zero time for not, and confirmed the
	// last such moment after which they were.
	confirmAfter, confirmed time.Time
	// cluster are the other Nodes; nil while they are not known.
	cluster map[string][]netip.Addr
}

// phase is what gossip knows of a node's speaker.
type phase int

const (
	absent  phase = iota // it has left, or was lost and diagnosed
	live                 // it takes part
	suspect              // gossip has lost it, and the probe of its node is under way
)

// peer is what is known of another node.
type peer struct {
	plan.Process
	phase phase
	doubt uint64 // counts the times at which gossip lost it
	// silent is since when the kernel of a suspect has not answered, while too few others do.
	silent time.Time
	// asked is when its kernel was last asked, answered when it last answered.
	asked, answered time.Time
	met             bool   // it has been live, and has not left
	farewell        uint64 // the process that has said that it ends as planned
	dead            bool
	alarm           alarm
	// condemned is set while the node counts as dead because of an alarm, and gossip has not lost it.
	condemned bool
	// gone is when it became absent. quiet is set if its kernel did not answer the last time, long after its speaker.
	gone       time.Time
	quiet      bool
	hold       reserved
	stale      plan.Point
	staleUntil time.Time
}

// reserved is the process whose addresses are reserved for its node, and until when. Once the time
// is over it keeps the same process from being waited for again.
type reserved struct {
	born  uint64
	until time.Time
	probe netip.AddrPort // not valid while the node is known to be there otherwise
	// left is set if nothing is reserved, as the process has ended as planned: the node is only asked whether it
	// follows.
	left bool
}

func (r reserved) active(now time.Time) bool { return now.Before(r.until) }

// waits reports whether addresses are reserved.
func (r reserved) waits(now time.Time) bool { return r.active(now) && !r.left }

// NewState returns a State that has met no other node. hold is how long it reserves what a
// crashed speaker announced, interval the time between two probes of gossip by one node.
func NewState(self string, hold, interval time.Duration) *State {
	return &State{self: self, hold: hold, interval: interval, nodes: map[string]*peer{}}
}

func (l *State) peer(node string) *peer {
	n := l.nodes[node]
	if n == nil {
		n = &peer{}
		l.nodes[node] = n
	}
	return n
}

// Joined takes in that a process takes part in gossip. What an earlier process of its node
// announced is reserved for it.
func (l *State) Joined(p plan.Process, now time.Time) {
	n := l.peer(p.Node)
	lost := n.phase == absent && n.met
	n.Process, n.phase, n.met, n.dead = p, live, true, false
	n.alarm, n.condemned = alarm{}, false
	l.boots.met(p)
	if p.Heard == (plan.Point{}) {
		return
	}
	if p.Heard.Born < p.Born {
		n.reserve(p, now, l.hold)
		return
	}
	if n.hold.born == p.Heard.Born {
		n.hold = reserved{} // a false alarm: the process goes on
	}
	if lost {
		n.stale, n.staleUntil = p.Heard, now.Add(staleFor)
	}
}

// Lost takes in that gossip has lost a process. It is suspect until its node is probed, unless it has said farewell:
// then it has left.
func (l *State) Lost(p plan.Process, now time.Time) (left bool) {
	n := l.peer(p.Node)
	if n.farewell != 0 && n.farewell == p.Born {
		n.Process = p
		n.leave(now, l.hold)
		return true
	}
	if n.condemned && n.Born == p.Born {
		n.condemned = false // gossip has come to the same
		return false
	}
	n.Process, n.phase, n.met, n.dead = p, suspect, true, false
	n.alarm, n.condemned, n.silent = alarm{}, false, time.Time{}
	n.doubt++
	return false
}

// Farewell takes in that a process ends as planned: the others have taken over from it. Gossip loses it before or
// after. It reports whether that is news, and whether the process has left by now.
func (l *State) Farewell(node string, born uint64, now time.Time) (news, left bool) {
	n := l.nodes[node]
	if n == nil || n.Born != born || n.farewell == born {
		return false, false
	}
	n.farewell = born
	if n.phase == live || n.condemned {
		return true, false
	}
	n.leave(now, l.hold)
	return true, true
}

// leave notes that the process has ended as planned. Its node is missed no more, and may follow it, as in a reboot.
func (n *peer) leave(now time.Time, hold time.Duration) {
	n.forget(now)
	n.met, n.condemned = false, false
	n.release(n.Heard.Born)
	if !n.dead && n.hold.born != 0 {
		n.hold.until, n.hold.probe, n.hold.left = now.Add(hold), n.Addr, true
	}
}

// ConfirmAfter has the kernels of all dead nodes asked once more, after the given moment. It reports whether they were
// not asked since then, nor are about to be.
func (l *State) ConfirmAfter(after time.Time) (news bool) {
	if !after.After(l.confirmed) || !after.After(l.confirmAfter) {
		return false
	}
	l.confirmAfter = after
	return true
}

// Recalled takes in that others reserve what the process born then has announced from this node.
func (l *State) Recalled(born uint64, now time.Time) {
	if born > l.previous.born {
		l.previous = reserved{born: born, until: now.Add(l.hold)}
	}
}

// Keep takes in which other nodes the cluster has, and forgets those that are absent and not among them, but for those
// that may hold connections. Who becomes absent later is missed no more, and known to be dead until the next call.
func (l *State) Keep(nodes map[string][]netip.Addr, now time.Time) {
	l.boots.keep(nodes, now)
	l.cluster = nodes
	maps.DeleteFunc(l.nodes, func(name string, n *peer) bool {
		if l.isNode(name) || n.phase != absent {
			return false
		}
		n.hold.left = true
		return !n.follows(now)
	})
}

// isNode reports whether the cluster has a Node of that name, as far as is known.
func (l *State) isNode(name string) bool {
	_, is := l.cluster[name]
	return is || l.cluster == nil
}

// follows reports whether a node whose speaker is gone may go down after it: it may hold connections for as long as
// proxies remember a silent one, and other nodes hand it packets of theirs.
func (n *peer) follows(now time.Time) bool {
	return n.phase == absent && !n.dead && n.hold.probe.IsValid() && now.Before(n.gone.Add(lb.FlowMemory))
}

// Probes returns which nodes to probe at once: the suspects, those that are waited for, and witnesses.
func (l *State) Probes(now time.Time) []Probe {
	var probes []Probe
	buries := false
	for name, n := range l.nodes {
		switch {
		case n.phase == suspect && !n.silent.IsZero():
			buries = true
		case n.phase == suspect:
			probes = append(probes, Probe{Node: name, Addr: n.Addr, doubt: n.doubt})
		case n.phase == live && n.alarm.open(now):
			probes = append(probes, Probe{Node: name, Addr: n.Addr, alarm: n.alarm.since})
		case n.condemned:
			probes = append(probes, Probe{Node: name, Addr: n.Addr, condemned: n.Born, confirms: l.confirmAfter})
		case n.follows(now) && (n.hold.active(now) || !now.Before(l.followed(n))):
			probes = append(probes, Probe{Node: name, Addr: n.hold.probe, held: n.hold.born})
		case n.phase == absent && n.dead && !l.confirmAfter.IsZero() && n.Addr.IsValid():
			probes = append(probes, Probe{Node: name, Addr: n.Addr, confirms: l.confirmAfter})
		}
	}
	news := buries || slices.ContainsFunc(probes, func(p Probe) bool { return p.buries() && p.held == 0 })
	if news || slices.ContainsFunc(probes, Probe.buries) {
		for _, p := range l.witnesses(probes) {
			p.late = !news
			probes = append(probes, p)
		}
	}
	return probes
}

// heldEvery is how often a node that is waited for is probed, as it may go down after its speaker: by all
// others together at most 1,000 times a second.
func heldEvery(nodes int) time.Duration {
	return max(probeEvery, time.Duration(nodes)*time.Millisecond)
}

// followed returns when to ask a node again that is not waited for any more.
func (l *State) followed(n *peer) time.Time {
	return n.asked.Add(max(followEvery, heldEvery(len(l.nodes))))
}

// due returns when to probe next; 0 for not at all.
func (l *State) due(now time.Time) time.Duration {
	probes := l.Probes(now)
	switch {
	case slices.ContainsFunc(probes, func(p Probe) bool { return p.doubt != 0 }):
		return time.Nanosecond // news came while others were asked
	case slices.ContainsFunc(probes, func(p Probe) bool { return !p.confirms.IsZero() }):
		return time.Nanosecond // so did the question
	case l.undecided():
		return time.Nanosecond // each round asks others
	case len(probes) == 0:
		return 0
	case slices.ContainsFunc(probes, func(p Probe) bool { return p.held == 0 && !p.late }):
		return probeEvery
	}
	return heldEvery(len(l.nodes))
}

// Verdict is the news that the answer to a probe has brought.
type Verdict string

// The verdicts.
const (
	Unchanged  Verdict = ""
	SpeakerOff Verdict = "speaker is lost, its node answers"
	NodeDead   Verdict = "node is dead"
	NodeBack   Verdict = "node answers again"
)

// Probed takes in which kernels have answered that were probed at once, and returns the news, by node.
// While this node may be cut off itself, silence shows nothing.
func (l *State) Probed(answers []Answer, now time.Time) map[string]Verdict {
	shown := l.trust(answers, now)
	if shown == cutOff {
		l.turn++
	}
	verdicts := map[string]Verdict{}
	l.reconsider(shown, verdicts, now)
	for _, a := range answers {
		if a.confirms.After(l.confirmed) {
			l.confirmed = a.confirms
		}
	}
	if !l.confirmAfter.After(l.confirmed) {
		l.confirmAfter = time.Time{}
	}
	for _, a := range answers {
		if verdict := l.settle(a, shown == cutOff, now); verdict != Unchanged {
			verdicts[a.Node] = verdict
		}
	}
	return verdicts
}

// settle takes in whether the kernel of one node has answered.
func (l *State) settle(a Answer, unsure bool, now time.Time) Verdict {
	n := l.nodes[a.Node]
	switch {
	case n == nil, a.witness:
		return Unchanged
	case !a.alarm.IsZero():
		if unsure && !a.Answered {
			return Unchanged
		}
		return l.alarmProbed(n, a, now)
	case a.condemned != 0:
		return n.revived(a, now)
	case !a.confirms.IsZero():
		if !a.Answered || n.phase != absent || !n.dead {
			return Unchanged
		}
		n.dead = false // and missing as before
		return NodeBack
	case a.held != 0:
		if n.phase != absent || n.hold.born != a.held {
			return Unchanged
		}
		return l.follow(n, a, unsure, now)
	case n.phase != suspect || n.doubt != a.doubt:
		return Unchanged // back, or gone another way
	case !a.Answered && unsure:
		n.silent = now
		return Unchanged
	case !a.Answered:
		return n.die(now)
	}
	n.forget(now)
	if n.Heard.Born != 0 {
		n.reserve(n.Process, now, l.hold)
		n.hold.probe = a.Addr
	}
	return SpeakerOff
}

// follow takes in whether the kernel of a node has answered whose speaker is gone. Once it is not waited for, two
// silences in a row show that it is down, and only to a node that sees a majority: nothing else would tell that it is
// there after all, as it does not join again.
func (l *State) follow(n *peer, a Answer, unsure bool, now time.Time) Verdict {
	switch {
	case a.Answered:
		n.quiet = false
		return Unchanged
	case unsure, !n.hold.active(now) && !l.Speakers(now).Majority:
		return Unchanged
	case !n.hold.active(now) && !n.quiet:
		n.quiet = true
		return Unchanged
	}
	n.dead = true
	n.release(a.held)
	return NodeDead
}

// die takes a suspect for dead.
func (n *peer) die(now time.Time) Verdict {
	n.forget(now)
	n.dead = true
	n.release(n.Heard.Born)
	return NodeDead
}

// reserve begins to wait for the node's next speaker, once for each process that has been heard. A
// process that has announced nothing does not end the wait for what an earlier one announced.
func (n *peer) reserve(p plan.Process, now time.Time, hold time.Duration) {
	if n.hold.born < p.Heard.Born && (p.Announces || !n.hold.waits(now)) {
		n.hold = reserved{born: p.Heard.Born, until: now.Add(hold)}
	}
}

// release ends the wait for the node's next speaker. What the processes up to this one have
// announced is never reserved again.
func (n *peer) release(born uint64) { n.hold = reserved{born: max(born, n.hold.born)} }

func (n *peer) forget(now time.Time) {
	n.phase, n.stale, n.staleUntil, n.silent = absent, plan.Point{}, time.Time{}, time.Time{}
	n.gone, n.quiet = now, false
}

// Expire ends what has lasted long enough, and reports whether claims count differently now.
func (l *State) Expire(now time.Time) (changed bool) {
	for name, n := range l.nodes {
		if n.phase == absent && !l.isNode(name) && !now.Before(n.gone.Add(lb.FlowMemory)) {
			delete(l.nodes, name)
			changed = true
			continue
		}
		if !n.hold.until.IsZero() && !n.hold.active(now) {
			n.hold.until, changed = time.Time{}, true
		}
		if !n.staleUntil.IsZero() && !now.Before(n.staleUntil) {
			n.stale, n.staleUntil, changed = plan.Point{}, time.Time{}, true
		}
	}
	return changed
}

// Next returns when the next thing ends by itself; the zero time means never.
func (l *State) Next(now time.Time) (next time.Time) {
	sooner := func(t time.Time) {
		if now.Before(t) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	sooner(l.previous.until)
	for name, n := range l.nodes {
		sooner(n.hold.until)
		sooner(n.staleUntil)
		if n.follows(now) {
			sooner(l.followed(n))
		}
		if n.phase == absent && !l.isNode(name) {
			sooner(n.gone.Add(lb.FlowMemory))
		}
	}
	return next
}

// Speakers returns what this node sees of the cluster's speakers.
func (l *State) Speakers(now time.Time) plan.Speakers {
	heard, alive, known := []string{l.self}, []string{l.self}, []string{l.self}
	var dead []string
	for name, n := range l.nodes {
		if n.phase == live {
			heard = append(heard, name)
		}
		seen := n.phase != absent || n.hold.waits(now)
		if seen {
			alive = append(alive, name)
		}
		if seen || n.met && l.isNode(name) {
			known = append(known, name)
		}
		if n.dead {
			dead = append(dead, name)
		}
	}
	for _, names := range [][]string{heard, alive, known, dead} {
		slices.Sort(names)
	}
	s := plan.SpeakersOf(l.self, heard, alive, known, dead)
	s.Confirmed, s.Booted = l.confirmed, l.boots.again
	return s
}

// Standings returns what counts of the claims of each node that is live or waited for.
func (l *State) Standings(now time.Time) map[string]plan.Standing {
	standings := make(map[string]plan.Standing, len(l.nodes))
	for name, n := range l.nodes {
		s := plan.Standing{Live: n.phase != absent, Born: n.Born}
		if n.hold.waits(now) {
			s.Held = n.hold.born
		}
		if now.Before(n.staleUntil) {
			s.Stale = n.stale
		}
		if s.Live || s.Held != 0 {
			standings[name] = s
		}
	}
	return standings
}

// Previous returns the process before this node's own whose addresses the others reserve for this
// node; 0 for none.
func (l *State) Previous(now time.Time) uint64 {
	if !l.previous.active(now) {
		return 0
	}
	return l.previous.born
}
