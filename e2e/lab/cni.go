package lab

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// CNI is the shape of the nodes' network for pods, as network plugins make it: interfaces, routes,
// kernel parameters, and the rules that packets of Services meet.
type CNI string

const (
	// HostGW has a bridge on each node and routes by the addresses of the others, as the bridge plugin
	// with static routes and flannel's host-gw. It has no rules.
	HostGW CNI = ""
	// VXLAN is flannel's: a bridge, and an overlay between the nodes.
	VXLAN CNI = "vxlan"
	// Calico is Calico's without encapsulation: for each pod an interface and a route, proxy ARP and
	// no bridge, strict filters of source addresses. Nodes' spec.podCIDR is not where their pods are.
	Calico CNI = "calico"
	// CalicoVXLAN has an overlay between Calico's nodes.
	CalicoVXLAN CNI = "calico-vxlan"
	// CalicoIPIP has tunl0 between Calico's nodes, for IPv4 alone. As it needs no module, a VXLAN without Ethernet
	// headers (GPE) carries the packets: like IPIP it has no link layer, and no neighbors.
	CalicoIPIP CNI = "calico-ipip"
	// CalicoBGP is [Calico] with a BIRD on each node that tells the ToR routers where pods are, and hears it of them.
	CalicoBGP CNI = "calico-bgp"
)

// calicoMAC is the address of each of Calico's interfaces to a pod.
const calicoMAC = "ee:ee:ee:ee:ee:ee"

func (c Cluster) calico() bool {
	return slices.Contains([]CNI{Calico, CalicoVXLAN, CalicoIPIP, CalicoBGP}, c.CNI)
}

// bridged reports whether a node's pods are on a bridge.
func (c Cluster) bridged() bool { return !c.calico() }

// overlay is what VXLAN devices are made from.
type overlay struct {
	devices   [2]string // of IPv4 and IPv6
	vni, port int
}

// vxlan returns the overlay between the nodes; found is false if there is none.
func (c Cluster) vxlan() (o overlay, found bool) {
	switch c.CNI {
	case VXLAN:
		return overlay{[2]string{"flannel.1", "flannel-v6.1"}, 1, 8472}, true
	case CalicoVXLAN:
		return overlay{[2]string{"vxlan.calico", "vxlan-v6.calico"}, 4096, 4789}, true
	}
	return o, false
}

// ipip names Calico's interface of [CalicoIPIP].
const ipip = "tunl0"

// overlayDevice names the interface through which nodes reach the pods of others in a family; "" if there is none.
func (c Cluster) overlayDevice(family int) string {
	if c.CNI == CalicoIPIP && family == 0 {
		return ipip
	}
	o, _ := c.vxlan()
	return o.devices[family]
}

// podMTU is that of pods' interfaces, 0 for the kernel's default: VXLAN takes 50 bytes over IPv4
// and 70 over IPv6. With IPIP it is what Calico's manifests had for long.
func (c Cluster) podMTU() int {
	if c.CNI == CalicoIPIP {
		return 1440
	}
	if _, found := c.vxlan(); found {
		return 1430
	}
	return 0
}

// planIPIP returns the commands that make a node's tunl0. GPE needs 16 bytes more than IPIP, whose MTU is 1480.
func (c Cluster) planIPIP(n Node) []string {
	return []string{"link add " + ipip + " mtu 1464 type vxlan dstport 4790 gpe external",
		fmt.Sprintf("addr add %s dev %s", host(c.vtep(n, 0)), ipip), "link set " + ipip + " up"}
}

// planOverlay returns the commands that make a node's devices of the overlay, and those of bridge(8) that
// name the others' nodes.
func (c Cluster) planOverlay(n Node) (commands, fdb []string) {
	if c.CNI == CalicoIPIP {
		return c.planIPIP(n), nil
	}
	o, found := c.vxlan()
	if !found {
		return nil, nil
	}
	for i, addr := range c.Addresses(n.Addr) {
		dev := o.devices[i]
		commands = append(commands,
			fmt.Sprintf("link add %s address %s mtu %d type vxlan id %d dstport %d local %s dev eth0 nolearning",
				dev, vtepMAC(n), c.podMTU(), o.vni, o.port, addr),
			fmt.Sprintf("addr add %s dev %s", host(c.vtep(n, i)), dev), "link set "+dev+" up")
	}
	for _, other := range c.neighbors(n) {
		for i, addr := range c.Addresses(other.Addr) {
			commands = append(commands, fmt.Sprintf("neigh add %s lladdr %s dev %s nud permanent", c.vtep(other, i),
				vtepMAC(other), o.devices[i]))
			fdb = append(fdb, fmt.Sprintf("fdb append %s dev %s dst %s", vtepMAC(other), o.devices[i], addr))
		}
	}
	return commands, fdb
}

// vtep returns the address of a node's VXLAN device: the first of its pod network.
func (c Cluster) vtep(n Node, family int) netip.Addr { return c.prefixes(n.PodNetwork)[family].Addr() }

func vtepMAC(n Node) string {
	a := n.Addr.As4()
	return fmt.Sprintf("02:00:00:01:%02x:%02x", a[2], a[3])
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// neighbors are the nodes to whose pods a node has routes; routers know the pods of other racks, and
// BIRD makes those of [CalicoBGP].
func (c Cluster) neighbors(n Node) []Node {
	return slices.DeleteFunc(slices.Clone(c.Nodes),
		func(other Node) bool { return other.Name == n.Name || other.Rack != n.Rack || c.CNI == CalicoBGP })
}

// podRoutes returns the routes of a node to pods; own are those on the node.
func (c Cluster) podRoutes(n Node, own ...Pod) []string {
	var routes []string
	for _, other := range c.neighbors(n) {
		via := c.Addresses(other.Addr)
		for i, to := range c.prefixes(other.PodNetwork) {
			switch dev := c.overlayDevice(i); dev {
			case "":
				routes = append(routes, fmt.Sprintf("%s via %s", to, via[i]))
			case ipip:
				routes = append(routes, fmt.Sprintf("%s encap ip id 0 dst %s dev %s", to, via[i], dev))
			default:
				routes = append(routes, fmt.Sprintf("%s via %s dev %s onlink", to, c.vtep(other, i), dev))
			}
		}
	}
	if c.calico() {
		for _, block := range c.prefixes(n.PodNetwork) {
			routes = append(routes, fmt.Sprintf("blackhole %s", block))
		}
	}
	for _, p := range own {
		if c.calico() {
			routes = append(routes, c.workloadRoutes(p)...)
		}
	}
	return routes
}

func (c Cluster) workloadRoutes(p Pod) (routes []string) {
	for _, addr := range c.Addresses(p.Addr) {
		routes = append(routes, fmt.Sprintf("%s dev %s", host(addr), workload(p)))
	}
	return routes
}

// workload names Calico's interface to a pod.
func workload(p Pod) string {
	sum := sha1.Sum([]byte("default." + p.Name))
	return "cali" + hex.EncodeToString(sum[:])[:11]
}

// planWorkload returns what makes a pod of Calico's: addresses without a network, and a router that
// is no address of the node.
func planWorkload(c Cluster, p Pod, n Node) hostPlan {
	w := workload(p)
	there := []string{"link set " + w + " address " + calicoMAC, "link set " + w + " up"}
	for _, route := range c.workloadRoutes(p) {
		there = append(there, "route add "+route)
	}
	config := []string{"addr add " + host(p.Addr).String() + " dev eth0", "route add 169.254.1.1 dev eth0 scope link",
		"route add default via 169.254.1.1 dev eth0"}
	if c.DualStack {
		config = append(config, "addr add "+host(Twin(p.Addr)).String()+" nodad dev eth0",
			"route add default via fe80::ecee:eeff:feee:eeee dev eth0")
	}
	return hostPlan{
		Name: p.Name,
		Cables: []cable{{Iface: "eth0", To: n.Name, Port: w, MTU: c.podMTU(), There: there,
			ThereSysctls: map[string]string{
				"ipv4/conf/" + w + "/proxy_arp": "1", "ipv4/neigh/" + w + "/proxy_delay": "0",
				"ipv4/conf/" + w + "/route_localnet": "1", "ipv4/conf/" + w + "/rp_filter": "1",
				"ipv6/conf/" + w + "/proxy_ndp": "1", "ipv6/conf/" + w + "/accept_ra": "0",
			}}},
		Config:  config,
		Sysctls: sysctls(nil),
	}
}

// podCIDR is the spec.podCIDR of a node. Calico's pods have addresses of blocks that have nothing
// to do with it: here it is where the pods of the next node are.
func (c Cluster) podCIDR(n Node) netip.Prefix {
	at := slices.IndexFunc(c.Nodes, func(other Node) bool { return other.Name == n.Name })
	if c.calico() {
		return c.Nodes[(at+1)%len(c.Nodes)].PodNetwork
	}
	return n.PodNetwork
}

// flannelRules are what flanneld writes with --ip-masq, for @PODS@ of all nodes and @OWN@ of one.
const flannelRules = `*filter
:FLANNEL-FWD - [0:0]
-A FORWARD -j FLANNEL-FWD
-A FLANNEL-FWD -s @PODS@ -j ACCEPT
-A FLANNEL-FWD -d @PODS@ -j ACCEPT
COMMIT
*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
-A FLANNEL-POSTRTG -s @OWN@ -d @PODS@ -j RETURN
-A FLANNEL-POSTRTG -s @PODS@ -d @OWN@ -j RETURN
-A FLANNEL-POSTRTG ! -s @PODS@ -d @OWN@ -j RETURN
-A FLANNEL-POSTRTG -s @PODS@ ! -d @MULTICAST@ -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s @PODS@ -d @PODS@ -j MASQUERADE --random-fully
COMMIT
`

// calicoRules are those of Felix without a policy: what pods send passes a strict filter of source
// addresses, what is to or from a pod is dropped if conntrack finds it invalid, and what leaves the
// pod network is masqueraded.
const calicoRules = `*raw
:cali-PREROUTING - [0:0]
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i cali+ -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
COMMIT
*filter
:cali-FORWARD - [0:0]
:cali-wl-dispatch - [0:0]
-A FORWARD -j cali-FORWARD
-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -i cali+ -j cali-wl-dispatch
-A cali-FORWARD -o cali+ -j cali-wl-dispatch
-A cali-wl-dispatch -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-wl-dispatch -m conntrack --ctstate INVALID -j DROP
-A cali-wl-dispatch -j MARK --set-xmark 0x10000/0x10000
COMMIT
*nat
:cali-POSTROUTING - [0:0]
-A POSTROUTING -j cali-POSTROUTING
-A cali-POSTROUTING -s @PODS@ ! -d @PODS@ -j MASQUERADE --random-fully
@OVERLAY@COMMIT
`

// calicoOverlay masquerades what a node sends into the overlay from another of its addresses.
const calicoOverlay = "-A cali-POSTROUTING -o @DEVICE@ -m addrtype ! --src-type LOCAL --limit-iface-out " +
	"-m addrtype --src-type LOCAL -j MASQUERADE --random-fully\n"

// pluginRules returns what a node's network plugin gives to iptables-restore, by family.
func (c Cluster) pluginRules(n Node) []string {
	if c.CNI == HostGW {
		return nil
	}
	var rules []string
	pods := c.prefixes(c.PodNetwork)
	for i, own := range c.prefixes(n.PodNetwork) {
		template, dev := flannelRules, c.overlayDevice(i)
		switch {
		case c.calico() && dev != "":
			template = strings.ReplaceAll(calicoRules, "@OVERLAY@", calicoOverlay)
		case c.calico():
			template = strings.ReplaceAll(calicoRules, "@OVERLAY@", "")
		}
		rules = append(rules, strings.NewReplacer("@PODS@", pods[i].String(), "@OWN@", own.String(),
			"@MULTICAST@", []string{"224.0.0.0/4", "ff00::/8"}[i], "@DEVICE@", dev).Replace(template))
	}
	return rules
}

// StopCNI takes away what a network plugin makes on a node: the routes to pods, and the bridge of
// its own. Bridged pods run on without a cable. A node that has just booted is so.
func (l *Lab) StopCNI(ctx context.Context, node string) error {
	n, own := l.nodes[node], l.podsOn(node)
	var commands []string
	if l.cluster.bridged() {
		commands = append(commands, "link delete "+PodBridge)
	}
	for _, route := range l.cluster.podRoutes(n, own...) {
		commands = append(commands, "route delete "+route)
	}
	return l.onNode(ctx, node, commands)
}

// StartCNI undoes [Lab.StopCNI].
func (l *Lab) StartCNI(ctx context.Context, node string) error {
	n, own := l.nodes[node], l.podsOn(node)
	var commands []string
	if l.cluster.bridged() {
		commands = append([]string{
			fmt.Sprintf("link add %s address %s type bridge forward_delay 0 stp_state 0", PodBridge, bridgeAddress),
			"link set " + PodBridge + " up",
		}, l.cluster.addrAdd(n.Gateway(), n.PodNetwork, PodBridge)...)
		for _, p := range own {
			port := portName(p.Name, "eth0")
			commands = append(commands, fmt.Sprintf("link set %s master %s", port, PodBridge),
				fmt.Sprintf("link set %s type bridge_slave hairpin on", port))
		}
	}
	for _, route := range l.cluster.podRoutes(n, own...) {
		commands = append(commands, "route add "+route)
	}
	return l.onNode(ctx, node, commands)
}

// podsOn returns the pods that are on a node now.
func (l *Lab) podsOn(node string) []Pod {
	return l.podsWith(func(p Pod) bool { return p.Node == node })
}
