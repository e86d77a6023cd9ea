package handoff

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// heir is the other node that would own a VIP without this one. A node that is cut off goes on
// answering until it hears of a majority that has taken over. Until then clients turn to both, and
// packets of connections that the other node has begun arrive here.
type heir struct {
	now    string // as of the last claims that were heard while this node heard a majority
	before string // as of the time before the last row of changes
	since  time.Time
	// expected is the heir of the others while this node is cut off; "" otherwise.
	expected string
}

// row is the longest time between two changes of one row: a node that is cut off loses the others
// one by one, and the first one that it loses may be the heir.
const row = 10 * time.Second

// note takes in who claims the VIP. While the node is cut off it goes by what it heard before.
func (h *heir) note(now time.Time, vip netip.Addr, alone bool, claims map[string]plan.Claim) {
	if alone {
		if h.expected == "" {
			h.expected = h.now
			if h.before != "" && now.Sub(h.since) <= row {
				h.expected = h.before
			}
		}
		return
	}
	h.expected = ""
	next := plan.Heir(vip, claims)
	if next == h.now {
		return
	}
	if now.Sub(h.since) > row {
		h.before = h.now
	}
	h.now, h.since = next, now
}
