package liveness

import (
	"cmp"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// A node that is cut off loses the others one by one, and sees a majority until it has lost half of
// them. It would take the addresses of each, and if the cut ended at that moment, clients would hear
// it. So whenever it asks a kernel whose silence would bury a node, it asks others at the same time,
// its witnesses. While it waits for the next speaker of a node whose kernel answers, it asks them once that
// does not answer at once. A crashed node is buried without a delay, as the witnesses have answered long before
// the wait for it is over. If a witness is silent too, more than one crash has happened. The node then
// buries a suspect only after a majority of all known nodes has answered it. It asks on, others each time
// and without a pause, until they have or gossip has lost so many that this node sees no majority any more
// and takes nothing. If gossip loses no more of them, only paths to them are broken: see doubtLasts.
//
// Half of a cluster of thousands takes a while to ask. If seven eighths have answered of those that were
// drawn by chance, so many more than half are there that only one in 100,000 nodes of a cluster that
// falls into halves draws so many of its own side.

const (
	// witnesses bounds how many kernels are asked at once that nothing is held against.
	witnesses = 32
	// evidenceLasts is how long answers count while this node is in doubt, in intervals of gossip's probes: the
	// half of 10,000 nodes has been asked by then. After that it asks anew.
	evidenceLasts = 100
)

// witnesses returns the probes of some live nodes that are not probed anyway: others for each node, as all
// nodes ask at the same time, and others each time. In a large cluster they are drawn: names that follow one
// another are often of one rack, which is cut off, or dies, as a whole. Those that were not asked yet come
// first, and then those that have not answered.
func (l *State) witnesses(probes []Probe) []Probe {
	asked := map[string]bool{}
	for _, p := range probes {
		asked[p.Node] = true
	}
	var names []string
	for name, n := range l.nodes {
		if n.testifies() && !asked[name] {
			names = append(names, name)
		}
	}
	if len(names) > witnesses {
		since := l.doubtSince(time.Time{})
		slices.Sort(names)
		h := fnv.New64a()
		_, _ = io.WriteString(h, l.self) // never fails
		draw := rand.New(rand.NewPCG(h.Sum64(), l.turn))
		draw.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		if !since.IsZero() {
			slices.SortStableFunc(names, func(a, b string) int {
				return cmp.Compare(l.nodes[a].evidence(since), l.nodes[b].evidence(since))
			})
		}
		names = names[:witnesses]
	}
	var found []Probe
	for _, name := range names {
		found = append(found, Probe{Node: name, Addr: l.nodes[name].Addr, witness: true})
	}
	return found
}

// testifies reports whether a node can be asked as a witness.
func (n *peer) testifies() bool { return n.phase == live && n.Addr.IsValid() }

// evidence is what has come of the last question to a node.
type evidence int

const (
	unasked evidence = iota
	unanswered
	answered
)

// evidence returns what has come of asking the node since then.
func (n *peer) evidence(since time.Time) evidence {
	switch {
	case n.asked.Before(since):
		return unasked
	case n.answered.Before(n.asked):
		return unanswered
	}
	return answered
}

// doubtSince returns from when on answers count: since this node is in doubt, or if it is not, from now on.
func (l *State) doubtSince(now time.Time) time.Time {
	if l.unsure || l.sure {
		return l.doubting
	}
	return now
}

// doubts reports whether suspects are silent that this node could not tell from those beyond a cut.
func (l *State) doubts() bool {
	for _, n := range l.nodes {
		if n.phase == suspect && !n.silent.IsZero() {
			return true
		}
	}
	return false
}

// undecided reports whether this node is in doubt, and there are some that it has not asked since.
func (l *State) undecided() bool {
	if !l.unsure {
		return false
	}
	for _, n := range l.nodes {
		if n.testifies() && n.evidence(l.doubting) == unasked {
			return true
		}
	}
	return false
}

// trust is what the answers to probes show of this node itself.
type trust int

const (
	heard    trust = iota // enough others answer: who is silent is dead
	cutOff                // it may be cut off: silence shows nothing
	outlived              // it sees no majority without those that are silent
)

// doubtLasts is after which time without another loss the silent count as dead. Gossip loses those beyond a
// cut one after the other: each node of a side probes another one in each interval, and a node alone slows down to an
// eighth of that. So who is not lost by then is there, and only the path to it is broken.
func (l *State) doubtLasts() time.Duration {
	return time.Duration(20+min(len(l.nodes), 100)) * l.interval
}

// trust weighs who has answered.
func (l *State) trust(answers []Answer, now time.Time) trust {
	since := l.doubtSince(now)
	if now.Sub(since) > evidenceLasts*l.interval {
		since = now
	}
	silent, last := map[string]bool{}, time.Time{}
	for name, n := range l.nodes {
		if n.phase == suspect && !n.silent.IsZero() {
			silent[name] = true
			if n.silent.After(last) {
				last = n.silent
			}
		}
	}
	late := !last.IsZero() && now.Sub(last) >= l.doubtLasts()
	for _, a := range answers {
		n := l.nodes[a.Node]
		if n == nil {
			continue
		}
		n.asked, n.answered = now, time.Time{}
		switch {
		case a.Answered:
			n.answered = now
		case a.buries() && (a.doubt == 0 || a.doubt == n.doubt): // it was not lost again meanwhile
			silent[a.Node] = true
		}
	}
	if len(silent) == 0 {
		l.sure, l.unsure = false, false
		return heard
	}
	if late || !l.sees(silent, now).Majority {
		l.sure, l.unsure = false, false
		return outlived
	}
	if l.hears(silent, since, now) {
		l.sure, l.unsure = l.doubts(), false // those that were silent are asked once more
		return heard
	}
	l.doubting, l.sure, l.unsure = since, false, len(silent) > 0
	return cutOff
}

// hears reports whether this node is not cut off, by who has answered since then. Those that gossip has lost
// while they were asked count like those that it knows.
func (l *State) hears(silent map[string]bool, since, now time.Time) bool {
	without, asked, said := maps.Clone(silent), 0, 0
	for name, n := range l.nodes {
		if n.phase == absent || !n.Addr.IsValid() || silent[name] {
			continue
		}
		switch n.evidence(since) {
		case answered:
			asked, said = asked+1, said+1
			continue
		case unanswered:
			asked++
		}
		without[name] = true
	}
	if len(without) == len(silent) || l.sees(without, now).Most() {
		return true // all have answered, or more than half of all
	}
	speakers := l.Speakers(now)
	there := len(speakers.Live) - len(silent)
	return asked >= witnesses && 8*said*there >= 7*asked*(len(speakers.Live)+len(speakers.Missing))
}

// sees returns how much of the cluster this node sees without some.
func (l *State) sees(without map[string]bool, now time.Time) plan.Quorum {
	seen := l.Speakers(now)
	known := slices.Concat(seen.Live, seen.Missing)
	slices.Sort(known)
	live := slices.DeleteFunc(seen.Live, func(node string) bool { return without[node] })
	return plan.QuorumOf(l.self, live, known)
}

// reconsider takes the suspects that were silent while this node could not tell whether it was cut off. It
// has them asked again, or takes them for dead with the others.
func (l *State) reconsider(shown trust, verdicts map[string]Verdict, now time.Time) {
	for name, n := range l.nodes {
		switch {
		case n.phase != suspect || n.silent.IsZero():
		case shown == heard:
			n.silent = time.Time{}
		case shown == outlived:
			verdicts[name] = n.die(now)
		}
	}
}
