package lb

import (
	"maps"
	"net/netip"
	"slices"
	"time"
)

// FeedUpdate is one line (JSON, ended by a newline) that a speaker writes to its proxy over the
// feed's socket. The first that says anything says all; later ones say what has changed. When the
// connection ends, the proxy forgets Dead and Gone; it keeps Previous and Ring until the next
// speaker's update.
type FeedUpdate struct {
	// Same is set if nothing has changed since the update before, or nothing is known yet. The other
	// fields except Beat are empty then.
	Same bool `json:"same,omitempty"`
	// Beat is the longest time until the next update, in milliseconds; 0 promises none. See
	// FeedSilence.
	Beat int `json:"beat,omitempty"`
	// Number counts the updates of a speaker that are not Same, from 1. The proxy answers with it, see
	// FeedMessage.Rescued. A speaker that does not ask for an answer sends 0.
	Number uint64 `json:"number,omitempty"`
	// Changes is set if Previous, Ring and Unannounced name only the VIPs of which they say something
	// else than before, each of them in Previous. Otherwise they name all, and a VIP that is missing is no VIP
	// any more.
	Changes bool `json:"changes,omitempty"`
	// Ended are addresses that are no VIPs any more, or were not in between; only with Changes.
	Ended []netip.Addr `json:"ended,omitempty"`
	// Dead are the nodes whose speaker gossip has lost and whose kernel is silent. The proxy delivers
	// nothing to endpoints on them (see plan.Without of the proxy). Dead is empty unless this node
	// sees a majority of the speakers, so that a partition empties no Service.
	Dead []string `json:"dead,omitempty"`
	// Gone are the addresses of the nodes in Dead, but for those that another node has too.
	Gone []netip.Addr `json:"gone,omitempty"`
	// CutOff is set while this node may be cut off from the others, and for a moment after. It is no
	// sign of a node's end then that the node does not answer.
	CutOff bool `json:"cutOff,omitempty"`
	// Previous has, for each VIP, the previous owners: nodes that may hold connections to the VIP
	// which this node does not know, because they announce it or did before; the likeliest first. They
	// are given by their addresses of the VIP's family. Their kernels forward even while their agents
	// do not run. For a VIP with an empty list, the last list that was not empty stays valid.
	Previous map[netip.Addr][]netip.Addr `json:"former,omitempty"`
	// Ring has, for each VIP that routers spread over nodes, the other nodes that announce it or did
	// so lately, by their addresses of the VIP's family: in order, from the one after this node's on
	// and once round. Each of them may hold connections to the VIP, so a stray packet goes round. An
	// empty list means the same as in Previous; a VIP that is missing has no ring.
	Ring map[netip.Addr][]netip.Addr `json:"ring,omitempty"`
	// Gates is set once the speaker fills in Unannounced, as FeedMessage.Gates asks it to. Until then an
	// empty Unannounced means nothing.
	Gates bool `json:"gates,omitempty"`
	// Unannounced has those of the VIPs in Previous that this node does not announce yet and may announce
	// soon.
	Unannounced map[netip.Addr]Unannounced `json:"unannounced,omitempty"`
}

// Unannounced says why a node does not announce a VIP yet.
type Unannounced struct {
	Reason Reason `json:"reason"`
	// Service is the Sum of the one that the reason is about, where several share the VIP; 0 if it is about the node. A
	// name would be too long where there are tens of thousands of VIPs.
	Service uint32 `json:"service,omitempty"`
	// Elsewhere is set while another node announces the VIP.
	Elsewhere bool `json:"elsewhere,omitempty"`
}

// Apply has u say what it said and what next says, as if they were one update.
func (u *FeedUpdate) Apply(next FeedUpdate) {
	if !next.Changes {
		*u = next
		u.Previous, u.Ring = maps.Clone(next.Previous), maps.Clone(next.Ring)
		u.Unannounced = maps.Clone(next.Unannounced)
		return
	}
	u.Number, u.Dead, u.Gone, u.CutOff, u.Gates = next.Number, next.Dead, next.Gone, next.CutOff, next.Gates
	for _, vip := range next.Ended {
		delete(u.Previous, vip)
		delete(u.Ring, vip)
		delete(u.Unannounced, vip)
	}
	if u.Changes {
		u.Ended = append(u.Ended, next.Ended...)
	}
	if u.Previous == nil {
		u.Previous = map[netip.Addr][]netip.Addr{}
	}
	if u.Ring == nil { // as in each update without a ring that was read from JSON
		u.Ring = map[netip.Addr][]netip.Addr{}
	}
	if u.Unannounced == nil {
		u.Unannounced = map[netip.Addr]Unannounced{}
	}
	for vip, nodes := range next.Previous {
		u.Previous[vip] = nodes
		if ring, ok := next.Ring[vip]; ok {
			u.Ring[vip] = ring
		} else {
			delete(u.Ring, vip)
		}
		if why, ok := next.Unannounced[vip]; ok {
			u.Unannounced[vip] = why
		} else {
			delete(u.Unannounced, vip)
		}
	}
}

// Since returns what u, which says all, says otherwise than before, which did too. If only one of them fills in
// Unannounced, Since returns all that u says.
func (u FeedUpdate) Since(before FeedUpdate) FeedUpdate {
	changes := FeedUpdate{Changes: true, Dead: u.Dead, Gone: u.Gone, CutOff: u.CutOff, Gates: u.Gates,
		Previous: map[netip.Addr][]netip.Addr{}, Ring: map[netip.Addr][]netip.Addr{},
		Unannounced: map[netip.Addr]Unannounced{}}
	for vip := range u.vips() {
		was, had := before.Previous[vip]
		ring, spread := u.Ring[vip]
		wasRing, wasSpread := before.Ring[vip]
		why, unannounced := u.Unannounced[vip]
		if (had || wasSpread) && slices.Equal(was, u.Previous[vip]) && spread == wasSpread && slices.Equal(ring, wasRing) &&
			why == before.Unannounced[vip] && u.Gates == before.Gates {
			continue
		}
		changes.Previous[vip] = u.Previous[vip]
		if unannounced {
			changes.Unannounced[vip] = why
		}
		if spread {
			changes.Ring[vip] = ring
		}
	}
	now := u.vips()
	for vip := range before.vips() {
		if !now[vip] {
			changes.Ended = append(changes.Ended, vip)
		}
	}
	return changes
}

// vips are those that u names.
func (u FeedUpdate) vips() map[netip.Addr]bool {
	vips := make(map[netip.Addr]bool, len(u.Previous))
	for vip := range u.Previous {
		vips[vip] = true
	}
	for vip := range u.Ring {
		vips[vip] = true
	}
	return vips
}

// MaxRing is how many nodes a ring names at most, and so how many nodes a packet asks. It is part
// of the protocol between the nodes that docs/design/rescue.md specifies.
const MaxRing = 16

// The TTLs (hop limits) of packets that a node has handed to another one, or moved there: from
// LeastMovedTTL to HandedTTL. Those below HandedTTL are of the ring's protocol
// (docs/design/rescue.md); with HandedTTL a packet arrives that a node has handed over for direct
// forwarding (docs/design/direct.md), and with one less a packet that a node behind a router does not
// serve, and has sent back. A node hands over none of them, so that no packet goes round in
// circles.
const (
	LeastMovedTTL = 152
	HandedTTL     = 218
)

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
