package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/witness"
)

// leaseName is the Lease by which the two sides of a partition hear of one another. The chart's
// roles name it.
const leaseName = "landfall-speaker"

// quorum is what the loop makes of the speakers that it misses.
type quorum struct {
	plan.Quorum
	live    []string
	missing []string
	others  lb.Witness // what a majority says that this node does not see
	heard   bool
	apart   bool // as of the last look
	parted  bool
	until   time.Time // how long a node that sees a majority again counts as parted, and goes on yielding
}

// reunion is how long that is: time for the newest claims of all to arrive. Before, the nodes would
// go by what was said before they were parted.
const reunion = 2 * time.Second

// gather looks at who is there, and marks all VIPs when a majority elsewhere has said something
// new. It returns when to look again.
func (q *quorum) gather(s *speaker, now time.Time, vips map[netip.Addr]bool) (again time.Duration) {
	seen := s.from.liveness.Speakers()
	q.live, q.missing, q.Quorum = seen.Live, seen.Missing, seen.Quorum
	said, heard := s.to.witness.Outcome()
	if !q.Majority || q.apart {
		// from the first look at which they are together again, as nothing may have called for one in
		// between
		q.until = now.Add(reunion)
	}
	q.apart = !q.Majority
	parted := now.Before(q.until)
	if q.Majority {
		heard = q.heard && parted
		said = q.others
		if parted {
			again = q.until.Sub(now)
		}
	}
	news := heard != q.heard || heard && !said.Same(q.others)
	if news || parted != q.parted {
		for vip := range s.holders {
			vips[vip] = true
		}
	}
	if news {
		s.log.Info("speakers that this node does not see are heard of over the API server", "heard", heard, "from", said.Node,
			"live", said.Live)
	}
	q.others, q.heard, q.parted = said, heard, parted
	return again
}

// elsewhere tells whether a majority that this node does not see answers for the VIP.
func (q *quorum) elsewhere(self string, vip netip.Addr) bool {
	return q.heard && q.others.Serves(self, vip)
}

// desired is what the node makes of the Lease: it reads it while it sees no majority, and renews it
// while it sees one and misses somebody.
func (q *quorum) desired(s *speaker) witness.Desired {
	switch {
	case s.stopping || !q.Lost:
		return witness.Desired{}
	case !q.Majority:
		return witness.Desired{Heed: true}
	case q.Rank >= witnesses:
		return witness.Desired{}
	}
	return witness.Desired{Tell: true, Rank: q.Rank,
		Says: lb.Witness{Node: s.self, Live: q.live, Unserved: unserved(s.decisions)}}
}

// witnesses is how many nodes stand by to renew the Lease, one for the other.
const witnesses = 3

// unserved are the VIPs that no node answers for which this one sees; sorted.
func unserved(decisions map[netip.Addr]plan.Decision) []netip.Addr {
	var vips []netip.Addr
	for vip, d := range decisions {
		if !slices.ContainsFunc(d.Nodes, func(w plan.NodeWord) bool { return w.Answering }) {
			vips = append(vips, vip)
		}
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	return vips
}
