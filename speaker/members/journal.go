package members

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// journal is a node's own page: it numbers what the node says, without a gap, so that others know
// when they have heard all.
type journal struct {
	node    string
	born    uint64
	seq     uint64
	entries map[netip.Addr]entry       // what has a number
	pending map[netip.Addr]*plan.Claim // what has none yet; nil takes a claim back
	unsent  []entry                    // what has a number and was not sent as a change yet
	recent  []entry                    // the last changes
}

// recentChanges is how many changes a journal keeps.
const recentChanges = 64

func newJournal(node string, born uint64) *journal {
	return &journal{node: node, born: born, entries: map[netip.Addr]entry{}, pending: map[netip.Addr]*plan.Claim{}}
}

// whole returns the changes that make claims all that is said.
func (j *journal) whole(claims map[netip.Addr]*plan.Claim) map[netip.Addr]*plan.Claim {
	changes := make(map[netip.Addr]*plan.Claim, len(claims))
	for vip := range j.entries {
		changes[vip] = nil
	}
	for vip := range j.pending {
		changes[vip] = nil
	}
	maps.Copy(changes, claims)
	return changes
}

// set takes changes to the claims, nil to take one back, and reports whether there is
// something to send.
func (j *journal) set(changes map[netip.Addr]*plan.Claim) bool {
	for vip, claim := range changes {
		old, said := j.entries[vip]
		switch {
		case claim == nil && !said, claim != nil && said && old.claim == *claim:
			delete(j.pending, vip)
		case claim == nil:
			j.pending[vip] = nil
		default:
			copied := *claim
			j.pending[vip] = &copied
		}
	}
	return len(j.pending)+len(j.unsent) > 0
}

// number gives the changes their numbers.
func (j *journal) number() {
	for _, vip := range slices.SortedFunc(maps.Keys(j.pending), netip.Addr.Compare) {
		j.seq++
		e := entry{vip: vip, seq: j.seq}
		if claim := j.pending[vip]; claim != nil {
			e.claim = *claim
			j.entries[vip] = e
		} else {
			e.gone = true
			delete(j.entries, vip)
		}
		j.unsent, j.recent = append(j.unsent, e), append(j.recent, e)
	}
	j.recent = slices.Clone(j.recent[max(0, len(j.recent)-recentChanges):])
	clear(j.pending)
}

// full returns the whole page. It stays as it is when the journal changes.
func (j *journal) full() update {
	u := j.unsorted()
	sortEntries(u.entries)
	return u
}

// unsorted returns the whole page with its entries in any order.
func (j *journal) unsorted() update {
	j.number()
	u := update{node: j.node, born: j.born, floor: j.seq, entries: make([]entry, 0, len(j.entries))}
	for _, e := range j.entries {
		u.entries = append(u.entries, e)
	}
	return u
}

// take returns the changes that were not sent yet.
func (j *journal) take() []entry {
	j.number()
	entries := j.unsent
	j.unsent = nil
	return entries
}

// outlive makes this process the newer one of two of the same node, if another node has heard of
// another that seems newer: one that ran before the clock was set back. It reports whether that was
// needed, and everything has to be said again.
func (j *journal) outlive(u update) bool {
	if u.node != j.node || u.born < j.born {
		return false
	}
	if u.born == j.born {
		newest := u.floor
		for _, e := range u.entries {
			newest = max(newest, e.seq)
		}
		if newest <= j.seq {
			return false // our own words
		}
	}
	for vip, e := range j.entries {
		if _, changes := j.pending[vip]; !changes {
			j.pending[vip] = &e.claim
		}
	}
	for vip, claim := range j.pending {
		if claim == nil {
			delete(j.pending, vip) // the new process never said it
		}
	}
	clear(j.entries)
	j.born, j.seq, j.unsent, j.recent = u.born+1, 0, nil, nil
	return true
}
