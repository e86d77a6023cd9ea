package lb

import (
	"cmp"
	"net/netip"
	"slices"
)

// Backend is one endpoint address and port that a frontend may deliver to.
type Backend struct {
	Addr netip.AddrPort
	// Local is set when the endpoint runs on this node.
	Local bool
	// Ready is false for a terminating endpoint that still serves.
	Ready bool
	// Weight is its share of new connections beside those of others, 1 to 100; 0 counts as 1.
	Weight uint8
}

// Usable lists the endpoints of one Service port that a node may use. The proxy forwards, the
// health port answers and the speaker claims by this one decision.
type Usable struct {
	// Cluster is the set for policy Cluster, sorted by address: the ready endpoints anywhere, limited
	// by hints to those for this node or its zone. If none is ready, it holds the endpoints that
	// terminate and still serve (KEP-1669).
	Cluster []Backend
	// Local is the set for policy Local: the same among the endpoints of this node, without hints.
	Local []Backend
}

// Place is the location of the node for which Choose decides.
type Place struct {
	Node string
	Zone string // "" when unknown
}

// Choose returns the endpoints of the slices that are usable at a place, for the port with the
// given name and protocol and in one address family.
func Choose(all []Slice, name string, protocol Protocol, family Family, at Place) Usable {
	var ready, serving []candidate
	for _, slice := range all {
		if slice.Family != family {
			continue
		}
		for _, port := range slice.Ports {
			if port.Name != name || port.Protocol != protocol {
				continue
			}
			for _, ep := range slice.Endpoints {
				b := Backend{Addr: netip.AddrPortFrom(ep.Addr, port.Port), Local: ep.Node != "" && ep.Node == at.Node,
					Ready: ep.Ready}
				switch {
				case ep.Ready:
					ready = append(ready, candidate{b, ep.ForZones, ep.ForNodes})
				case ep.Serving && ep.Terminating:
					serving = append(serving, candidate{Backend: b})
				}
			}
		}
	}
	ready, serving = distinct(ready), distinct(serving)
	everywhere := func(candidate) bool { return true }
	isLocal := func(c candidate) bool { return c.Local }
	return Usable{
		Cluster: firstNonEmpty(those(ready, near(ready, at)), those(serving, everywhere)),
		Local:   firstNonEmpty(those(ready, isLocal), those(serving, isLocal)),
	}
}

// candidate is an endpoint with its hints.
type candidate struct {
	Backend
	zones, nodes []string
}

// near returns a filter for the ready endpoints that hints assign to a place. Hints count only if
// every endpoint has some and one names the place. So a node whose zone has no endpoint, or that
// sees a slice without hints, still reaches all endpoints. Hints for nodes come before hints for
// zones (KEP-3015).
func near(ready []candidate, at Place) func(candidate) bool {
	forNode := func(c candidate) bool { return slices.Contains(c.nodes, at.Node) }
	forZone := func(c candidate) bool { return slices.Contains(c.zones, at.Zone) }
	switch {
	case at.Node != "" && !slices.ContainsFunc(ready, func(c candidate) bool { return len(c.nodes) == 0 }) &&
		slices.ContainsFunc(ready, forNode):
		return forNode
	case at.Zone != "" && !slices.ContainsFunc(ready, func(c candidate) bool { return len(c.zones) == 0 }) &&
		slices.ContainsFunc(ready, forZone):
		return forZone
	}
	return func(candidate) bool { return true }
}

// For returns the set that policy allows.
func (u Usable) For(policy TrafficPolicy) []Backend {
	if policy == Local {
		return u.Local
	}
	return u.Cluster
}

// Equal reports whether both are the same.
func (u Usable) Equal(other Usable) bool {
	return slices.Equal(u.Cluster, other.Cluster) && slices.Equal(u.Local, other.Local)
}

// distinct sorts by address and drops duplicates: an endpoint may be in two slices for a while.
func distinct(all []candidate) []candidate {
	byAddress := func(a, b candidate) int { return a.Addr.Compare(b.Addr) }
	if !slices.IsSortedFunc(all, byAddress) {
		slices.SortStableFunc(all, byAddress)
	}
	return slices.CompactFunc(all, func(a, b candidate) bool { return a.Addr == b.Addr })
}

// those returns the backends of the candidates that wanted selects.
func those(all []candidate, wanted func(candidate) bool) []Backend {
	var backends []Backend
	for _, c := range all {
		if wanted(c) {
			backends = append(backends, c.Backend)
		}
	}
	return backends
}

func firstNonEmpty(a, b []Backend) []Backend {
	if len(a) > 0 {
		return a
	}
	return b
}

// Delivery is the report of a node's proxy on one VIP of one Service: what the kernel has confirmed
// to deliver. Its JSON form travels over the feed from the proxy to the speaker.
type Delivery struct {
	Service Key           `json:"service"`
	VIP     netip.Addr    `json:"vip"`
	Policy  TrafficPolicy `json:"policy"`
	// Refusal says why a frontend of the VIP is not programmed, or why the kernel reaches no usable
	// endpoint behind it; nil if all are, and it does.
	Refusal *Refusal `json:"refusal,omitempty"`
	// Unknown is set, beside Refusal, while a proxy that has just started has not found out yet whether the
	// kernel delivers. What the previous proxy reported of the VIP stays valid.
	Unknown bool `json:"unknown,omitempty"`
	// LocalReady and LocalServing count endpoints of this node that the rules in the kernel deliver
	// to: ready ones, and terminating ones that still serve.
	LocalReady   int `json:"localReady"`
	LocalServing int `json:"localServing"`
	// Ready and Serving count the same over all nodes.
	Ready   int `json:"ready"`
	Serving int `json:"serving"`
	// OnNode is set if all endpoints that the policy allows have the node's own address, as pods in its
	// network do: what comes for them is not forwarded.
	OnNode bool `json:"onNode,omitempty"`
}

// Deliverable returns the reason why this node cannot deliver the VIP, or "" if it can. With policy
// Local a terminating endpoint counts only if no node has a ready one.
func (d Delivery) Deliverable() Reason {
	switch {
	case d.Refusal != nil && (d.Refusal.Reason == ReasonFrontendInUse || OfPath(d.Refusal.Reason)):
		return d.Refusal.Reason
	case d.Refusal != nil:
		return ReasonNotProgrammed
	case d.Ready+d.Serving == 0:
		return ReasonNoBackends
	case d.Policy != Local:
		return ""
	case d.LocalReady > 0, d.Ready == 0 && d.LocalServing > 0:
		return ""
	}
	return ReasonNoLocalBackends
}

// OfPath reports whether a reason says that rules lead nowhere: what is behind them is missing.
func OfPath(reason Reason) bool {
	switch reason {
	case ReasonPodRouteMissing, ReasonForwardingOff, ReasonNoCarrier, ReasonConntrackFull:
		return true
	}
	return false
}

// OfNode reports whether a reason is a fault of the node itself, which keeps it from announcing.
func OfNode(reason Reason) bool {
	return reason == ReasonNetworkUnavailable || reason == ReasonNodeNotReady || OfPath(reason)
}

// Compare orders deliveries by VIP, then by Service.
func (d Delivery) Compare(other Delivery) int {
	return cmp.Or(d.VIP.Compare(other.VIP), d.Service.Compare(other.Service))
}

// Equal reports whether both say the same.
func (d Delivery) Equal(other Delivery) bool {
	a, b := d.Refusal, other.Refusal
	d.Refusal, other.Refusal = nil, nil
	return d == other && (a == nil) == (b == nil) && (a == nil || *a == *b)
}
