package plan

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Point is a place in what the speakers of one node have said: a process, by the time of its start,
// and the number of one of its claims.
type Point struct{ Born, Seq uint64 }

// Process is one run of a speaker, as gossip knows it.
type Process struct {
	Node string
	Addr netip.AddrPort // where it speaks gossip
	Born uint64         // when it was started; a later process of the node has a higher number
	Boot uint64         // tells the boots of the node's kernel apart; 0 if it does not say
	// Heard is the newest claim of the node that has arrived, maybe one of an earlier process; the
	// zero Point for none.
	Heard Point
	// Announces is set when that process announces an address.
	Announces bool
}

// Standing says what counts of what the speakers of a node have said.
type Standing struct {
	// Live is set while the node's speaker takes part in gossip or is suspect. Claims of processes
	// before Born are void.
	Live bool
	Born uint64
	// Stale ends the claims from before the node was lost, if it has come back a moment ago.
	Stale Point
	// Held is the process whose addresses are reserved for the node; 0 for none.
	Held uint64
}

// Counts returns what counts of what a node has said of a VIP, and whether anything does: said is its
// newest claim, made at a point, and reserved what the process Held has announced; nil for nothing.
func (s Standing) Counts(said *Claim, at Point, reserved *Claim) (claim Claim, ok bool) {
	ok = said != nil && s.Live && at.Born >= s.Born
	if ok {
		claim = *said
		claim.Stale = at.Born == s.Stale.Born && at.Seq <= s.Stale.Seq
	}
	if reserved != nil && (!ok || Resuming(claim)) {
		return Claim{Answering: true, Weight: reserved.Weight, Parted: reserved.Parted, Held: true}, true
	}
	return claim, ok
}

// Resuming reports whether a claim is one that a speaker makes on its way to answering again.
func Resuming(c Claim) bool {
	switch c.Reason {
	case "":
		return !c.Answering
	case lb.ReasonNotJoined, lb.ReasonCutOff, lb.ReasonFeedUnknown, lb.ReasonNotProgrammed:
		return true
	}
	return false
}
