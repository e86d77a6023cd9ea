package lb

import (
	"net/netip"
	"time"
)

// FeedNotice is one line (JSON, ended by a newline) that a speaker writes to its proxy over the
// feed's socket: all that it knows now, after which the one before counts no more. When the
// connection ends, nobody counts as dead any more; Former and Ring count until the next speaker
// says something else.
type FeedNotice struct {
	// Same is set when all is as the notice before said, or nothing is known yet; all else is left out
	// then.
	Same bool `json:"same,omitempty"`
	// Beat is how long it takes, in milliseconds, until the next notice comes; 0 for no promise. See
	// FeedSilence.
	Beat int `json:"beat,omitempty"`
	// Dead are the nodes that have stopped answering the other speakers, and whose kernel answers
	// nobody. Endpoints on them are not delivered to (see Without). It is empty unless this node sees
	// a majority of the speakers, so that a partition empties nothing.
	Dead []string `json:"dead,omitempty"`
	// Gone are the addresses of the nodes in Dead.
	Gone []netip.Addr `json:"gone,omitempty"`
	// Former are the addresses, of the VIP's family, of nodes that may hold connections to a VIP which
	// this node does not know: those that announce it, or did before, the likeliest first. Their
	// kernels forward, whether or not their agents run. A VIP without any is one of which this speaker
	// knows none: what an earlier one said of it goes on.
	Former map[netip.Addr][]netip.Addr `json:"former,omitempty"`
	// Ring has, for each VIP that routers spread over nodes, the other nodes that announce it or did
	// so lately: in the order of their addresses, which are of the VIP's family, from the one behind
	// this node's on and once round. Each of them may hold connections to the VIP, so a packet that
	// nobody knows goes round. Former does not count for a VIP that is here. A VIP without any goes on
	// with those that an earlier speaker has named.
	Ring map[netip.Addr][]netip.Addr `json:"ring,omitempty"`
}

// MaxRing is how many nodes a ring names at most, and so through how many hands a packet goes.
const MaxRing = 16

// FlowMemory is how long a node remembers a connection that is silent. Two programs rely on it: the
// proxy keeps a flow that it has seen for as long, and the speaker keeps a node in the ring of a
// VIP for as long after it has announced the VIP, as it may hold such a connection.
const FlowMemory = time.Hour

// Both ends of the feed say something at least every FeedBeat, so that one that hangs is told from
// one that has nothing to say.
const (
	FeedBeat = 2 * time.Second
	// missedBeats is how many may be late. A program that does not come to run for as long hangs, even
	// on a busy machine.
	missedBeats = 5
)

// FeedSilence returns how long an end of the feed that has promised a beat (in milliseconds) may be
// silent before it counts as hung; 0 for as long as it likes.
func FeedSilence(beat int) time.Duration {
	return missedBeats * time.Duration(max(0, beat)) * time.Millisecond
}

// Without returns the slices without the endpoints on dead nodes. An address family of a Service
// that would have none left keeps all of them.
func Without(all []Slice, dead map[string]bool) []Slice {
	if len(dead) == 0 {
		return all
	}
	some, dropped := map[Family]bool{}, map[Family]bool{}
	for _, slice := range all {
		for _, ep := range slice.Endpoints {
			if dead[ep.Node] {
				dropped[slice.Family] = true
			} else if ep.Ready || ep.Serving && ep.Terminating {
				some[slice.Family] = true
			}
		}
	}
	left := make([]Slice, 0, len(all))
	for _, slice := range all {
		if dropped[slice.Family] && some[slice.Family] {
			var endpoints []Endpoint
			for _, ep := range slice.Endpoints {
				if !dead[ep.Node] {
					endpoints = append(endpoints, ep)
				}
			}
			slice.Endpoints = endpoints
		}
		left = append(left, slice)
	}
	return left
}
