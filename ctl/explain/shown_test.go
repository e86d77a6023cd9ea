package explain

import (
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestContract10EachReasonHasItsLine has each reason be why a Service has no address, is not announced or is not served
// as it asks: the first line says so in the words of the program that found it, and there is the reason's cure.
func TestContract10EachReasonHasItsLine(t *testing.T) {
	const words = "words of the program"
	over := func(p lb.PeerNode) func(w *world) {
		return func(w *world) { w.overBGP(lb.Peer{PeerASN: 64513, Status: map[string]lb.PeerNode{"n1": p, "n2": p}}) }
	}
	for _, group := range []struct {
		what    string
		level   Level
		fault   func(w *world, reason lb.Reason)
		line    string // ahead of the words
		reasons []lb.Reason
	}{
		{"not assigned", Wrong, func(w *world, reason lb.Reason) { w.unassigned(reason, words) }, "", []lb.Reason{
			lb.ReasonNoPool, lb.ReasonPoolExhausted, lb.ReasonPoolNotFound, lb.ReasonPoolNotReady, lb.ReasonAddressInvalid,
			lb.ReasonAddressOutside, lb.ReasonAddressTaken, lb.ReasonAddressExcluded, lb.ReasonAddressReserved,
			lb.ReasonAddressKept, lb.ReasonForeignAddress, lb.ReasonTooManyAddresses, lb.ReasonStatusRefused, lb.ReasonNoClusterIP,
			lb.ReasonFamilyUnserved, lb.ReasonRequestInvalid, lb.ReasonRequestsDisagree, lb.ReasonSharingRefused,
			lb.ReasonTooManySharers, lb.ReasonPoolNotAllowed, lb.ReasonQuotaExceeded, lb.ReasonDuplicate}},
		{"not announced", Wrong, func(w *world, reason lb.Reason) { w.announced(false, reason, words) }, "", []lb.Reason{
			lb.ReasonNoAdvertisement, lb.ReasonNoInterface, lb.ReasonNoBackends, lb.ReasonNoLocalBackends, lb.ReasonNodeLeaving,
			lb.ReasonNodeDrained, lb.ReasonNodeExcluded, lb.ReasonStopping, lb.ReasonNotJoined, lb.ReasonNodeUnknown,
			lb.ReasonFamilyUnspoken, lb.ReasonTooManyVIPs, lb.ReasonNetworkUnavailable, lb.ReasonNodeNotReady, lb.ReasonNoCarrier,
			lb.ReasonForwardingOff, lb.ReasonPodRouteMissing, lb.ReasonConntrackFull, lb.ReasonFrontendInUse, lb.ReasonFlapping,
			lb.ReasonAddressConflict, lb.ReasonYielded, lb.ReasonCutOff, lb.ReasonFamilyNotOffered, lb.ReasonNoNextHop,
			lb.ReasonVRFUndelivered, lb.ReasonUnknownPeer, lb.ReasonUnknownCommunity, lb.ReasonCommunityAmbiguous,
			lb.ReasonAggregateOutside}},
		{"not announced for now", Warning, func(w *world, reason lb.Reason) { w.announced(false, reason, words) }, "",
			[]lb.Reason{lb.ReasonProbing}},
		{"a node does not announce", Wrong, func(w *world, reason lb.Reason) { w.announced(false, reason, words) },
			"n1 does not announce 192.0.2.10: ", []lb.Reason{lb.ReasonFeedUnknown, lb.ReasonFeedLost, lb.ReasonAnnounceFailed,
				lb.ReasonUnheard}},
		{"no session", Wrong, func(w *world, reason lb.Reason) {
			over(lb.PeerNode{State: "Idle", Reason: reason, Message: words})(w)
			w.announced(false, lb.ReasonNotEstablished, noSession)
		}, "BGP session with tor (192.0.2.254) from n1, n2 is down: ", []lb.Reason{lb.ReasonPeerInvalid, lb.ReasonPeerDuplicate,
			lb.ReasonSourceMissing, lb.ReasonSessionTaken, lb.ReasonInterfaceMissing, lb.ReasonVRFMissing, lb.ReasonSecretMissing,
			lb.ReasonSecretElsewhere, lb.ReasonBFDDown}},
		{"a session that lacks something", Warning, func(w *world, reason lb.Reason) {
			over(lb.PeerNode{State: "Established", Reason: reason, Message: words})(w)
		}, "", []lb.Reason{lb.ReasonProfileMissing, lb.ReasonNoNextHop, lb.ReasonFamilyNotOffered}},
		{"an advertisement", Warning, func(w *world, reason lb.Reason) {
			over(lb.PeerNode{State: "Established"})(w)
			w.BGP[0].Conditions = []lb.Condition{{Type: lb.ConditionReady, Reason: reason, Message: words}}
		}, "BGPAdvertisement all: ", []lb.Reason{lb.ReasonUnknownPeer, lb.ReasonUnknownPool, lb.ReasonSelectsNoPool,
			lb.ReasonSelectsNoNode, lb.ReasonUnknownCommunity, lb.ReasonCommunityAmbiguous, lb.ReasonAttributeConflict,
			lb.ReasonAggregateOutside, lb.ReasonAggregateLocal, lb.ReasonAttributeUnsent}},
		{"an L2Advertisement", Warning, func(w *world, reason lb.Reason) {
			w.L2[0].Conditions = []lb.Condition{{Type: lb.ConditionReady, Reason: reason, Message: words}}
		}, "L2Advertisement all: ", []lb.Reason{lb.ReasonUnknownPool, lb.ReasonSelectsNoPool, lb.ReasonSelectsNoNode}},
		{"a request", Warning, func(w *world, reason lb.Reason) {
			w.Service.AsRequested = lb.Condition{Type: lb.ConditionAsRequested, Reason: reason, Message: words}
		}, "", []lb.Reason{lb.ReasonSchedulerIgnored, lb.ReasonRelayRefused, lb.ReasonDirectRefused}},
		{"a finding", Wrong, func(w *world, reason lb.Reason) { w.find("n1", reason, words) }, "", []lb.Reason{
			lb.ReasonForwardingOff, lb.ReasonForwardDropped, lb.ReasonARPNotStrict, lb.ReasonPodRouteMissing}},
		{"a finding of what may be so", Warning, func(w *world, reason lb.Reason) { w.find("n1", reason, words) }, "",
			[]lb.Reason{lb.ReasonPodNetworkUnmatched, lb.ReasonServiceNetworkShared}},
	} {
		for _, reason := range group.reasons {
			w := well()
			group.fault(&w, reason)
			v := Service(w.Cluster, w.ServiceFacts)
			if v.Level != group.level || v.Reason != reason || !strings.HasPrefix(v.Line, "Service shop/web: "+group.line+words) {
				t.Errorf("%s, %s: %s (%s) %q", group.what, reason, v.Level, v.Reason, v.Line)
			}
			entry := Reasons[reason]
			if v.Cause != entry.Meaning || (v.Cure == "") != (entry.Cure == "") {
				t.Errorf("%s, %s: cause %q, cure %q", group.what, reason, v.Cause, v.Cure)
			}
		}
	}
}
