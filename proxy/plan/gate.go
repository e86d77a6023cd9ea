package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Times of readiness gates.
const (
	// GateSettle is how long a pod that no Service selects waits for one to name it: such a Service's
	// EndpointSlices have another writer.
	GateSettle = 2 * time.Second
	// GateHold is how long a pod counts as ready after its gate was opened, until the kubelet and the writer
	// of EndpointSlices have said so too, and GateHoldPassed how long after the kubelet has: a roll-out goes on by that,
	// and the writer may be late.
	GateHold, GateHoldPassed = 10 * time.Second, 5 * time.Minute
	// GateSpeaker is how long pods wait after a start of the proxy for a speaker to say what it announces: on
	// nodes without one they wait for nothing else.
	GateSpeaker = 10 * time.Second
)

// Unready returns a node's endpoints that are neither ready nor terminating, and that are pods; one may be
// there twice.
func Unready(all []lb.Slice, node string) []lb.Endpoint {
	var unready []lb.Endpoint
	for _, slice := range all {
		for _, ep := range slice.Endpoints {
			if ep.Node == node && !ep.Ready && !ep.Terminating && ep.Pod != "" {
				unready = append(unready, ep)
			}
		}
	}
	return unready
}

// Admit returns the slices with those of a node's endpoints ready that admitted names. Topology hints, if
// others have some, never keep them from their own node.
func Admit(all []lb.Slice, at lb.Place, admitted func(lb.Endpoint) bool) []lb.Slice {
	zones, nodes := hintsOf(all)
	all = slices.Clone(all)
	for i, slice := range all {
		var endpoints []lb.Endpoint
		for j, ep := range slice.Endpoints {
			if ep.Node != at.Node || ep.Ready || ep.Terminating || !admitted(ep) {
				continue
			}
			if endpoints == nil {
				endpoints = slices.Clone(slice.Endpoints)
			}
			ep.Ready, ep.Serving, ep.Pod, ep.ForNodes, ep.ForZones = true, true, "", nil, nil
			if nodes {
				ep.ForNodes = []string{at.Node}
			}
			if zones && at.Zone != "" {
				ep.ForZones = []string{at.Zone}
			}
			endpoints[j] = ep
		}
		if endpoints != nil {
			all[i].Endpoints = endpoints
		}
	}
	return all
}

// hintsOf reports whether ready endpoints have topology hints for zones, and for nodes.
func hintsOf(all []lb.Slice) (zones, nodes bool) {
	for _, slice := range all {
		for _, ep := range slice.Endpoints {
			zones, nodes = zones || ep.Ready && len(ep.ForZones) > 0, nodes || ep.Ready && len(ep.ForNodes) > 0
		}
	}
	return zones, nodes
}

// Gate is a pod that waits for its readiness gate, and nothing else.
type Gate struct {
	// Since is since when.
	Since time.Time
	// Services are those that select or name the pod. Before the time is over, one for which the pod waits stands
	// for all.
	Services map[lb.Key]Standing
}

// Standing is how far a Service is ready for a pod.
type Standing struct {
	// Programmed is set if the rules deliver to the pod.
	Programmed bool
	// VIP is an address of the Service that has to be announced before the pod counts as ready, and Unannounced why
	// it is not; "" if there is none.
	VIP         netip.Addr
	Unannounced lb.Reason
}

// Done reports whether the pod need not wait for the Service.
func (s Standing) Done() bool { return s.Programmed && s.Unannounced == "" }

// Awaited returns the first address of a Service that has to be announced before a pod of this node counts as ready,
// and why it is not. With policy Local this node has to announce it, or stand by for the node that does: only its own
// pods get what arrives here. With policy Cluster any node may, as each delivers to all pods; where none does, this
// one is the first that can. A pod does not wait for another Service on its address: with policy Local that one may
// keep this node from announcing for as long as it has no pod here.
func Awaited(s Service, unannounced func(netip.Addr) lb.Unannounced, concerned func(lb.Family) bool) (
	netip.Addr, lb.Reason) {
	for _, vip := range s.VIPs {
		why := unannounced(vip)
		waits := !why.Elsewhere
		if s.Policy == lb.Local {
			waits = why.Service == 0 || why.Service == s.Key.Sum()
		}
		if why.Reason != "" && waits && concerned(lb.FamilyOf(vip)) {
			return vip, why.Reason
		}
	}
	return netip.Addr{}, ""
}

// Opening says why a gate opens, as the pod's condition does.
type Opening struct {
	Reason  lb.Reason
	Message string
}

// Open decides whether the gate opens; if not, it returns nil, and when to ask again although nothing
// changes. A gate opens after timeout in any case.
func (g Gate) Open(node string, now time.Time, timeout time.Duration) (opening *Opening, again time.Duration) {
	var undelivered, unannounced []string
	for service, s := range g.Services {
		switch {
		case !s.Programmed:
			undelivered = append(undelivered, service.String())
		case !s.Done():
			unannounced = append(unannounced, fmt.Sprintf("%s for %s (%s)", s.VIP, service, s.Unannounced))
		}
	}
	waited := now.Sub(g.Since)
	switch {
	case len(g.Services) == 0 && waited >= GateSettle:
		return &Opening{lb.ReasonNoService, "no Service names the pod as an endpoint"}, 0
	case len(g.Services) == 0:
		return nil, GateSettle - waited
	case len(undelivered)+len(unannounced) == 0:
		return &Opening{lb.ReasonProgrammed, fmt.Sprintf("the rules of %s deliver to the pod", node)}, 0
	case waited < timeout:
		return nil, timeout - waited
	}
	var did []string
	if len(undelivered) > 0 {
		did = append(did, fmt.Sprintf("the rules of %s did not deliver to the pod for %s", node, some(undelivered)))
	}
	if len(unannounced) > 0 {
		did = append(did, fmt.Sprintf("%s did not announce %s", node, some(unannounced)))
	}
	return &Opening{lb.ReasonTimedOut, fmt.Sprintf("%s within %s", strings.Join(did, ", and "), timeout)}, 0
}

// some joins the first of some names, in their order.
func some(names []string) string {
	slices.Sort(names)
	const most = 3
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more Services", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}
