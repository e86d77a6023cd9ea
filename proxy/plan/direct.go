package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Tells reports whether the detector tells the connections of pods from others in a family.
func (d Detector) Tells(family lb.Family) bool {
	return d.Interface != "" || slices.ContainsFunc(d.Prefixes, func(p netip.Prefix) bool {
		return lb.FamilyOf(p.Addr()) == family
	})
}

// forwardDirectly plans direct forwarding, if the Service asks for it and the node can. All nodes have to
// choose the same backend for a connection, so the choice follows from the client's address.
func (s *Service) forwardDirectly(svc lb.Service, endpoints []lb.Slice, node Node) {
	if svc.Forwarding == "" || directRefusedBy(svc, node) != "" {
		return
	}
	// Also while endpoints refuse it, as those of a roll-out may for a moment: the same pod goes on with a flow of UDP.
	if s.Scheduler != SourceHash {
		s.Scheduler = Maglev
	}
	if directRefusedFor(endpoints) != "" {
		return
	}
	s.Direct, s.Handed, s.Senders = true, map[netip.Addr]netip.Addr{}, node.Senders
	for _, slice := range endpoints {
		for _, ep := range slice.Endpoints {
			if ep.Node == "" || ep.Node == node.Name {
				continue
			}
			if to, ok := addressIn(node.Neighbors[ep.Node], slice.Family); ok {
				s.Handed[ep.Addr] = to
			}
		}
	}
}

func addressIn(all []netip.Addr, family lb.Family) (netip.Addr, bool) {
	i := slices.IndexFunc(all, func(a netip.Addr) bool { return lb.FamilyOf(a) == family })
	if i < 0 {
		return netip.Addr{}, false
	}
	return all[i], true
}

// IsDirect reports whether connections from outside to a frontend of the Service reach endpoints with
// the client's address.
func (s Service) IsDirect(p Port, f Frontend) bool {
	return f.Action == ToCluster && s.mayBeDirect(p, f)
}

// mayBeDirect reports whether they do once an endpoint is usable.
func (s Service) mayBeDirect(p Port, f Frontend) bool {
	return s.Direct && f.Kind == LoadBalancer && p.External == lb.Cluster && handable(p.Protocol)
}

// DirectVIPs returns the addresses of these frontends, in order, also while no endpoint is usable: connections of
// before may go on.
func (s Service) DirectVIPs() (vips []netip.Addr) {
	for _, p := range s.Ports {
		for _, f := range p.Frontends {
			if s.mayBeDirect(p, f) {
				vips = append(vips, f.Addr)
			}
		}
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	return slices.Compact(vips)
}

func handable(p lb.Protocol) bool { return p == lb.TCP || p == lb.UDP }

func (s Service) sameDirect(other Service) bool {
	return s.Direct == other.Direct && maps.Equal(s.Handed, other.Handed) && slices.Equal(s.Senders, other.Senders)
}

// DirectRefused says why a node masquerades the connections to a Service that asks for direct
// forwarding, "" if it does not, or if the Service does not ask.
func DirectRefused(svc lb.Service, endpoints []lb.Slice, node Node) string {
	if svc.Forwarding == "" {
		return ""
	}
	return cmp.Or(directRefusedBy(svc, node), directRefusedFor(endpoints))
}

func refuseDirect(format string, args ...any) string {
	return fmt.Sprintf("annotation %s: %s; connections are masqueraded", lb.AnnotationForwarding,
		fmt.Sprintf(format, args...))
}

// directRefusedBy says why the Service or the node does not allow it, "" if both do.
func directRefusedBy(svc lb.Service, node Node) string {
	refuse := refuseDirect
	switch {
	case svc.Forwarding != lb.ForwardingDirect:
		return refuse("%.80q is not %s", svc.Forwarding, lb.ForwardingDirect)
	case svc.Type != lb.LoadBalancer:
		return refuse("only the addresses of Services of type LoadBalancer are forwarded directly")
	case svc.ExternalPolicy == lb.Local:
		return fmt.Sprintf("annotation %s: it does nothing with externalTrafficPolicy Local, which keeps client addresses",
			lb.AnnotationForwarding)
	case svc.AffinityTimeout > 0:
		return refuse("sessionAffinity ClientIP is remembered by one node alone; annotation %s: %s keeps a client at its "+
			"backend on all nodes", lb.AnnotationScheduler, SourceHash)
	case asksForRelay(svc.Relay):
		return refuse("annotation %s has connections end at the relay", lb.AnnotationRelay)
	case !slices.ContainsFunc(svc.Ports, func(p lb.ServicePort) bool { return handable(p.Protocol) }):
		return refuse("only TCP and UDP are forwarded directly, and the Service has no such port")
	case slices.ContainsFunc(svc.ClusterIPs, func(ip netip.Addr) bool { return !node.Direct[lb.FamilyOf(ip)] }):
		return refuse("this proxy cannot; it needs --direct-forwarding, nftables mode, a way to tell pods' connections in " +
			"the Service's families (such as --cluster-cidr), and --rescue with --rescue-ring")
	}
	return ""
}

// directRefusedFor says why these endpoints do not allow it, "" if they do.
func directRefusedFor(endpoints []lb.Slice) string {
	switch n := len(nodesOf(endpoints)); {
	case n > lb.MaxRing+1:
		return refuseDirect("endpoints are on %d nodes, and of more than %d a node cannot ask all for a connection that has "+
			"moved", n, lb.MaxRing+1)
	case hinted(endpoints):
		return refuseDirect("spec.trafficDistribution gives nodes different endpoints, and all have to choose among the same")
	}
	return ""
}

// NotHandedFromVRFs says that packets from VRFs are not handed over although the Service is forwarded
// directly, "" if the node has no VRF that a router is in.
func NotHandedFromVRFs(s Service, node Node) string {
	if !s.Direct || !node.VRFs {
		return ""
	}
	return fmt.Sprintf("annotation %s: connections that come in through a VRF are masqueraded, as another node would "+
		"answer outside of the VRF", lb.AnnotationForwarding)
}

// hinted reports whether hints give some nodes other endpoints of a port than others. As lb.Choose has it,
// that takes hints of one kind at every endpoint.
func hinted(endpoints []lb.Slice) bool {
	type hints struct{ zones, nodes bool } // at every ready endpoint
	of := map[portID]hints{}
	for _, slice := range endpoints {
		here, ready := hints{true, true}, false
		for _, ep := range slice.Endpoints {
			if ep.Ready {
				here.zones, here.nodes = here.zones && len(ep.ForZones) > 0, here.nodes && len(ep.ForNodes) > 0
				ready = true
			}
		}
		if !ready {
			continue
		}
		for _, p := range slice.Ports {
			at := portID{slice.Family, p.Name, p.Protocol}
			all, known := of[at]
			of[at] = hints{here.zones && (all.zones || !known), here.nodes && (all.nodes || !known)}
		}
	}
	for _, all := range of {
		if all.zones || all.nodes {
			return true
		}
	}
	return false
}

// nodesOf returns the names of the nodes with endpoints, ready or not.
func nodesOf(endpoints []lb.Slice) map[string]bool {
	nodes := map[string]bool{}
	for _, slice := range endpoints {
		for _, ep := range slice.Endpoints {
			if ep.Node != "" {
				nodes[ep.Node] = true
			}
		}
	}
	return nodes
}

// FarNode is a node behind a router, with the family of its address.
type FarNode struct {
	Name   string
	Family lb.Family
}

// Unhanded says why packets are not handed to a node behind a router.
type Unhanded int

// The reasons. Unasked: the node has not had the time to answer yet, which is no news. Diverted: the kernel has another
// way to its alias than the tunnel. SameAlias: another node has the same alias. TooMany: Share leaves it out. Unshared:
// it does not answer, as its Share leaves this node out.
const (
	Handed Unhanded = iota
	Unasked
	NoWay
	Silent
	Diverted
	SameAlias
	TooMany
	Unshared
)

// sentences end with the names of nodes.
var sentences = map[Unhanded]string{
	NoWay:    "no network of this node has an address of ",
	Silent:   "behind a router, and without an answer through the tunnel: ",
	Diverted: "this node has a routing rule ahead of the tunnel's, as some VPNs set, that takes elsewhere what is for ",
	SameAlias: "known in the tunnel by the same address as another node, as their addresses differ in the first byte " +
		"alone: ",
	TooMany: "behind routers, and beyond the addresses that this node exchanges packets with through the tunnel: ",
	Unshared: "behind routers, without an answer, and this node is beyond the addresses that they exchange packets with " +
		"through the tunnel: ",
}

// maxNamed is how many nodes a message names.
const maxNamed = 5

// NotHanded says to which nodes with endpoints packets are not handed over although the Service is
// forwarded directly, and why; "" if to all, or as long as a node has not had the time to answer.
func NotHanded(s Service, endpoints []lb.Slice, node Node) string {
	if !s.Direct {
		return ""
	}
	nodes := map[Unhanded]map[string]bool{}
	for _, slice := range endpoints {
		for _, ep := range slice.Endpoints {
			if _, handed := s.Handed[ep.Addr]; handed || !ep.Ready || ep.Node == node.Name {
				continue
			}
			why, far := node.Far[FarNode{ep.Node, slice.Family}]
			if !far {
				why = NoWay
			}
			if nodes[why] == nil {
				nodes[why] = map[string]bool{}
			}
			nodes[why][ep.Node] = true
		}
	}
	var why []string
	for _, reason := range slices.Sorted(maps.Keys(nodes)) {
		if sentence, said := sentences[reason]; said {
			why = append(why, sentence+someOf(nodes[reason]))
		}
	}
	if len(why) == 0 {
		return ""
	}
	return fmt.Sprintf("annotation %s: %s; connections to endpoints there are masqueraded", lb.AnnotationForwarding,
		strings.Join(why, "; "))
}

// someOf names some nodes, in order.
func someOf(nodes map[string]bool) string {
	names := slices.Sorted(maps.Keys(nodes))
	for i, name := range names {
		if name == "" {
			names[i] = "endpoints without a node"
		}
	}
	more := ""
	if n := len(names) - maxNamed; n > 0 {
		names, more = names[:maxNamed], fmt.Sprintf(" and %d more", n)
	}
	return strings.Join(names, ", ") + more
}

// DirectDraws says why connections are not spread as a Service asks for, as it is forwarded directly; ""
// if they are.
func DirectDraws(svc lb.Service, planned Service) string {
	asked, _ := ParseScheduler(svc.Scheduler)
	if !planned.Direct || asked == "" || asked == SourceHash || asked == Maglev {
		return ""
	}
	return fmt.Sprintf("annotation %s: direct forwarding needs %s or %s; nodes use %s", lb.AnnotationScheduler, Maglev,
		SourceHash, planned.Scheduler)
}

// Neighbors returns the addresses of the other nodes that are in a network of an interface of this one, which thus
// reaches them without a router, and far those that are not.
func Neighbors(self string, nodes map[string]lb.Node, networks []netip.Prefix) (
	neighbors, far map[string][]netip.Addr) {
	neighbors, far = map[string][]netip.Addr{}, map[string][]netip.Addr{}
	own := nodes[self].Addresses
	for name, n := range nodes {
		if name == self {
			continue
		}
		for _, addr := range n.Addresses {
			if slices.Contains(own, addr) { // of the Node that this machine had before
				continue
			}
			of := far
			if slices.ContainsFunc(networks, func(p netip.Prefix) bool { return !p.IsSingleIP() && p.Contains(addr) }) {
				of = neighbors
			}
			of[name] = append(of[name], addr)
		}
	}
	return neighbors, far
}

// Share returns with which far addresses, in order and at most so many, this node exchanges packets through the tunnel.
// Each family gets half, and what the other leaves.
func Share(far map[string][]netip.Addr, most int) []netip.Addr {
	all := slices.Concat(slices.Collect(maps.Values(far))...)
	slices.SortFunc(all, netip.Addr.Compare) // IPv4 comes first
	all = slices.Compact(all)
	of4 := slices.IndexFunc(all, netip.Addr.Is6)
	if of4 < 0 {
		of4 = len(all)
	}
	of6 := len(all) - of4
	first := min(of4, max(most/2, most-of6))
	return slices.Concat(all[:first], all[of4:of4+min(of6, most-first)])
}

// IsLeftOut reports whether the Share of a node with neighbors in these networks leaves this one out, of all addresses
// of nodes.
func IsLeftOut(self netip.Addr, networks []netip.Prefix, all []netip.Addr, most int) bool {
	before, of, others := 0, 0, 0 // addresses that are far from the node: up to this one, of its family, of the other
	for _, addr := range all {
		switch {
		case slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(addr) }):
		case lb.FamilyOf(addr) != lb.FamilyOf(self):
			others++
		case addr.Compare(self) <= 0:
			before++
			of++
		default:
			of++
		}
	}
	room := max(most/2, most-others)
	if self.Is6() {
		room = most - min(others, max(most/2, most-of))
	}
	return before > room
}

// Reached returns to which addresses packets for nodes are handed: those of the neighbors, and the alias of each far
// address of which why returns Handed. Nodes with the same alias get nothing. left says the same of the far nodes, by
// the first address of each family.
func Reached(neighbors, far map[string][]netip.Addr, why func(netip.Addr) Unhanded,
	alias func(netip.Addr) netip.Addr) (reached map[string][]netip.Addr, left map[FarNode]Unhanded) {
	count, counted := map[netip.Addr]int{}, map[netip.Addr]bool{}
	for _, addrs := range far {
		for _, addr := range addrs {
			if !counted[addr] { // a machine may have two Nodes for a while
				count[alias(addr)]++
			}
			counted[addr] = true
		}
	}
	reached, left = maps.Clone(neighbors), map[FarNode]Unhanded{}
	for name, addrs := range far {
		for _, addr := range addrs {
			reason := why(addr)
			if count[alias(addr)] > 1 {
				reason = SameAlias
			}
			if reason == Handed {
				reached[name] = append(slices.Clip(reached[name]), alias(addr))
			}
			at := FarNode{name, lb.FamilyOf(addr)}
			if _, said := left[at]; !said {
				left[at] = reason
			}
		}
	}
	return reached, left
}
