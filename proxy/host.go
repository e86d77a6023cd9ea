package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// forwardingParameters let the kernel forward packets, below /proc/sys/net.
var forwardingParameters = map[lb.Family]string{lb.IPv4: "ipv4/ip_forward", lb.IPv6: "ipv6/conf/all/forwarding"}

// host looks at what decides on this node, beside the rules, whether connections arrive.
type host struct {
	proxy      *proxy
	parameters kernelParameters
	// podNetworks are what tells pods from others; none with other ways than by network.
	podNetworks []netip.Prefix
	nodeCIDR    bool // pods are told from others by the Node's own pod networks
	// acceptForwarded has connections of Services accepted where another program drops them.
	acceptForwarded bool
	log             *slog.Logger
	chains          func(context.Context) ([]plan.ForwardChain, error)
	// inputs lists those that see what is for the node itself.
	inputs func() ([]plan.ForwardChain, error)
	// routes returns which routes the kernel takes to some addresses.
	routes func([]netip.Addr) (map[netip.Addr]lb.RouteKind, error)
	// strict says by which rp_filter the kernel drops packets that other nodes move here; "" if it does
	// not.
	strict func() string
	// noTunnel says why connections are not passed on to nodes behind routers.
	noTunnel func() string
	// accept writes to a chain, and reports whether it had to.
	accept func(context.Context, plan.ForwardChain, plan.Acceptance) (changed bool, err error)
	// reusePorts has the kernel reuse source ports of connections that have ended, or sets that back.
	reusePorts func(bool)
	failures   loop.Failures
	routing    loop.Failures
	// relayAway is set if no relay was connected at the last look: one that restarts is away for a moment.
	relayAway bool
	// relayPorts are those that the last relay accepted at.
	relayPorts map[lb.Family]uint16
	last       plan.Host // what was known at the last look; belongs to the actor that looks
}

// look returns what keeps this node from delivering; it knows nothing before the proxy has all that
// it needs.
func (h *host) look(ctx context.Context) (found []lb.Finding, known bool) {
	from := h.proxy.from
	node, ok := from.nodes.Get(h.proxy.self)
	interfaces, listed := from.interfaces()
	if !ok || !listed || !from.slices.Synced() {
		return nil, false
	}
	facts := plan.Host{
		Node: node.Name, PodNetworks: h.podNetworks, NodeCIDR: h.nodeCIDR, PodCIDRs: node.PodCIDRs,
		AcceptForwarded: h.acceptForwarded, NotForwarding: map[lb.Family]string{},
		Pods:  podsOf(node, localAddresses(interfaces), from.slices.All()),
		Nodes: addressesOf(from.nodes.All(), node.Name),
	}
	for family, parameter := range forwardingParameters {
		switch text, err := os.ReadFile(filepath.Join(h.parameters.folder, parameter)); {
		case err != nil && !errors.Is(err, fs.ErrNotExist) && h.last.NotForwarding[family] != "":
			facts.NotForwarding[family] = h.last.NotForwarding[family]
		case err == nil && strings.TrimSpace(string(text)) == "0" && !forwardsBy(interfaces, node.Addresses, family):
			facts.NotForwarding[family] = "net." + strings.ReplaceAll(parameter, "/", ".")
		}
	}
	settings := h.proxy.settings
	networks := serviceNetworks(from.networks.All(), settings.serviceNetworks)
	_, facts.Shared = plan.OnlyServices(networks, from.nodes.All(), settings.pods.Prefixes)
	facts.Routes = h.podRoutes(node, interfaces, from.nodes.All(), from.slices.All())
	facts.Strict, facts.NoTunnel, facts.NotOffloaded = h.strict(), h.noTunnel(), settings.notOffloaded
	facts.Connections, facts.Most = h.parameters.number(parameterCount), h.parameters.number(parameterMax)
	h.forwarding(ctx, &facts)
	h.relaying(&facts)
	h.last = facts
	return plan.Findings(facts), true
}

// forwardsBy reports whether the kernel forwards packets of a family although its parameter for all is 0: what comes in
// at the interfaces with the Node's addresses, each of which has a parameter of its own.
func forwardsBy(interfaces []lb.Interface, addrs []netip.Addr, family lb.Family) (all bool) {
	for _, i := range interfaces {
		has := slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool {
			return lb.FamilyOf(p.Addr()) == family && slices.Contains(addrs, p.Addr())
		})
		switch {
		case !has || i.Loopback || i.Dummy:
		case !i.Forwards(family):
			return false
		default:
			all = true
		}
	}
	return all
}

// maxPodRoutes bounds how many routes are looked up at a time: of 1,000 nodes in both families.
const maxPodRoutes = 2000 * podsOfNode

// podsOfNode are of how many namespaces a pod on each node is looked at, in each family: what the EndpointSlices of one
// say is not taken for the truth about a node.
const podsOfNode = 3

// podRoutes looks up the routes to some pods on each other node, in each family. Pods that use the
// network of their node need none.
func (h *host) podRoutes(node lb.Node, interfaces []lb.Interface, nodes map[string]lb.Node,
	endpoints map[lb.Key][]lb.Slice) []plan.PodRoute {
	routes := otherPods(node, interfaces, nodes, endpoints)
	routes = routes[:min(len(routes), maxPodRoutes)]
	pods := make([]netip.Addr, len(routes))
	for i, r := range routes {
		pods[i] = r.Pod
	}
	kinds, err := h.routes(pods)
	h.routing.Log(h.log, "cannot look up the routes to pods", "looked up the routes to pods", err)
	if err != nil {
		return h.last.Routes // unknown is not absent
	}
	for i := range routes {
		routes[i].Kind = kinds[routes[i].Pod]
	}
	return routes
}

// otherPods returns pods on each other node, in each family: the first of each of the first namespaces that have any
// there. They are sorted.
func otherPods(node lb.Node, interfaces []lb.Interface, nodes map[string]lb.Node,
	all map[lb.Key][]lb.Slice) []plan.PodRoute {
	near := func(n lb.Node) bool {
		return slices.ContainsFunc(interfaces, func(i lb.Interface) bool {
			return !i.Loopback && slices.ContainsFunc(n.Addresses, func(addr netip.Addr) bool {
				_, is := i.Subnet(addr)
				return is
			})
		})
	}
	hosts := map[netip.Addr]bool{}
	for _, n := range nodes {
		for _, addr := range n.Addresses {
			hosts[addr] = true
		}
	}
	type at struct {
		node   string
		family lb.Family
	}
	first := map[at][]podOf{} // sorted by namespace
	for key, of := range all {
		for _, slice := range of {
			for _, e := range slice.Endpoints {
				if _, known := nodes[e.Node]; known && e.Node != node.Name && !hosts[e.Addr] {
					place := at{e.Node, lb.FamilyOf(e.Addr)}
					first[place] = withPod(first[place], podOf{key.Namespace, e.Addr})
				}
			}
		}
	}
	routes := make([]plan.PodRoute, 0, len(first))
	for place, pods := range first {
		for _, pod := range pods {
			routes = append(routes, plan.PodRoute{Node: place.node, Pod: pod.addr, Near: near(nodes[place.node])})
		}
	}
	slices.SortFunc(routes, func(a, b plan.PodRoute) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), a.Pod.Compare(b.Pod))
	})
	return slices.Compact(routes)
}

// podOf is a pod of a namespace.
type podOf struct {
	namespace string
	addr      netip.Addr
}

// withPod adds a pod to the first ones of the first namespaces, which are sorted and at most podsOfNode.
func withPod(first []podOf, pod podOf) []podOf {
	i, had := slices.BinarySearchFunc(first, pod.namespace, func(p podOf, namespace string) int {
		return strings.Compare(p.namespace, namespace)
	})
	switch {
	case had && pod.addr.Less(first[i].addr):
		first[i] = pod
	case !had && i < podsOfNode:
		first = slices.Insert(first, i, pod)
	}
	return first[:min(len(first), podsOfNode)]
}

// forwarding looks at the chains of other programs, and has them accept what they should, before
// anybody is told that they drop it. What a rule does is read from the kernel after it was written.
func (h *host) forwarding(ctx context.Context, facts *plan.Host) {
	list := func() bool {
		chains, err := h.chains(ctx)
		if !errors.Is(ctx.Err(), context.Canceled) { // the program ends
			h.failures.Log(h.log, "cannot list the chains of other programs", "listed the chains of other programs", err)
		}
		if err != nil {
			facts.Chains, facts.AcceptFailed = h.last.Chains, h.last.AcceptFailed // unknown is not absent
			return false
		}
		slices.SortStableFunc(chains, func(a, b plan.ForwardChain) int { return cmp.Compare(a.String(), b.String()) })
		facts.Chains = chains
		return true
	}
	if !list() {
		return
	}
	facts.AcceptFailed = map[string]string{}
	written := false
	for i, want := range plan.Acceptances(*facts) {
		c := facts.Chains[i]
		if !c.Filter() {
			continue
		}
		changed, err := h.accept(ctx, c, want)
		written = written || changed
		if err != nil {
			facts.AcceptFailed[c.String()] = err.Error()
		} else if changed {
			h.log.Info("changed what Landfall accepts in a chain of another program", "chain", c.String(), "podNetworks",
				want.Networks, "nodes", len(want.Nodes))
		}
	}
	if written {
		list()
	}
}

// relaying looks at the relay, and has the rules not lead there where another program drops that.
func (h *host) relaying(facts *plan.Host) {
	if h.proxy.to.relay == nil {
		h.reusePorts(false) // which a predecessor with a relay may have set
		return
	}
	st := h.proxy.to.relay.State()
	if known := h.proxy.ready() == nil; known || st.Services > 0 {
		h.reusePorts(st.Services > 0)
	}
	if len(st.Ports) > 0 {
		h.relayPorts = st.Ports // one that is away comes back to them: what drops them is dropping still
	}
	facts.Relay = &plan.HostRelay{Services: st.Services, UDP: st.UDP, Families: st.Families, Connections: st.Connections,
		Connected: st.Connected || !h.relayAway, Full: st.Full, Ports: h.relayPorts,
		NoPort: st.NoPort, NoUDP: st.NoUDP, Behind: st.Behind, Unled: st.Unled, OtherRelease: st.OtherRelease}
	h.relayAway = !st.Connected
	var err error
	if facts.Inputs, err = h.inputs(); err != nil {
		h.log.Warn("cannot list the chains that see what is for the node; trying again", "error", err)
		facts.Inputs = h.last.Inputs // unknown is not absent
	}
	dropped := map[plan.RelayWay]bool{}
	for _, way := range plan.RelayWays {
		if _, drops := facts.RelayDropped(way); drops {
			dropped[way] = true
		}
	}
	h.proxy.to.relay.SetBlocked(dropped)
}

// inputChains lists the chains of all programs but iptables-legacy that see what is for the node itself.
func inputChains() (chains []plan.ForwardChain, err error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	err = nfnetlink.Complete(func() (err error) {
		chains, err = nft.InputChains(conn)
		return err
	})
	return chains, err
}

// addressesOf returns the addresses of all Nodes but one, sorted.
func addressesOf(nodes map[string]lb.Node, but string) (addrs []netip.Addr) {
	for name, n := range nodes {
		if name != but {
			addrs = slices.Concat(addrs, n.Addresses, n.ExternalAddresses)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}

// podsOf returns the endpoints on a node that have addresses of their own.
func podsOf(node lb.Node, own []netip.Addr, all map[lb.Key][]lb.Slice) []netip.Addr {
	hosts := map[netip.Addr]bool{}
	for _, addr := range slices.Concat(node.Addresses, own) {
		hosts[addr] = true
	}
	pods := map[netip.Addr]bool{}
	for _, of := range all {
		for _, slice := range of {
			for _, e := range slice.Endpoints {
				if e.Node == node.Name && !hosts[e.Addr] {
					pods[e.Addr] = true
				}
			}
		}
	}
	addrs := make([]netip.Addr, 0, len(pods))
	for addr := range pods {
		addrs = append(addrs, addr)
	}
	return addrs
}

// forwardChains lists the chains of all programs that see forwarded packets.
func forwardChains(ctx context.Context) ([]plan.ForwardChain, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	var chains []plan.ForwardChain
	err = nfnetlink.Complete(func() (err error) {
		chains, err = nft.ForwardChains(conn)
		return err
	})
	if err != nil {
		return nil, err
	}
	legacy, err := iptables.LegacyForward(ctx)
	return append(chains, legacy...), err
}
