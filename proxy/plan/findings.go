package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Host is what a proxy sees of its node that decides whether the rules deliver.
type Host struct {
	Node string
	// NotForwarding are the kernel parameters by which the kernel forwards no packets.
	NotForwarding map[lb.Family]string
	Chains        []ForwardChain
	// AcceptForwarded has Landfall accept connections of Services in chains that would drop them.
	AcceptForwarded bool
	// AcceptFailed says for chains, by their String, why Landfall cannot accept there.
	AcceptFailed map[string]string
	// Nodes are the addresses of all Nodes.
	Nodes []netip.Addr
	// PodNetworks are the configured ones; none if pods are told from others in another way.
	PodNetworks []netip.Prefix
	// NodeCIDR is set where PodCIDRs tell pods from others, and not PodNetworks.
	NodeCIDR bool
	// Pods are the endpoints on this node without those that use the node's network, PodCIDRs those of
	// the Node.
	Pods     []netip.Addr
	PodCIDRs []netip.Prefix
	// Shared are the networks of cluster IPs that nodes or pods are in too.
	Shared []SharedNetwork
	// Routes are those to pods on other nodes, one of each node and family.
	Routes []PodRoute
	// Strict says by which rp_filter the kernel drops packets that other nodes move here; "" if it does
	// not.
	Strict string
	// NoTunnel says why connections are not passed on to nodes behind routers; "" if they are, or need
	// not be.
	NoTunnel string
	// NotOffloaded says why established flows are not offloaded, in families in which they shall be.
	NotOffloaded map[lb.Family]string
	// Relay is what is so of the node's relay, nil without one; Inputs are the chains that see what is for
	// the node itself, as connections to it are.
	Relay  *HostRelay
	Inputs []ForwardChain
	// Connections are in the kernel's table of connections, which has room for Most; 0 if unknown.
	Connections, Most int
}

// HostRelay is what is so of a node's relay.
type HostRelay struct {
	// Services are relayed, UDP of them with a port of UDP, Families of them in each family, and Connections open.
	Services, UDP, Connections int
	Families                   map[lb.Family]int
	// Connected is set while it is there and knows all Services, Full while it has as many connections as
	// it may.
	Connected, Full bool
	// OtherRelease is set while one of another release than the proxy is there.
	OtherRelease bool
	// Behind is set while it takes in new flows of UDP too slowly.
	Behind bool
	// Ports are those where it accepts connections. NoPort says why it has none of a family, and NoUDP why it receives
	// no UDP at one of them.
	Ports         map[lb.Family]uint16
	NoPort, NoUDP map[lb.Family]string
	// Unled says why the proxy cannot have the rules lead to it, where it cannot.
	Unled string
}

// PodRoute is where the kernel sends packets to a pod on another node.
type PodRoute struct {
	Node string
	Pod  netip.Addr
	// Near is set if the node is in a subnet of this one, so that nothing between them has to know where
	// its pods are.
	Near bool
	Kind lb.RouteKind
}

// Findings says what keeps the node from delivering what its rules say.
func Findings(h Host) []lb.Finding {
	return slices.Concat(h.full(), h.forwarding(), h.dropped(), h.unrouted(), h.strict(), h.untunneled(),
		h.unmatched(), h.shared(), h.unrelayed(), h.unoffloaded())
}

// unoffloaded finds why established flows go through the rules that shall be offloaded.
func (h Host) unoffloaded() (found []lb.Finding) {
	for _, family := range slices.Sorted(maps.Keys(h.NotOffloaded)) {
		found = append(found, lb.Find(lb.ReasonOffloadUnavailable, "%s does not offload established flows of %s, which go "+
			"through its rules instead: %s", h.Node, family, h.NotOffloaded[family]).About(string(family)))
	}
	return found
}

// unrelayed finds why connections to Services that ask for the relay go straight to endpoints.
func (h Host) unrelayed() (found []lb.Finding) {
	const instead = "connections to %d Services go straight to endpoints"
	if h.Relay == nil || h.Relay.Services == 0 {
		return nil
	}
	switch r := h.Relay; {
	case r.OtherRelease:
		found = append(found, lb.Find(lb.ReasonRelayAway, "the relay of %s is of another release than the proxy: "+instead,
			h.Node, r.Services))
	case !r.Connected:
		found = append(found, lb.Find(lb.ReasonRelayAway, "the relay of %s is not there, or not ready: "+instead, h.Node,
			r.Services))
	case r.Full:
		found = append(found, lb.Find(lb.ReasonRelayFull, "the relay of %s has as many connections as it may (%d open), "+
			"or too little time or memory for more: new "+instead, h.Node, r.Connections, r.Services))
	}
	if h.Relay.Unled != "" {
		found = append(found, lb.Find(lb.ReasonRelayLeaseFailed, "the proxy of %s cannot write the lease that has its rules "+
			"lead to the relay (%s): "+instead, h.Node, h.Relay.Unled, h.Relay.Services))
	}
	if h.Relay.Behind && h.Relay.UDP > 0 {
		found = append(found, lb.Find(lb.ReasonRelayFull, "the relay of %s takes in new flows of UDP more slowly than they "+
			"come: those to %d Services go straight to endpoints for a while", h.Node, h.Relay.UDP).About(string(lb.UDP)))
	}
	for _, family := range slices.Sorted(maps.Keys(h.Relay.NoPort)) {
		if n := h.Relay.Families[family]; n > 0 {
			found = append(found, lb.Find(lb.ReasonRelayWithoutPort, "the relay of %s cannot open its port for %s: %s; %s "+
				"connections to %d Services go straight to endpoints", h.Node, family, h.Relay.NoPort[family], family,
				n).About(string(family)))
		}
	}
	for _, family := range slices.Sorted(maps.Keys(h.Relay.NoUDP)) {
		if h.Relay.UDP > 0 {
			found = append(found, lb.Find(lb.ReasonRelayWithoutUDP, "the relay of %s receives no UDP at port %d (%s): %s; UDP "+
				"to %d Services goes straight to endpoints", h.Node, h.Relay.Ports[family], family, h.Relay.NoUDP[family],
				h.Relay.UDP).About(string(family)))
		}
	}
	for _, way := range RelayWays {
		c, drops := h.RelayDropped(way)
		if !drops || way.Protocol == lb.UDP && h.Relay.UDP == 0 {
			continue
		}
		found = append(found, lb.Find(lb.ReasonRelayDropped, "on %s the chain %s drops what comes to %s port %d, where its "+
			"relay accepts it: %s connections go straight to endpoints; accept that port there", h.Node, c, way.Protocol,
			h.Relay.Ports[way.Family], way.Family).About(string(way.Family)+" "+string(way.Protocol)))
	}
	return found
}

// RelayDropped returns a chain that certainly drops what the rules lead to the relay.
func (h Host) RelayDropped(way RelayWay) (by ForwardChain, drops bool) {
	if h.Relay == nil || h.Relay.Ports[way.Family] == 0 {
		return by, false
	}
	i := slices.IndexFunc(h.Inputs, func(c ForwardChain) bool {
		return (c.Family == "inet" || c.family() == way.Family) && c.DropsTo(way.Protocol, h.Relay.Ports[way.Family])
	})
	if i < 0 {
		return by, false
	}
	return h.Inputs[i], true
}

// full finds a table of connections that has no room, or will have none soon.
func (h Host) full() []lb.Finding {
	if h.Most == 0 || h.Connections < h.Most/100*95 {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonConntrackFull,
		"the table of connections of %s is full, so its kernel drops new ones: it has %d of at most %d "+
			"(net.netfilter.nf_conntrack_max); raise that, or find who opens them: conntrack -L", h.Node, h.Connections,
		h.Most)}
}

// strict finds a kernel that drops what other nodes move here.
func (h Host) strict() []lb.Finding {
	if h.Strict == "" {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonStrictReversePath, "on %s %s", h.Node, h.Strict)}
}

// untunneled finds that no tunnel leads to the nodes behind routers.
func (h Host) untunneled() []lb.Finding {
	if h.NoTunnel == "" {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonTunnelUnavailable,
		"%s cannot pass on connections to nodes behind routers: %s", h.Node, h.NoTunnel)}
}

// unrouted finds nodes to whose pods the kernel has no route, or one that is certainly wrong: that
// to everywhere, while there are routes to the pods of other nodes as near. The pods of a node have to agree: anybody
// may say in an EndpointSlice that an address of his choice is one of them.
func (h Host) unrouted() (found []lb.Finding) {
	type place struct {
		node   string
		family lb.Family
	}
	at := func(r PodRoute) place { return place{r.Node, lb.FamilyOf(r.Pod)} }
	otherWay, reached := map[place]bool{}, map[place]bool{}
	for _, r := range h.Routes {
		otherWay[at(r)] = otherWay[at(r)] || !r.Near || r.Kind != lb.RouteOwn
	}
	own := map[lb.Family]string{}
	for _, r := range h.Routes {
		if family := lb.FamilyOf(r.Pod); !otherWay[at(r)] && own[family] == "" {
			own[family] = r.Node
		}
	}
	for _, r := range h.Routes {
		lost := r.Kind == lb.RouteNone || r.Kind == lb.RouteDefault && r.Near && own[lb.FamilyOf(r.Pod)] != ""
		reached[at(r)] = reached[at(r)] || !lost
	}
	var nodes []string
	var first PodRoute
	for _, r := range h.Routes {
		if reached[at(r)] {
			continue
		}
		if !slices.Contains(nodes, r.Node) {
			nodes = append(nodes, r.Node)
		}
		if !first.Pod.IsValid() {
			first = r
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	why := "the kernel finds none"
	if first.Kind == lb.RouteDefault {
		why = "it takes the default route, unlike to those on " + own[lb.FamilyOf(first.Pod)]
	}
	which := first.Node
	if more := len(nodes) - 1; more > 0 {
		which += fmt.Sprintf(" and %d more", more)
	}
	return []lb.Finding{lb.Find(lb.ReasonPodRouteMissing,
		"%s has no route to the pods on %s, such as %s (%s), so connections that it sends there are lost: see what the "+
			"network plugin (CNI) says on %s", h.Node, which, first.Pod, why, h.Node)}
}

// forwarding looks at the families that pods of the node have.
func (h Host) forwarding() (found []lb.Finding) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if parameter := h.NotForwarding[family]; parameter != "" && h.has(family) {
			found = append(found, lb.Find(lb.ReasonForwardingOff,
				"%s has %s=0, so its kernel forwards no %s packet to a pod: set it to 1 in /etc/sysctl.d", h.Node, parameter,
				family).About(string(family)))
		}
	}
	return found
}

// has reports whether pods of the node have addresses of a family.
func (h Host) has(family lb.Family) bool {
	return slices.ContainsFunc(h.Pods, func(addr netip.Addr) bool { return lb.FamilyOf(addr) == family }) ||
		slices.ContainsFunc(h.PodCIDRs, func(p netip.Prefix) bool { return lb.FamilyOf(p.Addr()) == family })
}

// dropped looks for chains that certainly drop new connections of pods. What is not certain is no
// finding.
func (h Host) dropped() (found []lb.Finding) {
	for _, c := range h.Chains {
		if !h.passes(c) {
			continue
		}
		if c.Table == "firewalld" {
			f := lb.Find(lb.ReasonForwardDropped, "firewalld runs on %s (chain %s) and rejects what its zones do not forward: "+
				"put the pod network, and the interfaces of pods, into a zone that forwards, such as trusted", h.Node,
				c).About(c.String())
			f.Note = true
			found = append(found, f)
			continue
		}
		drops, accepted := c.Dropping()
		if cured := accepted && h.AcceptForwarded && c.Filter(); drops && !cured {
			found = append(found, lb.Find(lb.ReasonForwardDropped,
				"on %s the chain %s drops new connections of pods, as Docker and ufw have it: its policy or last rule drops what "+
					"no rule before it accepts; accept the pod network there, or set its policy to accept%s", h.Node, c,
				h.cure(c)).About(c.String()))
		}
	}
	return slices.CompactFunc(found, func(a, b lb.Finding) bool { return a == b })
}

// cure says what Landfall can do about a chain that drops, or why it has not done it.
func (h Host) cure(c ForwardChain) string {
	failed := h.AcceptFailed[c.String()]
	switch {
	case !c.Filter():
		return "; no rule of Landfall can accept what this table drops, as only iptables' chain FORWARD takes one"
	case !h.AcceptForwarded:
		return ", or set --accept-forwarded (chart: proxy.acceptForwarded=true)"
	case failed != "":
		return "; --accept-forwarded does not help: " + failed
	}
	return "; --accept-forwarded does not help: a rule that takes all packets stands before Landfall's"
}

// passes reports whether packets of pods pass a chain.
func (h Host) passes(c ForwardChain) bool {
	return c.Family != "ip6" && h.has(lb.IPv4) || c.Family != "ip" && h.has(lb.IPv6)
}

// shared finds networks of cluster IPs in which the rules refuse nothing.
func (h Host) shared() (found []lb.Finding) {
	for _, s := range h.Shared {
		found = append(found, lb.Find(lb.ReasonServiceNetworkShared, "%s lies in %s, a network of cluster IPs: %s refuses "+
			"no connections to unused cluster IPs there; give Services a network of their own, or correct proxy.serviceCIDR",
			s.What, s.Network, h.Node).About(s.Network.String()))
	}
	return found
}

// unmatched looks for a pod network that has no pod of the node.
func (h Host) unmatched() (found []lb.Finding) {
	all, from, cure := h.PodNetworks, "clusterCIDR", "set proxy.clusterCIDR to the network of the pods"
	if h.NodeCIDR {
		all, from = h.PodCIDRs, "spec.podCIDRs of the Node"
		cure = "set proxy.detectLocalMode to ClusterCIDR, and proxy.clusterCIDR to the network of the pods"
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		var networks, seen []string
		matched := false
		within := func(addr netip.Addr) bool {
			return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(addr) })
		}
		for _, p := range all {
			if lb.FamilyOf(p.Addr()) == family {
				networks = append(networks, p.String())
			}
		}
		for _, addr := range h.Pods {
			if lb.FamilyOf(addr) == family {
				matched = matched || within(addr)
				seen = append(seen, addr.String())
			}
		}
		if len(networks) > 0 && len(seen) > 0 && !matched {
			found = append(found, lb.Find(lb.ReasonPodNetworkUnmatched,
				"no pod on %s is in the pod network %s (%s), but %s is one: connections of pods to cluster IPs are "+
					"masqueraded, and pods see the node's address; %s", h.Node, strings.Join(networks, ","), from,
				slices.Min(seen), cure).About(string(family)))
		}
	}
	return found
}
