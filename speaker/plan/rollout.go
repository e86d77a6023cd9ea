package plan

import "github.com/landfall-lb/landfall/internal/lb"

// Unannounced says why this node does not announce the VIP although it may do so soon, for the
// readiness gates of its pods; nil if there is nothing to wait for. That is so if BGP peers hear of
// the VIP from this node; if this node claims it for ARP or NDP, whether it owns it or would take over
// from the owner; and if it announces the VIP in no way as the cluster is configured.
func (d Decision) Unannounced() *lb.Unannounced {
	waits := lb.Unannounced{Elsewhere: d.Served()}
	claims := d.Refusal == nil
	switch {
	case d.Routed.steady(), claims && waits.Elsewhere:
		return nil
	case d.Routed.Refusal != nil && !configured(d.Routed.Refusal.Reason):
		waits.Reason = d.Routed.Refusal.Reason
	case claims:
		status, _ := d.Node(d.said.self)
		waits.Reason = status.Reason
	case !configured(d.Refusal.Reason):
		waits.Reason = d.Refusal.Reason
	case d.Routed.Unknown && ofL2(d.Refusal.Reason):
		waits.Reason = lb.ReasonNotEstablished
	}
	if waits.Reason == "" {
		return nil
	}
	if d.kept != nil && d.kept.Reason == waits.Reason && d.keeper != (lb.Key{}) && !ofAll(waits.Reason) {
		waits.Service = d.keeper.Sum()
	}
	return &waits
}

// ofAll reports whether a reason that is found at one Service holds for those that share its address as well: the node
// has no path to pods, or all of them wait for their first pod.
func ofAll(reason lb.Reason) bool { return lb.OfPath(reason) || reason == lb.ReasonNoBackends }

// ofL2 reports whether a reason keeps a node from announcing a VIP over ARP and NDP alone: routers may hear of it.
func ofL2(reason lb.Reason) bool {
	switch reason {
	case lb.ReasonNoAdvertisement, lb.ReasonNoInterface, lb.ReasonFamilyUnspoken, lb.ReasonAddressConflict:
		return true
	}
	return false
}

// configured reports whether a node that does not announce a VIP for a reason goes on so until somebody
// changes the configuration: no rollout waits for that.
func configured(reason lb.Reason) bool {
	switch reason {
	case lb.ReasonNoAdvertisement, lb.ReasonNoInterface, lb.ReasonFamilyUnspoken, lb.ReasonTooManyVIPs,
		lb.ReasonNodeExcluded, lb.ReasonNodeDrained, lb.ReasonNodeLeaving, lb.ReasonFrontendInUse, lb.ReasonAddressConflict,
		lb.ReasonUnknownPeer, lb.ReasonFamilyNotOffered, lb.ReasonAggregateOutside, lb.ReasonUnknownCommunity,
		lb.ReasonCommunityAmbiguous, lb.ReasonVRFUndelivered, lb.ReasonPeerInvalid, lb.ReasonPeerDuplicate,
		lb.ReasonSecretMissing, lb.ReasonSecretElsewhere, lb.ReasonVRFMissing, lb.ReasonInterfaceMissing,
		lb.ReasonSelectorInvalid:
		return true
	}
	return false
}
