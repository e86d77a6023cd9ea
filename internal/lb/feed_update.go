package lb

import (
	"net/netip"
	"time"
)

// FeedUpdate is one line (JSON, ended by a newline) that a speaker writes to its proxy over the
// feed's socket: an update with the whole state, which replaces the one before. When the connection
// ends, the proxy forgets Dead and Gone; it keeps Previous and Ring until the next speaker's
// update.
type FeedUpdate struct {
	// Same is set if nothing has changed since the update before, or nothing is known yet. The other
	// fields except Beat are empty then.
	Same bool `json:"same,omitempty"`
	// Beat is the longest time until the next update, in milliseconds; 0 promises none. See
	// FeedSilence.
	Beat int `json:"beat,omitempty"`
	// Dead are the nodes whose speaker gossip has lost and whose kernel is silent. The proxy delivers
	// nothing to endpoints on them (see Without). Dead is empty unless this node sees a majority of
	// the speakers, so that a partition empties no Service.
	Dead []string `json:"dead,omitempty"`
	// Gone are the addresses of the nodes in Dead.
	Gone []netip.Addr `json:"gone,omitempty"`
	// Previous has, for each VIP, the previous owners: nodes that may hold connections to the VIP
	// which this node does not know, because they announce it or did before; the likeliest first. They
	// are given by their addresses of the VIP's family. Their kernels forward even while their agents
	// do not run. For a VIP with an empty list, the last list that was not empty stays valid; a VIP
	// that is missing is no VIP any more.
	Previous map[netip.Addr][]netip.Addr `json:"former,omitempty"`
	// Ring has, for each VIP that routers spread over nodes, the other nodes that announce it or did
	// so lately, by their addresses of the VIP's family: in order, from the one after this node's on
	// and once round. Each of them may hold connections to the VIP, so a stray packet goes round. A
	// VIP in Ring needs no entry in Previous. Empty and missing lists mean the same as in Previous.
	Ring map[netip.Addr][]netip.Addr `json:"ring,omitempty"`
}

// MaxRing is how many nodes a ring names at most, and so how many nodes a packet asks. It is part
// of the protocol between the nodes that docs/rescue.md specifies.
const MaxRing = 16

// FlowMemory is how long a node remembers a silent connection. Two programs rely on it: the proxy
// keeps a flow that it has seen for as long, and the speaker keeps a node in the ring of a VIP for
// as long after the node announced the VIP, because the node may hold such a connection.
const FlowMemory = time.Hour

// Both ends of the feed send a message at least every FeedBeat, which distinguishes an end that
// hangs from one without news.
const (
	FeedBeat = 2 * time.Second
	// missedBeats is how many messages may be missing. A program that does not run for as long hangs,
	// even on a busy machine.
	missedBeats = 5
)

// FeedSilence returns how long an end of the feed that promised a beat (in milliseconds) may be
// silent before it counts as hung; 0 means for ever.
func FeedSilence(beat int) time.Duration {
	return missedBeats * time.Duration(max(0, beat)) * time.Millisecond
}

// Without returns the slices without the endpoints on dead nodes. A family of a Service keeps all
// of its endpoints if none would be left.
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
