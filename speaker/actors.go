package main

import (
	"context"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/neighbors"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
	"github.com/landfall-lb/landfall/speaker/routes"
	"github.com/landfall-lb/landfall/speaker/witness"
)

// table is what the API server has of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Synced() bool
}

// sources are where the speaker reads.
type sources struct {
	services       table[lb.Key, lb.Service]
	slices         table[lb.Key, []lb.Slice] // nil unless the gate looks at endpoints
	nodes          table[string, lb.Node]
	pools          table[string, lb.Pool]
	advertisements table[string, lb.L2Advertisement]
	interfaces     func() ([]lb.Interface, bool)
	wakes          func() (times uint64, woke time.Time) // how often the process was frozen, and when it last went on
	feed           feed                                  // nil unless the gate is the proxy
	members        gossip                                // the claims of the other nodes
	liveness       diagnosis                             // which of them are there
	routes         routeSources
	// daemonSet has what started the speaker, by name; nil when nobody can know.
	daemonSet table[string, lb.DaemonSet]
}

// routeSources are where the speaker reads what concerns BGP only.
type routeSources struct {
	peers          table[string, lb.Peer]
	advertisements table[string, lb.BGPAdvertisement]
	communities    table[string, lb.CommunityNames]
	profiles       table[string, lb.BFDProfile]
	passwords      table[string, string] // of the Secrets in namespace
	namespace      string
}

type feed interface {
	Reason() lb.Reason
	Connected() bool
	Delivery(lb.DeliveryKey) *lb.Delivery
	VRFs() map[string]string
	Tell(lb.FeedUpdate)
	Rescued() bool
	Gates() bool
}

type gossip interface {
	Begin(map[netip.Addr]*plan.Claim)
	Update(map[netip.Addr]*plan.Claim)
	SetPeers(map[string][]netip.Addr)
	Claims(netip.Addr, plan.Sight) map[string]plan.Claim
	Restarted(netip.Addr, plan.Sight) bool
	Joined() bool
	Seek(since time.Time)
	Met() time.Time
	Trouble() string
	SetMACs([]string)
	MACs() map[string]string
}

type diagnosis interface {
	Set(nodes map[string][]netip.Addr)
	ConfirmAfter(after time.Time)
	Sight() plan.Sight
}

// missing says what a plan needs and is not known yet; "" when all is.
func (from sources) missing() string {
	_, linksKnown := from.interfaces()
	switch {
	case !from.services.Synced():
		return "the list of Services"
	case !from.nodes.Synced():
		return "the list of Nodes"
	case !from.pools.Synced():
		return "the list of IPAddressPools"
	case !from.advertisements.Synced():
		return "the list of L2Advertisements"
	case from.slices != nil && !from.slices.Synced():
		return "the list of EndpointSlices"
	case !linksKnown:
		return "the list of network interfaces"
	}
	return ""
}

// missing says what a plan of routes needs and is not known yet; "" when all is.
func (from routeSources) missing() string {
	switch {
	case !from.peers.Synced():
		return "the list of BGPPeers"
	case !from.advertisements.Synced():
		return "the list of BGPAdvertisements"
	case !from.communities.Synced():
		return "the list of Communities"
	case !from.profiles.Synced():
		return "the list of BFDProfiles"
	}
	for _, p := range from.peers.All() {
		if p.PasswordSecret != nil && !from.passwords.Synced() {
			return "the list of Secrets in namespace " + from.namespace
		}
	}
	return ""
}

// stays reports whether the DaemonSet is there, and not about to go.
func (from sources) stays() bool {
	if from.daemonSet == nil {
		return false
	}
	for _, d := range from.daemonSet.All() {
		return d.Stays
	}
	return false
}

// ready returns on how many nodes speakers of the DaemonSet are ready, as far as that is known.
// Those of nodes that are down are not.
func (from sources) ready() (n int) {
	if from.daemonSet == nil {
		return 0
	}
	for _, d := range from.daemonSet.All() {
		n += d.Ready
	}
	return n
}

// sinks are where the speaker acts.
type sinks struct {
	l2 interface {
		Set(l2.Desired)
		Outcome() l2.Outcome
	}
	report interface {
		Update(map[lb.Key]*lb.AnnouncedStatus)
	}
	witness interface {
		Set(witness.Desired)
		Outcome() (lb.Witness, bool)
		Contact() (asked time.Time, took time.Duration)
	}
	routes    routeSinks
	neighbors interface{ Set(neighbors.Desired) }
	objects   interface {
		Set(map[string]report.Job)
		Idle() bool
	}
	writers writers
}

// routeSinks are where the speaker acts for BGP.
type routeSinks struct {
	bgp interface {
		Set(map[string]plan.BGPSession)
		Statuses() map[string]bgp.Status
		Brief() map[string]bgp.Status
		Announced(netip.Prefix) []string
		Confirming(netip.Prefix) []string
	}
	bfd interface {
		Set(map[bfd.Key]bfd.Profile)
		Outcomes() map[bfd.Key]bfd.Outcome
		Health() bfd.Health
	}
}

// writers write into the status of objects.
type writers struct {
	// peerNode writes what a node says into the status of a peer, or takes it back if it is nil.
	peerNode      func(ctx context.Context, peer, node string, said *lb.PeerNode) error
	advertisement func(context.Context, lb.BGPAdvertisement, lb.Condition) (wrote bool, err error)
	// l2Advertisement is advertisement for an L2Advertisement.
	l2Advertisement func(context.Context, lb.L2Advertisement, lb.Condition) (wrote bool, err error)
	// event tells of a change of a session.
	event func(p lb.Peer, good bool, reason lb.Reason, message string)
}

// seen is what the actors for BGP and BFD have found out.
func (to routeSinks) seen() routes.Seen {
	seen := routes.Seen{Sessions: to.sessions(), Hears: to.bgp.Announced, Paths: map[routes.Path]routes.PathState{}}
	for key, o := range to.bfd.Outcomes() {
		seen.Paths[routes.Path(key)] = routes.PathState{
			Up: o.State == bfd.Up, Disabled: o.RemoteState == bfd.AdminDown, Failures: o.Failures, Message: pathMessage(o),
		}
	}
	return seen
}

func (to routeSinks) sessions() map[string]routes.Session {
	brief := to.bgp.Brief()
	sessions := make(map[string]routes.Session, len(brief))
	for name, s := range brief {
		session := routes.Session{
			Established: s.State == bgp.Established, Since: s.Since, Synced: s.Synced, Heard: s.Heard, Status: s.PeerNode(),
			Reason: s.Reason, LastError: s.LastError, Local: s.Local,
		}
		if s.Negotiated != nil {
			session.Peer = s.Negotiated.Peer.Addr()
		}
		sessions[name] = session
	}
	return sessions
}

// pathMessage says whether BFD watches a path.
func pathMessage(o bfd.Outcome) string {
	switch {
	case o.Refused != nil:
		return o.Refused.Message
	case o.State == bfd.Up:
		return "BFD is Up"
	case o.Problem != "":
		return "BFD is " + o.State.String() + ": " + o.Problem
	}
	return "BFD is " + o.State.String()
}

// watch tells the BFD actor which paths to watch.
func (to routeSinks) watch(paths map[routes.Path]lb.BFDProfile) {
	sessions := make(map[bfd.Key]bfd.Profile, len(paths))
	for path, p := range paths {
		sessions[bfd.Key(path)] = bfd.Profile{
			TransmitInterval: p.Transmit, ReceiveInterval: p.Receive, DetectMultiplier: p.Multiplier, Passive: p.Passive,
			MinimumTTL: p.MinimumTTL,
		}
	}
	to.bfd.Set(sessions)
}
