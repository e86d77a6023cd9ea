package liveness

import (
	"hash/fnv"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// A node that is cut off loses the others one by one, and sees a majority until it has lost half of
// them. It would take the addresses of each, and if the cut ended at that moment, clients would hear
// it. So whenever it asks a kernel whose silence would bury a node, it asks others at the same time,
// its witnesses. If so many are silent that it would see no majority without them, the silence of the
// one shows nothing: that node stays a suspect, until witnesses answer or gossip has lost so many that
// this node sees no majority any more and takes nothing. A crashed node is buried without a delay, as
// the witnesses have answered long before the wait for it is over.

const (
	// witnesses bounds how many kernels are asked that nothing is held against.
	witnesses = 8
	// A suspect stays one for doubt and for so much more for each node: gossip has lost all of them by
	// then that do not hear this one. Those that are left answer neither TCP nor ping, for some reason.
	doubt       = 2 * time.Second
	doubtOfEach = 100 * time.Millisecond
)

// witnesses returns the probes of some live nodes that are not probed anyway: others for each node, as all
// nodes ask at the same time, and others after each time that left this one unsure. In a large cluster they
// are drawn: names that follow one another are often of one rack, which is cut off, or dies, as a whole.
func (l *State) witnesses(probes []Probe) []Probe {
	var names []string
	for name, n := range l.nodes {
		asked := slices.ContainsFunc(probes, func(p Probe) bool { return p.Node == name })
		if n.phase == live && !asked && n.Addr.IsValid() {
			names = append(names, name)
		}
	}
	if len(names) > witnesses {
		slices.Sort(names)
		h := fnv.New64a()
		_, _ = io.WriteString(h, l.self) // never fails
		draw := rand.New(rand.NewPCG(h.Sum64(), l.turn))
		draw.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		names = names[:witnesses]
	}
	var found []Probe
	for _, name := range names {
		found = append(found, Probe{Node: name, Addr: l.nodes[name].Addr, witness: true})
	}
	return found
}

// trust is what the answers to probes show of this node itself.
type trust int

const (
	heard    trust = iota // enough others answer: who is silent is dead
	cutOff                // it may be cut off: silence shows nothing
	outlived              // it sees no majority without those that are silent, or has waited for long enough
)

// trust weighs who has answered.
func (l *State) trust(answers []Answer, now time.Time) trust {
	silent, late := map[string]bool{}, false
	for name, n := range l.nodes {
		if n.phase == suspect && !n.silent.IsZero() {
			silent[name] = true
			late = late || !now.Before(n.silent.Add(doubt+time.Duration(len(l.nodes))*doubtOfEach))
		}
	}
	asked, answered := 0, 0
	for _, a := range answers {
		switch {
		case a.witness && a.Answered:
			asked, answered = asked+1, answered+1
		case a.witness:
			asked++
		case !a.Answered && a.buries():
			silent[a.Node] = true
		}
	}
	if late || !l.sees(silent, now).Majority {
		return outlived
	}
	for _, a := range answers {
		if a.witness && !a.Answered {
			silent[a.Node] = true
		}
	}
	few := asked == witnesses && 2*answered <= asked // of a large cluster it asks a sample
	if few || answered < asked && !l.sees(silent, now).Most() {
		return cutOff
	}
	return heard
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
func (l *State) reconsider(shown trust, verdicts map[string]Verdict) {
	for name, n := range l.nodes {
		switch {
		case n.phase != suspect || n.silent.IsZero():
		case shown == heard:
			n.silent = time.Time{}
		case shown == outlived:
			verdicts[name] = n.die()
		}
	}
}
