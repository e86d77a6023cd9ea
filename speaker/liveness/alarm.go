package liveness

import (
	"math"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// Gossip takes about half a second to find that a node is dead, and BFD a third of that. So each node
// watches the paths to its neighbors on a ring with BFD, and a neighbor that loses one raises an alarm:
// it tells all others. Each node that hears of it asks the kernel of the silent node itself. It takes
// that node for dead if the kernel does not answer, and if another node than itself has lost its path:
// of two nodes that do not hear one another, either may be cut off. A false alarm changes nothing. A
// neighbor that takes the node for dead, and ends its watch with that, raises an alarm too once the kernel
// is silent a second time: the first to lose its path needs the word of another, who does not merely
// repeat it.

const (
	// alarmLasts is how long the losses of several neighbors may be apart to count as one. What is
	// slower, gossip finds.
	alarmLasts = 500 * time.Millisecond
	// alarmCalm is how long a node whose kernel has answered is not asked again.
	alarmCalm = 200 * time.Millisecond
)

// alarm is what is known of a node to which paths were lost.
type alarm struct {
	since  time.Time // when it began, or when the kernel answered; the zero time for never
	others bool      // another node has lost its path
	silent bool      // the kernel has not answered this node
	over   bool      // it has
}

func (a alarm) active(now time.Time) bool {
	return !a.since.IsZero() && now.Before(a.since.Add(alarmLasts))
}

// open reports whether the kernel is to be asked.
func (a alarm) open(now time.Time) bool { return a.active(now) && !a.silent && !a.over }

// Alarmed takes in that a node has lost its path to a process, and reports whether that is news.
func (l *State) Alarmed(node string, born uint64, by string, now time.Time) (news bool) {
	n, witness := l.nodes[node], l.nodes[by]
	switch {
	case n == nil || n.phase != live || n.Born != born || by == node:
		return false
	case by != l.self && (witness == nil || witness.phase != live):
		return false // who is lost itself is no witness
	case n.alarm.over && now.Before(n.alarm.since.Add(alarmCalm)):
		return false
	case !n.alarm.active(now) || n.alarm.over:
		n.alarm = alarm{since: now}
		news = true
	}
	if by != l.self && !n.alarm.others {
		n.alarm.others, news = true, true
	}
	return news
}

// judge takes a node for dead whose kernel is silent and to which another node has lost its path. What
// it said before it came back counts as stale, whatever it was.
func (l *State) judge(n *peer, now time.Time) Verdict {
	if !n.alarm.active(now) || !n.alarm.silent || !n.alarm.others || n.phase != live {
		return Unchanged
	}
	n.forget(now)
	n.alarm, n.condemned, n.dead = alarm{}, true, true
	n.release(n.Born)
	return NodeDead
}

// alarmProbed takes in whether the kernel of a node has answered to which paths were lost.
func (l *State) alarmProbed(n *peer, a Answer, now time.Time) Verdict {
	if n.phase != live || !n.alarm.since.Equal(a.alarm) {
		return Unchanged
	}
	if a.Answered {
		n.alarm = alarm{since: now, over: true}
		return Unchanged
	}
	n.alarm.silent = true
	return l.judge(n, now)
}

// revived takes in whether the kernel of a node has answered that gossip has not lost. Its speaker may be waited for
// again, should it be lost.
func (n *peer) revived(a Answer, now time.Time) Verdict {
	if !a.Answered || !n.condemned || n.Born != a.condemned {
		return Unchanged
	}
	n.phase, n.dead, n.condemned = live, false, false
	if n.hold.born == n.Born {
		n.hold = reserved{}
	}
	n.stale, n.staleUntil = plan.Point{Born: n.Born, Seq: math.MaxUint64}, now.Add(staleFor)
	return NodeBack
}

// Ring returns where the neighbors of this node on the ring are, by their addresses.
func (l *State) Ring(now time.Time) map[netip.Addr]string {
	if l.ring == 0 {
		return nil
	}
	neighbors := map[netip.Addr]string{}
	for _, node := range plan.Ring(l.self, l.Speakers(now).Live, l.ring) {
		if n := l.nodes[node]; n != nil && n.Addr.IsValid() {
			neighbors[n.Addr.Addr()] = node
		}
	}
	return neighbors
}

// watched returns which process of a neighbor on the ring takes part in gossip; 0 if the node is none, or if
// none does.
func (l *State) watched(node string, now time.Time) uint64 {
	for _, neighbor := range l.Ring(now) {
		if neighbor == node {
			return l.born(node)
		}
	}
	return 0
}

// born returns which process of a node takes part in gossip; 0 for none.
func (l *State) born(node string) uint64 {
	if n := l.nodes[node]; n != nil && n.phase == live {
		return n.Born
	}
	return 0
}
