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
}

// Usable says which endpoints of one Service port a node may use. It is the one decision that the proxy forwards by,
// the health port answers by and the speaker claims by.
type Usable struct {
	// Cluster is the set for policy Cluster: the ready endpoints anywhere, or, when there is none, those that still
	// serve while they terminate (KEP-1669). Sorted by address.
	Cluster []Backend
	// Local is the same choice among the endpoints of this node, for policy Local.
	Local []Backend
}

// Choose decides which of the slices' endpoints are usable on node for the port called name, in one address family.
func Choose(all []Slice, name string, protocol Protocol, family Family, node string) Usable {
	var ready, serving []Backend
	for _, slice := range all {
		if slice.Family != family {
			continue
		}
		for _, port := range slice.Ports {
			if port.Name != name || port.Protocol != protocol {
				continue
			}
			for _, ep := range slice.Endpoints {
				b := Backend{Addr: netip.AddrPortFrom(ep.Addr, port.Port), Local: ep.Node != "" && ep.Node == node, Ready: ep.Ready}
				switch {
				case ep.Ready:
					ready = append(ready, b)
				case ep.Serving && ep.Terminating:
					serving = append(serving, b)
				}
			}
		}
	}
	ready, serving = distinct(ready), distinct(serving)
	return Usable{
		Cluster: firstNonEmpty(ready, serving),
		Local:   firstNonEmpty(onlyLocal(ready), onlyLocal(serving)),
	}
}

// For returns the set that policy allows.
func (u Usable) For(policy TrafficPolicy) []Backend {
	if policy == Local {
		return u.Local
	}
	return u.Cluster
}

// distinct sorts by address and drops repetitions: an endpoint may stand in two slices for a while.
func distinct(backends []Backend) []Backend {
	slices.SortFunc(backends, func(a, b Backend) int { return a.Addr.Compare(b.Addr) })
	return slices.CompactFunc(backends, func(a, b Backend) bool { return a.Addr == b.Addr })
}

func onlyLocal(backends []Backend) []Backend {
	var local []Backend
	for _, b := range backends {
		if b.Local {
			local = append(local, b)
		}
	}
	return local
}

func firstNonEmpty(a, b []Backend) []Backend {
	if len(a) > 0 {
		return a
	}
	return b
}

// Delivery is what a node's proxy says of one Service and one of its VIPs: what the kernel is known to deliver.
// Its JSON form is the feed between proxy and speaker.
type Delivery struct {
	Service Key           `json:"service"`
	VIP     netip.Addr    `json:"vip"`
	Policy  TrafficPolicy `json:"policy"`
	// Refusal says why not every frontend of the VIP is programmed; nil when all are.
	Refusal *Refusal `json:"refusal,omitempty"`
	// LocalReady and LocalServing count endpoints of this node that the rules in the kernel deliver to: ready ones, and
	// terminating ones that still serve.
	LocalReady   int `json:"localReady"`
	LocalServing int `json:"localServing"`
	// Ready and Serving count the same over all nodes.
	Ready   int `json:"ready"`
	Serving int `json:"serving"`
}

// Deliverable tells why the VIP cannot be delivered from this node, or "" when it can. With policy Local a terminating
// endpoint counts only when no node has a ready one.
func (d Delivery) Deliverable() Reason {
	switch {
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

// Compare orders deliveries by VIP, then by Service.
func (d Delivery) Compare(other Delivery) int {
	return cmp.Or(d.VIP.Compare(other.VIP), d.Service.Compare(other.Service))
}
