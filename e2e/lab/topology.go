package lab

import (
	"fmt"
	"hash/fnv"
	"net/netip"
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

// hostPlan is what makes one host: iproute2 commands to run in its network namespace, then its cables, then addresses and routes.
type hostPlan struct {
	Name    string
	Bridges []string
	Cables  []cable
	// Config holds iproute2 commands.
	Config []string
	// Sysctls are below /proc/sys/net; a key that ends in ? may be missing.
	Sysctls map[string]string
}

// cable connects an interface of a host to a port of a bridge in another host.
type cable struct {
	Iface      string
	To, Bridge string
	// Hairpin lets the port send back what it received, so that a pod reaches itself through a Service.
	Hairpin bool
}

// planLAN returns the hosts that are no nodes: the switch with a bridge for each segment, the router and the two clients.
func planLAN(c Cluster) []hostPlan {
	return []hostPlan{{
		Name:    switchName,
		Bridges: []string{"lan", "far"},
		// A switch does not filter what passes through it, and has no address.
		Sysctls: map[string]string{"bridge/bridge-nf-call-iptables?": "0", "bridge/bridge-nf-call-ip6tables?": "0", "ipv6/conf/all/disable_ipv6?": "1"},
	}, {
		Name:    RouterName,
		Cables:  []cable{{Iface: "eth0", To: switchName, Bridge: "lan"}, {Iface: "eth1", To: switchName, Bridge: "far"}},
		Config:  []string{addrAdd(c.LAN.Router, c.LAN.Prefix, "eth0"), addrAdd(c.Far.Router, c.Far.Prefix, "eth1")},
		Sysctls: map[string]string{"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding?": "1", "ipv4/conf/all/send_redirects": "0"},
	},
		planClient(ClientName, c.LAN, "lan"),
		planClient(FarClientName, c.Far, "far"),
	}
}

func planClient(name string, segment Network, bridge string) hostPlan {
	return hostPlan{
		Name:   name,
		Cables: []cable{{Iface: "eth0", To: switchName, Bridge: bridge}},
		Config: []string{addrAdd(segment.Client, segment.Prefix, "eth0"), "route add default via " + segment.Router.String()},
		// A client that opens a connection every few milliseconds must not run out of ports.
		Sysctls: map[string]string{"ipv4/tcp_tw_reuse": "1", "ipv4/ip_local_port_range": "10000 65000"},
	}
}

// planNode returns what makes a node: the LAN interface, the bridge for pods, and routes to the other nodes' pods.
func planNode(c Cluster, n Node) hostPlan {
	config := []string{
		addrAdd(n.Addr, c.LAN.Prefix, "eth0"),
		addrAdd(n.Gateway(), n.PodNetwork, PodBridge),
		"route add default via " + c.LAN.Router.String(),
	}
	for _, other := range c.Nodes {
		if other.Name != n.Name {
			config = append(config, fmt.Sprintf("route add %s via %s", other.PodNetwork.Masked(), other.Addr))
		}
	}
	return hostPlan{
		Name:    n.Name,
		Bridges: []string{PodBridge},
		Cables:  []cable{{Iface: "eth0", To: switchName, Bridge: "lan"}},
		Config:  config,
		Sysctls: map[string]string{
			"ipv4/ip_forward":                  "1",
			"ipv6/conf/all/forwarding?":        "1",
			"ipv4/conf/all/send_redirects":     "0",
			"bridge/bridge-nf-call-iptables?":  "1", // what the CNI bridge plugins ask for
			"bridge/bridge-nf-call-ip6tables?": "1",
		},
	}
}

// planPod returns what makes a pod: one interface on its node's bridge.
func planPod(p Pod, n Node) hostPlan {
	return hostPlan{
		Name:   p.Name,
		Cables: []cable{{Iface: "eth0", To: n.Name, Bridge: PodBridge, Hairpin: true}},
		Config: []string{addrAdd(p.Addr, n.PodNetwork, "eth0"), "route add default via " + n.Gateway().String()},
	}
}

// commands returns what to run in the host's own namespace, and, by host, what to run in those that its cables lead to.
// ns names the namespace of a host.
func (h hostPlan) commands(ns func(host string) string) (own []string, others map[string][]string) {
	own = append(own, "link set lo up")
	for _, b := range h.Bridges {
		own = append(own, "link add "+b+" type bridge forward_delay 0 stp_state 0", "link set "+b+" up")
	}
	others = map[string][]string{}
	for _, c := range h.Cables {
		port := portName(h.Name, c.Iface)
		own = append(own, fmt.Sprintf("link add %s type veth peer name %s netns %s", c.Iface, port, ns(c.To)), "link set "+c.Iface+" up")
		others[c.To] = append(others[c.To], fmt.Sprintf("link set %s master %s", port, c.Bridge))
		if c.Hairpin {
			others[c.To] = append(others[c.To], fmt.Sprintf("link set %s type bridge_slave hairpin on", port))
		}
		others[c.To] = append(others[c.To], fmt.Sprintf("link set %s up", port))
	}
	return append(own, h.Config...), others
}

// portName names the far end of a host's cable: unique where it is, and not longer than the kernel's 15 characters.
func portName(host, iface string) string {
	if name := host + "." + iface; len(name) <= 15 {
		return name
	}
	h := fnv.New32a()
	h.Write([]byte(host + "." + iface))
	return fmt.Sprintf("veth%08x", h.Sum32())
}

func addrAdd(a netip.Addr, in netip.Prefix, dev string) string {
	return fmt.Sprintf("addr add %s/%d broadcast + dev %s", a, in.Bits(), dev)
}
