// Package plan decides, for one VIP at a time and from values only, whether this node claims it,
// who owns it, on which interfaces this node answers for it, and why or why not.
package plan

import (
	"cmp"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// LabelExclude keeps a node out of external load balancing, whatever its value (KEP-1143).
const LabelExclude = "node.kubernetes.io/exclude-from-external-load-balancers"

// Facts are what one node knows that concerns all VIPs alike.
type Facts struct {
	// Self is the name of this node.
	Self string
	// Node is this node's object as last seen; nil when the API server has none.
	Node *lb.Node
	// Joined is set once this node has met the other speakers or has tried to.
	Joined bool
	// Stopping is set once the speaker was told to end.
	Stopping bool
	// Gate says why the gate's deliveries cannot be used, ReasonFeedUnknown or ReasonFeedLost; "" when
	// they can.
	Gate           lb.Reason
	Pools          map[string]lb.Pool
	Advertisements map[string]lb.L2Advertisement
	Interfaces     []lb.Interface
	// Exclude are shell patterns of interface names that answer only where an advertisement names
	// them.
	Exclude []string
	// CordonDrains makes a node that takes no new pods give its VIPs away.
	CordonDrains bool
	// IgnoreExclude has a node with LabelExclude announce all the same.
	IgnoreExclude bool
	// IgnoreNetwork has a node with the condition NetworkUnavailable announce all the same, RequireReady
	// has one that is not ready announce nothing.
	IgnoreNetwork, RequireReady bool
	// CheckForwarding keeps VIPs from interfaces that the kernel does not forward from.
	CheckForwarding bool
	// OnConflict says what to do with a VIP that a conflicting host uses, unless its Service does.
	OnConflict OnConflict
	// Live are the names of all live nodes, this one included, in any order.
	Live []string
	// Missing are the names of nodes that were live and have not taken their leave, in any order.
	Missing []string
	// Parted is set while this node sees no majority of the speakers, and for a moment after.
	Parted bool
	// Alone is set while this node hears no majority of the speakers: see Speakers.
	Alone bool
	// Estranged is set while this node may have been cut off and has not heard the others since. Until
	// Trusted it was not, for sure.
	Estranged bool
	Trusted   time.Time
}

// Input is what one node knows of one VIP.
type Input struct {
	VIP netip.Addr
	// Holders are the Services that hold the VIP, in order of their keys.
	Holders []Holder
	// Claims are those of the other live nodes.
	Claims map[string]Claim
	// Answering are the interfaces on which this node answers for the VIP now.
	Answering []string
	// Since is when this node began to answer for the VIP.
	Since time.Time
	// Restarted is set when this node's speaker restarted a moment ago and answered for the VIP
	// before, so that the others wait for it.
	Restarted bool
	// Routed is what has become of the VIP over BGP.
	Routed Routed
	// Fresh is set for a moment after this node has first seen the VIP: other nodes may see it a
	// little later.
	Fresh bool
	// Elsewhere is set while this node is cut off from a majority of the speakers and the majority
	// answers for the VIP.
	Elsewhere bool
	// Served is set once a node of ours has answered for the VIP, as far as this node has heard.
	Served bool
	// Probed is set once this node has probed on its interfaces for a conflicting host.
	Probed bool
	// Clear are the interfaces on whose LANs the VIP was probed before a Service had it, and nobody was
	// found to use it; sorted.
	Clear []string
	// Proving is set while this node announces the VIP because of that, and probes it once more.
	Proving bool
	// ConflictingHosts are the conflicting hosts that were seen lately; the one seen first comes first.
	ConflictingHosts []ConflictingHost
}

// Holder is a Service that holds the VIP, with what the gate says of it.
type Holder struct {
	Service lb.Key
	Labels  labels.Set
	// OnConflict is what the Service asks for; see lb.AnnotationOnConflict.
	OnConflict string
	// Delivery is nil when the gate says nothing.
	Delivery *lb.Delivery
	// Joined is set for a Service that another holder of the VIP let join, or that holds it by
	// mistake.
	Joined bool
}

// Decision is what follows for one VIP.
type Decision struct {
	VIP      netip.Addr
	Services []lb.Key
	// Refusal says why this node does not claim the VIP; nil when it does.
	Refusal *lb.Refusal
	// Owner is the node that shall answer; "" when no live node claims the VIP.
	Owner string
	// Reporter is the node that reports on the VIP to the API server: the owner, or who would be it if
	// all live nodes claimed.
	Reporter string
	// Answer are the interfaces on which this node answers; none when it does not.
	Answer []string
	// Probe are the interfaces on which this node probes for a conflicting host.
	Probe []string
	// ConflictingHosts are the conflicting hosts that were seen lately.
	ConflictingHosts []ConflictingHost
	// Proving is set while this node answers and probes side by side: it answers no more as soon as it
	// finds a conflicting host.
	Proving bool
	// Handover is set while this node answers only until the owner does.
	Handover bool
	// Flapping is set while this node answers and does not announce the VIP yet, as it did so too often in a row.
	Flapping bool
	// Weight is how much this node is preferred for the VIP.
	Weight uint16
	// Parted is that of the facts.
	Parted bool
	// Overlap is set while this node owns the VIP and another one answers for it too.
	Overlap bool
	// Routed is what has become of the VIP over BGP on this node.
	Routed Routed
	// Undelivered says which Services that joined the VIP this node does not deliver, and why.
	Undelivered map[lb.Key]*lb.Refusal
	// kept is why this node cannot deliver the VIP, where several Services hold it, and keeper the one that it is about.
	kept   *lb.Refusal
	keeper lb.Key
	said   sayings // see Nodes
}

// Obstacle says why this node neither claims the VIP nor announces a route for it; "" when it does
// one or the other.
func (d Decision) Obstacle() lb.Reason {
	switch {
	case d.Refusal == nil || d.Routed.steady():
		return ""
	case d.Refusal.Reason == lb.ReasonNoAdvertisement && d.Routed.Refusal != nil:
		return d.Routed.Refusal.Reason // the VIP is for BGP only
	}
	return d.Refusal.Reason
}

// Claim returns what this node says of the VIP to the others; answering is what its actor reports.
func (d Decision) Claim(answering bool) Claim {
	claim := Claim{Answering: answering, Weight: d.Weight, Parted: d.Parted && answering}
	if d.Refusal != nil {
		claim.Reason = d.Refusal.Reason
	}
	d.Routed.claim(&claim)
	return claim
}

// Decide plans one VIP.
func Decide(f Facts, in Input) Decision {
	d := Decision{VIP: in.VIP, Routed: in.Routed, ConflictingHosts: in.ConflictingHosts, Parted: f.Parted}
	for _, h := range in.Holders {
		d.Services = append(d.Services, h.Service)
	}
	d.Undelivered = undelivered(in.Holders)
	if len(in.Holders) > 1 {
		d.kept, d.keeper = undeliverable(f.Gate, in.Holders)
	}
	var place place
	place, d.Refusal = refuse(f, in)
	if d.Refusal == nil {
		d.Refusal = conflict(f, in)
	}
	if d.Refusal == nil && in.Elsewhere {
		d.Refusal = lb.Refuse(lb.ReasonYielded, "%s sees no majority of the speakers, and the majority answers for %s",
			f.Self,
			in.VIP)
	}
	if d.Refusal == nil && f.Estranged && (len(in.Answering) == 0 || in.Since.After(f.Trusted)) {
		d.Refusal = lb.Refuse(lb.ReasonCutOff, "%s may have been cut off, and has not heard another speaker since", f.Self)
	}
	d.Weight = place.weight
	d.Owner = elect(in.VIP, claimants(f, in, d))
	d.Reporter = d.Owner
	if d.Owner == "" {
		d.Reporter = Winner(in.VIP, reporters(f, in, d))
	}
	if leavesReport(f, in, d) {
		d.Reporter = "" // to the others
	}
	if probes(f, in, d) {
		d.Probe = place.interfaces
	}
	switch {
	case d.Owner == f.Self && !in.Served && !in.Probed && !in.Proving && !in.clear(place.interfaces):
		// Nobody of ours has ever answered, so there is time to ask.
	case d.Owner == f.Self:
		d.Answer, d.Proving = place.interfaces, !in.Served && !in.Probed
		for _, claim := range in.Claims {
			d.Overlap = d.Overlap || claim.Answering
		}
	case handsOver(f, in, d):
		d.Answer, d.Handover = f.handingOver(in), true
	}
	d.said = sayingsOf(f, in, d)
	return d
}

// leavesReport reports whether others than the nodes that this one sees may serve the VIP: that none of these does
// is not the truth about it then.
func leavesReport(f Facts, in Input, d Decision) bool {
	if d.Refusal != nil && (d.Refusal.Reason == lb.ReasonYielded || d.Refusal.Reason == lb.ReasonCutOff) {
		return true
	}
	return d.Owner == "" && (in.Elsewhere || f.Estranged)
}

// claimants are the live nodes that claim the VIP. What this node claims is what it has just
// decided, not what it last told.
func claimants(f Facts, in Input, d Decision) []Candidate {
	nodes := make([]Candidate, 0, len(in.Claims)+1)
	served := false
	for node, claim := range in.Claims {
		if node != f.Self && claim.Reason == "" {
			nodes = append(nodes, Candidate{Node: node, Weight: claim.Weight, Answering: claim.Answering, Parted: claim.Parted})
			served = served || claim.Answering
		}
	}
	if d.Refusal == nil {
		answering := len(in.Answering) > 0 || in.Restarted && !served
		nodes = append(nodes, Candidate{Node: f.Self, Weight: d.Weight, Answering: answering, Parted: f.Parted})
	}
	if in.Fresh && !served {
		nodes = append(nodes, expected(f, in)...)
	}
	return nodes
}

// expected are the live nodes that may claim a fresh VIP in a moment. They count as if they did,
// lest the node that happens to be the first with each new VIP owns all of them for good.
func expected(f Facts, in Input) []Candidate {
	var nodes []Candidate
	for _, node := range f.Live {
		claim, told := in.Claims[node]
		soon := !told || claim.Reason == lb.ReasonNotJoined || claim.Reason == lb.ReasonFeedUnknown ||
			claim.Reason == lb.ReasonNotProgrammed || claim.Reason == lb.ReasonProbedAhead
		if node != f.Self && soon {
			nodes = append(nodes, Candidate{Node: node, Weight: claim.Weight})
		}
	}
	return nodes
}

// handsOver reports whether this node, which answers for a VIP that it does not own, goes on with
// it until it has heard that the owner answers (contract: make before break). What an owner that
// has just been found again said before may not be so any more. It does so only while what still
// arrives here is delivered.
func handsOver(f Facts, in Input, d Decision) bool {
	if len(f.handingOver(in)) == 0 || f.Gate != "" || !forwards(in.Holders) {
		return false
	}
	if in.Elsewhere {
		return false // an owner that this node does not hear answers
	}
	if owner := in.Claims[d.Owner]; d.Owner != "" && owner.Answering && !owner.Stale {
		return false
	}
	if d.Refusal == nil {
		return true // and so there is another owner
	}
	switch d.Refusal.Reason {
	case lb.ReasonNodeLeaving, lb.ReasonNodeDrained, lb.ReasonNoLocalBackends:
		return true // also while there is no owner yet: what is about to go still serves, and nobody else does
	case lb.ReasonStopping, lb.ReasonNodeExcluded, lb.ReasonNoAdvertisement, lb.ReasonNetworkUnavailable,
		lb.ReasonNodeNotReady:
		return d.Owner != ""
	}
	return false
}

// place is where, and how much preferred, this node may answer.
type place struct {
	interfaces []string
	weight     uint16
}

// refuse returns where this node may answer, or why it does not claim the VIP. The order is from
// what holds for the whole node to what holds for one Service, so that the reason shown is the one
// to remove first.
func refuse(f Facts, in Input) (place, *lb.Refusal) {
	switch {
	case f.Stopping:
		return place{}, lb.Refuse(lb.ReasonStopping, "the speaker on %s is stopping", f.Self)
	case f.Node == nil:
		return place{}, lb.Refuse(lb.ReasonNodeUnknown, "the API server has no Node %s", f.Self)
	case f.Node.Leaving != "":
		return place{}, lb.Refuse(f.Node.Leaving, "%s: %s", f.Self, Describe(f.Node.Leaving))
	case f.excluded():
		return place{}, lb.Refuse(lb.ReasonNodeExcluded, "%s carries the label %s", f.Self, LabelExclude)
	case f.CordonDrains && f.Node.Cordoned:
		return place{}, lb.Refuse(lb.ReasonNodeLeaving, "%s is cordoned", f.Self)
	case f.networkUnavailable():
		return place{}, lb.Refuse(lb.ReasonNetworkUnavailable, "%s: %s", f.Self, Describe(lb.ReasonNetworkUnavailable))
	case f.RequireReady && f.Node.NotReady:
		return place{}, lb.Refuse(lb.ReasonNodeNotReady, "%s: %s", f.Self, Describe(lb.ReasonNodeNotReady))
	case !f.Joined:
		return place{}, lb.Refuse(lb.ReasonNotJoined, "the speaker on %s has not met the others yet", f.Self)
	}
	where, refusal := announceOn(f, in)
	if refusal == nil || refusal.Reason == lb.ReasonForwardingOff { // which counts only for what is delivered
		refusal = cmp.Or(deliverable(f.Gate, in.Holders), refusal)
	}
	if refusal != nil {
		return place{}, refusal
	}
	return where, nil
}

// excluded reports whether a label keeps this node from announcing.
func (f Facts) excluded() bool {
	_, ok := f.Node.Labels[LabelExclude]
	return ok && !f.IgnoreExclude
}

// networkUnavailable reports whether the node's network plugin has not set up its network, as far as
// that counts.
func (f Facts) networkUnavailable() bool { return f.Node.NetworkUnavailable && !f.IgnoreNetwork }
