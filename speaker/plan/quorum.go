package plan

import "slices"

// Quorum is what a node sees of the speakers that it knows.
type Quorum struct {
	// Lost is set when it misses some that have not taken their leave.
	Lost bool
	// Majority is set when it sees most of them, or half of them with the first by name among these.
	Majority bool
	// Rank is the node's place among those that it sees, by name; 0 is the first.
	Rank int
}

// QuorumOf returns what a node sees: live are the nodes that it sees, known those and the ones that
// it misses; both contain it and are sorted.
func QuorumOf(self string, live, known []string) Quorum {
	return Quorum{
		Lost:     len(live) < len(known),
		Majority: 2*len(live) > len(known) || 2*len(live) == len(known) && slices.Contains(live, known[0]),
		Rank:     slices.Index(live, self),
	}
}
