package lab

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Names of the hosts that are neither nodes nor pods.
const (
	RouterName    = "router"
	ClientName    = "client"
	FarClientName = "far-client"
	switchName    = "switch"
)

// PodBridge is the name of the bridge that a node's pods are plugged into.
const PodBridge = "cni0"

// hostPlan is what makes one host: iproute2 commands to run in its network namespace, then its
// cables, then addresses and routes.
type hostPlan struct {
	Name    string
	Bridges []string
	Cables  []cable
	// Config holds iproute2 commands.
	Config []string
	// FDB holds commands of bridge(8), and Rules what iptables-restore and ip6tables-restore read.
	FDB, Rules []string
	// Sysctls are below /proc/sys/net; a key that ends in ? may be missing.
	Sysctls map[string]string
}

// cable connects an interface of a host to another host: to a port of a bridge there, or to an
// interface by itself.
type cable struct {
	Iface      string
	To, Bridge string
	// Port names the far end; empty for a name of the host's and its interface's.
	Port string
	MTU  int // 0 for the kernel's default
	// There holds iproute2 commands to run at the far end, ThereSysctls what to set there.
	There        []string
	ThereSysctls map[string]string
	// Hairpin lets the port send back what it received, so that a pod reaches itself through a
	// Service.
	Hairpin bool
}

// planLAN returns the hosts that are no nodes: the switch with a bridge for each segment, the
// routers and the two clients.
func planLAN(c Cluster) []hostPlan {
	if c.Racks > 0 {
		return planRacks(c)
	}
	plans := []hostPlan{{
		Name:    switchName,
		Bridges: []string{"lan", "far"},
		// A switch does not filter what passes through it, and has no address.
		Sysctls: map[string]string{"bridge/bridge-nf-call-iptables?": "0", "bridge/bridge-nf-call-ip6tables?": "0",
			"ipv6/conf/all/disable_ipv6?": "1"},
	}}
	far := c.gateways(c.Far)
	for i, addr := range c.gateways(c.LAN) {
		name := RouterName
		if c.ToR.Count > 0 {
			name = torName(i)
		}
		plans = append(plans, hostPlan{
			Name:   name,
			Cables: []cable{{Iface: torLAN, To: switchName, Bridge: "lan"}, {Iface: torFar, To: switchName, Bridge: "far"}},
			Config: slices.Concat(c.addrAdd(addr, c.LAN.Prefix, torLAN), c.addrAdd(far[i], c.Far.Prefix, torFar),
				c.planLoopback()),
			Sysctls: sysctls(map[string]string{"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding?": "1",
				// A client that was redirected goes on to the same node when that delivers no more. The kernel needs both
				// parameters: an interface starts with the second.
				"ipv4/conf/all/send_redirects": "0", "ipv4/conf/default/send_redirects": "0"}),
		})
	}
	return append(plans, c.planClient(ClientName, c.LAN, "lan"), c.planClient(FarClientName, c.Far, "far"))
}

func (c Cluster) planClient(name string, segment Network, bridge string) hostPlan {
	return hostPlan{
		Name:   name,
		Cables: []cable{{Iface: "eth0", To: switchName, Bridge: bridge}},
		Config: append(c.addrAdd(segment.Client, segment.Prefix, "eth0"), c.defaultRoutes(c.gateways(segment))...),
		// A client that opens a connection every few milliseconds must not run out of ports.
		Sysctls: sysctls(map[string]string{"ipv4/tcp_tw_reuse": "1", "ipv4/ip_local_port_range": "1024 65535"}),
	}
}

// planNode returns what makes a node: the LAN interface, the bridge for pods, and routes to the
// other nodes' pods.
func planNode(c Cluster, n Node) hostPlan {
	network, bridge := c.nodeNetwork(n)
	h := hostPlan{
		Name:   n.Name,
		Cables: []cable{{Iface: "eth0", To: switchName, Bridge: bridge}},
		Config: append(c.addrAdd(n.Addr, network.Prefix, "eth0"), c.planSpeaker(n)...),
		Sysctls: sysctls(map[string]string{
			"ipv4/ip_forward":              "1",
			"ipv6/conf/all/forwarding?":    "1",
			"ipv4/conf/all/send_redirects": "0",
		}),
	}
	if c.bridged() {
		h.Bridges = []string{PodBridge}
		h.Config = append(h.Config, c.addrAdd(n.Gateway(), n.PodNetwork, PodBridge)...)
		h.Sysctls["bridge/bridge-nf-call-iptables?"] = "1" // what the CNI bridge plugins ask for
		h.Sysctls["bridge/bridge-nf-call-ip6tables?"] = "1"
	} else {
		h.Sysctls["ipv4/conf/all/rp_filter"] = "1" // the strictest that Calico may find
	}
	var overlay []string
	overlay, h.FDB = c.planOverlay(n)
	h.Config = slices.Concat(h.Config, c.defaultRoutes(c.gateways(network)), overlay)
	for _, route := range c.podRoutes(n) {
		h.Config = append(h.Config, "route add "+route)
	}
	h.Rules = c.pluginRules(n)
	return h
}

// planPod returns what makes a pod: one interface, on its node's bridge if there is one.
func planPod(c Cluster, p Pod, n Node) hostPlan {
	if c.calico() {
		return planWorkload(c, p, n)
	}
	return hostPlan{
		Name:    p.Name,
		Cables:  []cable{{Iface: "eth0", To: n.Name, Bridge: PodBridge, Hairpin: true, MTU: c.podMTU()}},
		Config:  append(c.addrAdd(p.Addr, n.PodNetwork, "eth0"), c.defaultRoutes([]netip.Addr{n.Gateway()})...),
		Sysctls: sysctls(nil),
	}
}

// bridgeAddress is the MAC address of each bridge, none of which sees another. The CNI plugins give
// theirs one too: a bridge without takes the least of its ports', which changes as pods come and
// go, and for seconds other pods go on sending to the one before.
const bridgeAddress = "02:00:00:00:00:fe"

// sysctls returns what each host with addresses has, and more.
func sysctls(more map[string]string) map[string]string {
	all := map[string]string{
		// Nobody else has its addresses: nothing need wait until that is sure.
		"ipv6/conf/default/accept_dad?": "0", "ipv6/conf/all/accept_dad?": "0",
		// Where there are several ways each connection takes one of them and stays on it, also when it
		// sends something again: client and router are one machine here, and share the hash of a
		// connection, which no real ones do.
		"ipv4/fib_multipath_hash_policy?": "1", "ipv6/fib_multipath_hash_policy?": "1", "core/txrehash?": "0",
	}
	maps.Copy(all, more)
	return all
}

// commands returns what to run in the host's own namespace, and, by host, what to run in those that
// its cables lead to. ns names the namespace of a host.
func (h hostPlan) commands(ns func(host string) string) (own []string, others map[string][]string) {
	own = append(own, "link set lo up")
	for _, b := range h.Bridges {
		own = append(own, "link add "+b+" address "+bridgeAddress+" type bridge forward_delay 0 stp_state 0",
			"link set "+b+" up")
	}
	others = map[string][]string{}
	for _, c := range h.Cables {
		port, mtu := cmp.Or(c.Port, portName(h.Name, c.Iface)), ""
		if c.MTU > 0 {
			mtu = fmt.Sprintf(" mtu %d", c.MTU)
		}
		own = append(own, fmt.Sprintf("link add %s%s type veth peer name %s%s netns %s", c.Iface, mtu, port, mtu, ns(c.To)),
			"link set "+c.Iface+" up")
		if c.Bridge != "" {
			others[c.To] = append(others[c.To], fmt.Sprintf("link set %s master %s", port, c.Bridge))
		}
		if c.Hairpin {
			others[c.To] = append(others[c.To], fmt.Sprintf("link set %s type bridge_slave hairpin on", port))
		}
		others[c.To] = append(append(others[c.To], c.There...), fmt.Sprintf("link set %s up", port))
	}
	return append(own, h.Config...), others
}

// portName names the far end of a host's cable: unique where it is, and not longer than the
// kernel's 15 characters.
func portName(host, iface string) string {
	if name := host + "." + iface; len(name) <= 15 {
		return name
	}
	h := fnv.New32a()
	h.Write([]byte(host + "." + iface))
	return fmt.Sprintf("veth%08x", h.Sum32())
}

// addrAdd returns the commands that give an interface an address, and its twin.
func (c Cluster) addrAdd(addr netip.Addr, in netip.Prefix, dev string) []string {
	var commands []string
	networks := c.prefixes(in)
	for i, a := range c.Addresses(addr) {
		how := "broadcast +"
		if a.Is6() {
			how = "nodad"
		}
		commands = append(commands, fmt.Sprintf("addr add %s/%d %s dev %s", a, networks[i].Bits(), how, dev))
	}
	return commands
}

// defaultRoutes returns the commands that make routers, and their twins, the ways out.
func (c Cluster) defaultRoutes(routers []netip.Addr) []string {
	var commands []string
	for family := range c.Addresses(routers[0]) {
		var hops []string
		for _, router := range routers {
			hops = append(hops, "via "+c.Addresses(router)[family].String())
		}
		if len(hops) > 1 {
			hops[0] = "nexthop " + hops[0]
		}
		commands = append(commands, "route add default "+strings.Join(hops, " nexthop "))
	}
	return commands
}
