package plan

import (
	"slices"
	"time"
)

// Speakers is what this node sees of the cluster's speakers.
type Speakers struct {
	// Live are the nodes that it sees, itself included: those whose speaker takes part in gossip, is
	// suspect, or is expected back. Sorted.
	Live []string
	// Missing are the nodes that it has met and does not see, without those that have left. Sorted.
	Missing []string
	// Alone is set when it hears no majority: those that it only expects back do not count. They may
	// hear one another, and have given up waiting for this node.
	Alone bool
	// Silent are the missing nodes whose kernel is silent too; sorted. Dead are the same, but none
	// without a majority, as it may be this node that is cut off.
	Silent, Dead []string
	// Booted are the nodes that have booted since this one met them, with the last boot of each; see
	// Process.Boot. Never changed in place.
	Booted map[string]uint64
	// Confirmed is the last moment after which the kernels of all Silent were asked once more, and were silent still;
	// the zero time if they never were.
	Confirmed time.Time
	Quorum
}

// Sight is what a node knows at one moment of the speakers of all nodes. What is decided in one step follows from one
// Sight: if the loss of half of the others showed in what counts of their claims, and not yet in Speakers, the node
// would take their addresses before it knew that it may be cut off itself.
type Sight struct {
	Speakers
	// Standings say what counts of the claims of each other node. Never changed in place.
	Standings map[string]Standing
	// Previous is the earlier process of this node whose addresses are reserved for it; 0 for none.
	Previous uint64
}

// Quorum says how much of the cluster a node sees.
type Quorum struct {
	// Lost is set when it misses some that have not left.
	Lost bool
	// Majority is set when it sees more than half of the speakers that it knows, or half of them with
	// the first by name among these.
	Majority bool
	// Half is set when it sees exactly half of them. The first by name tells two halves apart, but not
	// which of them is cut off.
	Half bool
	// Rank is the node's place among those that it sees, by name; 0 is the first.
	Rank int
}

// Most reports whether a node sees more than half of the speakers that it knows.
func (q Quorum) Most() bool { return q.Majority && !q.Half }

// Outweighed returns the same for a node that sees a majority as far as it knows, and has heard of a greater one
// that does not see it.
func (s Speakers) Outweighed() Speakers {
	s.Majority, s.Half, s.Alone, s.Dead = false, false, true, nil
	return s
}

// SpeakersOf returns what a node sees: heard are the nodes whose speaker takes part in gossip, live
// those and the ones that are suspect or expected back, known those and the ones that it misses,
// and silent those whose kernel is silent. All are sorted; the first three contain the node.
func SpeakersOf(self string, heard, live, known, silent []string) Speakers {
	s := Speakers{Live: live, Silent: silent, Quorum: QuorumOf(self, live, known)}
	s.Alone = !QuorumOf(self, heard, known).Majority
	for _, node := range known {
		if _, seen := slices.BinarySearch(live, node); !seen {
			s.Missing = append(s.Missing, node)
		}
	}
	if s.Majority {
		s.Dead = silent
	}
	return s
}

// Survives reports whether a node sees a majority of those that may be there at all: the others are
// dead, if it is not this node that is cut off.
func (s Speakers) Survives(self string) bool {
	known := slices.Clone(s.Live)
	for _, node := range s.Missing {
		if !slices.Contains(s.Silent, node) {
			known = append(known, node)
		}
	}
	slices.Sort(known)
	return QuorumOf(self, s.Live, known).Majority
}

// QuorumOf applies the one rule by which a node judges whether it belongs to the majority. live are
// the nodes that it sees, known those and the ones that it misses; both contain it and are sorted.
func QuorumOf(self string, live, known []string) Quorum {
	return Quorum{
		Lost:     len(live) < len(known),
		Majority: 2*len(live) > len(known) || 2*len(live) == len(known) && slices.Contains(live, known[0]),
		Half:     2*len(live) == len(known),
		Rank:     slices.Index(live, self),
	}
}
