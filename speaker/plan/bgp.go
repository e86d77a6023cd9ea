package plan

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// BGPFacts are what one node knows that concerns its BGP sessions and all routes alike.
type BGPFacts struct {
	Peers          map[string]lb.Peer
	Advertisements map[string]lb.BGPAdvertisement
	Communities    map[string]lb.CommunityNames
	Profiles       map[string]lb.BFDProfile
	// Passwords are those of Secrets in Namespace, the one that Landfall runs in, by the Secret's
	// name.
	Passwords map[string]string
	Namespace string
	// BFDDown are the peers to which BFD says that the path is lost.
	BFDDown map[string]bool
	// Locals are the node's addresses of the sessions, as of the last connection of each.
	Locals map[string]netip.Addr
	// VRFs are what the proxy says of the VRFs: why the kernel does not deliver what comes in through
	// one, or "". With TrustVRFs set there is no proxy of Landfall's that could know.
	VRFs      map[string]string
	TrustVRFs bool
	// Restarting is set, while the speaker stops, when a successor is expected soon: peers that keep
	// its routes over a graceful restart go on hearing them as ever.
	Restarting bool
	// Listening is set if peers can open connections to the speaker.
	Listening bool
}

// BGPInput is what one node knows of one VIP, for BGP.
type BGPInput struct {
	VIP netip.Addr
	// Holders are the Services that hold the VIP, in order of their keys.
	Holders []Holder
	// Announced is set while some peer hears of the VIP from this node, or would if it were there: its planned end is
	// not over.
	Announced bool
	// Steady is set if the VIP was last to be announced, and not about to end, and some peer of the node has heard of it,
	// though none may be there now.
	Steady bool
	// Converged is set once the VIP has been in graceful shutdown for as long as routers may take to
	// choose other routes.
	Converged bool
	// Elsewhere is set while another node announces the VIP over BGP, and is not about to end that.
	Elsewhere bool
	// Flapping is set while the next announcement of the VIP has to wait, as it was announced too often in a row.
	Flapping bool
}

// bgpDecision is what follows for this node.
type bgpDecision struct {
	// Sessions are what the actor shall have, by peer.
	Sessions map[string]BGPSession
	// Peers has a decision for each peer that selects this node.
	Peers map[string]PeerDecision
	VIPs  map[netip.Addr]BGPVIP
}

// PeerDecision says whether the node has a session with a peer.
type PeerDecision struct {
	// Refusal says why not; nil when it has.
	Refusal *lb.Refusal
	// Warning says what the session cannot do that was asked for; nil when all is well.
	Warning *lb.Refusal
	// Profile are the parameters of the BFD session that goes with it; nil for none.
	Profile *lb.BFDProfile
}

// BGPVIP says whether the node announces one VIP over BGP, and to which peers.
type BGPVIP struct {
	// Selected is set when a BGPAdvertisement is for the VIP on this node, whatever else keeps it from
	// being announced.
	Selected bool
	// Refusal says why the node does not announce the VIP, or why it is about to end; nil when it
	// announces it.
	Refusal *lb.Refusal
	// Leaving is set while the VIP is still announced, in graceful shutdown (RFC 8326): routers choose
	// other routes, and what arrives meanwhile is delivered. The caller sets Converged when that has
	// lasted long enough, and Elsewhere while another node announces the VIP.
	Leaving bool
	// Lingers is set while the planned end of the VIP's announcement is not over. With no peer or advertisement there,
	// nothing is announced, and it is Leaving again once they are back.
	Lingers bool
	// Prefixes are announced for the VIP, to at least one peer, sorted.
	Prefixes []netip.Prefix
	// Obstacles say for each advertisement and peer that does not take it why, as far as that is not
	// what everyone expects.
	Obstacles []BGPObstacle
}

// BGPObstacle is why a VIP that the node can deliver is not announced by an advertisement, or to a
// peer.
type BGPObstacle struct {
	Advertisement string     `json:"advertisement"`
	Peer          string     `json:"peer,omitempty"`
	Reason        lb.Reason  `json:"reason"`
	Message       string     `json:"message"`
	VIP           netip.Addr `json:"-"`
}

// decideBGP plans all sessions of a node and all that its peers hear.
func decideBGP(f Facts, b BGPFacts, vips []BGPInput) bgpDecision {
	d := bgpDecision{VIPs: make(map[netip.Addr]BGPVIP, len(vips))}
	d.Sessions, d.Peers = sessions(f, b)
	r := newRoutes(f, b, d, len(vips))
	node := refuseNode(f)
	successor := f
	successor.Stopping = false
	restarts := f.Stopping && b.Restarting && refuseNode(successor) == nil
	for _, in := range vips {
		v := standing(f.Gate, node, in)
		v.Lingers = v.Leaving
		kept := restarts && standing(f.Gate, nil, in).Refusal == nil
		v.Selected = r.selects(in)
		if v.Refusal == nil || v.Leaving || kept {
			r.add(in, &v, kept)
		}
		d.VIPs[in.VIP] = v
	}
	for name, s := range d.Sessions {
		s.Routes = r.routes(name)
		d.Sessions[name] = s
	}
	return d
}

// standing decides whether a node announces a VIP: by the same claim as over ARP, but for what
// concerns ARP only. Every node that claims announces. A planned end is a graceful one as long as
// what arrives is still delivered, and waits for another node that announces the VIP (contract: make
// before break), unless the node must not announce it any longer.
func standing(gate lb.Reason, node *lb.Refusal, in BGPInput) BGPVIP {
	refusal := node
	if refusal == nil {
		refusal = deliverable(gate, in.Holders)
	}
	if refusal == nil && in.Flapping {
		refusal = flapping(in.VIP)
	}
	v := BGPVIP{Refusal: refusal}
	if refusal != nil && gate == "" && forwards(in.Holders) {
		switch refusal.Reason {
		case lb.ReasonNodeLeaving, lb.ReasonNodeDrained, lb.ReasonNoLocalBackends: // as handsOver does over ARP
			v.Leaving = (in.Announced || in.Steady) && (!in.Converged || !in.Elsewhere)
		case lb.ReasonFlapping: // it was about to end, and routers go on to have it so until it is announced again
			v.Leaving = in.Announced && (!in.Converged || !in.Elsewhere)
		case lb.ReasonStopping, lb.ReasonNodeExcluded, lb.ReasonNetworkUnavailable, lb.ReasonNodeNotReady:
			v.Leaving = in.Announced && !in.Converged
		}
	}
	return v
}

// refuseNode says why a node announces nothing over BGP at all.
func refuseNode(f Facts) *lb.Refusal {
	switch {
	case f.Stopping:
		return lb.Refuse(lb.ReasonStopping, "the speaker on %s is stopping", f.Self)
	case f.Node == nil:
		return lb.Refuse(lb.ReasonNodeUnknown, "the API server has no Node %s", f.Self)
	case f.Node.Leaving != "":
		return lb.Refuse(f.Node.Leaving, "%s: %s", f.Self, Describe(f.Node.Leaving))
	case f.excluded():
		return lb.Refuse(lb.ReasonNodeExcluded, "%s carries the label %s", f.Self, LabelExclude)
	case f.CordonDrains && f.Node.Cordoned:
		return lb.Refuse(lb.ReasonNodeLeaving, "%s is cordoned", f.Self)
	case f.networkUnavailable():
		return lb.Refuse(lb.ReasonNetworkUnavailable, "%s: %s", f.Self, Describe(lb.ReasonNetworkUnavailable))
	case f.RequireReady && f.Node.NotReady:
		return lb.Refuse(lb.ReasonNodeNotReady, "%s: %s", f.Self, Describe(lb.ReasonNodeNotReady))
	}
	return nil
}

// anyMatches reports whether one of alternatives matches; none is no restriction.
func anyMatches(selectors []labels.Selector, set labels.Set) bool {
	for _, s := range selectors {
		if s.Matches(set) {
			return true
		}
	}
	return len(selectors) == 0
}
