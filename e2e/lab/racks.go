package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/landfall-lb/landfall/e2e/router"
)

// SpineName is the host between the racks, and between them and the clients.
const SpineName = "spine"

// toSpine is the interface of a ToR router that leads to the spine.
const toSpine = "up0"

// RackCluster returns a cluster whose nodes stand in racks, each with a network and ToR routers of
// its own behind a spine: as many workers in each rack, with a pod of my-nginx on every one, and
// the control plane in the first. The clients are behind the spine.
func RackCluster(racks, workers int, tor ToR) Cluster {
	c := SeedCluster()
	c.Racks, c.ToR, c.Nodes, c.Pods = racks, tor, nil, nil
	add := func(rack, i int, name string) Node {
		n := Node{Name: name, Rack: rack, Labels: map[string]string{"rack": fmt.Sprint(rack)},
			Addr:       netip.AddrFrom4([4]byte{172, 26, byte(rack), byte(10 + i)}),
			PodNetwork: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(10*rack + i), 0}), 24)}
		c.Nodes = append(c.Nodes, n)
		return n
	}
	add(1, 0, "k8s-master")
	c.Nodes[0].ControlPlane = true
	for rack := range racks {
		for i := range workers {
			n := add(rack+1, i+1, fmt.Sprintf("k8s-rack-%d-%d", rack+1, i+1))
			c.Pods = append(c.Pods, Pod{Name: fmt.Sprintf("my-nginx-%d-%d", rack+1, i+1), Node: n.Name,
				Addr: n.PodNetwork.Addr().Next().Next(), App: "my-nginx", TCP: []uint16{80}})
		}
	}
	c.Services = nil
	return c
}

// rackNetwork returns the network of a rack, the first of which is 1.
func rackNetwork(rack int) Network {
	prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 26, byte(rack), 0}), 24)
	return Network{Prefix: prefix, Router: prefix.Addr().Next()}
}

// nodeNetwork returns the network that a node has its address in, and its bridge.
func (c Cluster) nodeNetwork(n Node) (network Network, bridge string) {
	if c.Racks == 0 {
		return c.LAN, "lan"
	}
	return rackNetwork(n.Rack), fmt.Sprintf("rack-%d", n.Rack)
}

// torRack returns the rack of a ToR router, 0 if there are no racks.
func (c Cluster) torRack(i int) int {
	if c.Racks == 0 {
		return 0
	}
	return i/c.ToR.Count + 1
}

// torAddress returns the address of a ToR router on the nodes' network.
func (c Cluster) torAddress(i int) netip.Addr {
	if c.Racks == 0 {
		return c.gateways(c.LAN)[i]
	}
	return c.gateways(rackNetwork(c.torRack(i)))[i%c.ToR.Count]
}

// torNodes returns the nodes that speak BGP with a ToR router.
func (c Cluster) torNodes(i int) []Node {
	return slices.DeleteFunc(slices.Clone(c.Nodes), func(n Node) bool { return n.Rack != c.torRack(i) })
}

// routers returns how many ToR routers there are.
func (c Cluster) routers() int { return c.ToR.Count * max(c.Racks, 1) }

// spineASN is the spine's AS number; those of the racks begin with [ToR.ASN].
func (c Cluster) spineASN() uint32 { return c.ToR.ASN + 100 }

// link returns the addresses of the spine and of a ToR router on the link between them.
func link(i int) (spine, tor netip.Addr, prefix netip.Prefix) {
	prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(i), 0}), 24)
	return prefix.Addr().Next(), prefix.Addr().Next().Next(), prefix
}

// validateRacks returns what is wrong with the racks.
func (c Cluster) validateRacks() error {
	if c.Racks == 0 {
		return nil
	}
	if c.ToR.Kind != FRR {
		return errors.New("racks: want ToR routers of kind FRR")
	}
	for _, n := range c.Nodes {
		if n.Rack < 1 || n.Rack > c.Racks {
			return fmt.Errorf("racks: node %s is in rack %d of %d", n.Name, n.Rack, c.Racks)
		}
	}
	return nil
}

// planRacks returns the hosts that are no nodes: as planLAN does, for a cluster in racks.
func planRacks(c Cluster) []hostPlan {
	// Each router spreads by a hash of its own, as real ones do: with the same one a rack would get only
	// such connections as all of its routers send to the same node.
	forwards := func(i int) map[string]string {
		return sysctls(map[string]string{"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding?": "1",
			"ipv4/conf/all/send_redirects": "0", "ipv4/conf/default/send_redirects": "0",
			"ipv4/fib_multipath_hash_seed?": fmt.Sprint(i + 1)})
	}
	sw := hostPlan{Name: switchName, Bridges: []string{"lan", "far"},
		Sysctls: map[string]string{"bridge/bridge-nf-call-iptables?": "0", "bridge/bridge-nf-call-ip6tables?": "0",
			"ipv6/conf/all/disable_ipv6?": "1"}}
	for rack := range c.Racks {
		sw.Bridges = append(sw.Bridges, fmt.Sprintf("rack-%d", rack+1))
	}
	spine := hostPlan{Name: SpineName, Sysctls: forwards(c.routers()),
		Cables: []cable{{Iface: torLAN, To: switchName, Bridge: "lan"}, {Iface: torFar, To: switchName, Bridge: "far"}},
		Config: slices.Concat(c.addrAdd(c.LAN.Router, c.LAN.Prefix, torLAN), c.addrAdd(c.Far.Router, c.Far.Prefix, torFar))}
	var tors []hostPlan
	for i := range c.routers() {
		rack := c.torRack(i)
		cableName, down := fmt.Sprintf("link-%d", i), fmt.Sprintf("down%d", i)
		sw.Bridges = append(sw.Bridges, cableName)
		spine.Cables = append(spine.Cables, cable{Iface: down, To: switchName, Bridge: cableName})
		tor := hostPlan{Name: torName(i), Sysctls: forwards(i),
			Cables: []cable{{Iface: torLAN, To: switchName, Bridge: fmt.Sprintf("rack-%d", rack)},
				{Iface: toSpine, To: switchName, Bridge: cableName}},
			Config: c.addrAdd(c.torAddress(i), rackNetwork(rack).Prefix, torLAN)}
		if !c.ToR.Unnumbered {
			above, below, prefix := link(i)
			spine.Config = append(spine.Config, c.addrAdd(above, prefix, down)...)
			tor.Config = append(tor.Config, c.addrAdd(below, prefix, toSpine)...)
		}
		for _, n := range c.torNodes(i) {
			if c.CNI == CalicoBGP {
				continue // the node's BIRD says where its pods are
			}
			via := c.Addresses(n.Addr)
			for k, to := range c.prefixes(n.PodNetwork) {
				tor.Config = append(tor.Config, fmt.Sprintf("route add %s via %s", to, via[k]))
			}
		}
		tors = append(tors, tor)
	}
	return slices.Concat([]hostPlan{sw, spine}, tors,
		[]hostPlan{c.planClient(ClientName, c.LAN, "lan"), c.planClient(FarClientName, c.Far, "far")})
}

// fabric writes the sessions between a router and others of the fabric into its configuration: over
// an interface alone where links have no addresses. It returns their names.
func (c Cluster) fabric(line func(string, ...any), iface string, peers []netip.Addr, asn uint32) (names []string) {
	if c.ToR.Unnumbered {
		line(" neighbor %s interface remote-as %d", iface, asn)
		names = []string{iface}
	} else {
		for _, peer := range peers {
			line(" neighbor %s remote-as %d", peer, asn)
			names = append(names, peer.String())
		}
	}
	for _, name := range names {
		line(" neighbor %s timers connect 1", name)
	}
	return names
}

// families writes the address families of a router of the fabric.
func (c Cluster) families(line func(string, ...any), neighbors []string) {
	for _, family := range []string{"ipv4", "ipv6"} {
		if family == "ipv6" && !c.DualStack {
			continue
		}
		line(" address-family %s unicast", family)
		for _, name := range neighbors {
			line("  neighbor %s activate", name)
		}
		if c.Racks > 0 {
			line("  redistribute connected")
			line("  redistribute kernel")
		}
		line("  maximum-paths 16")
		line("  maximum-paths ibgp 16")
		line(" exit-address-family")
	}
}

// startSpine starts the spine's programs.
func (l *Lab) startSpine(ctx context.Context) error {
	c := l.cluster
	var text []byte
	line := func(format string, args ...any) { text = fmt.Appendf(text, format+"\n", args...) }
	line("debug bgp neighbor-events")
	line("router bgp %d", c.spineASN())
	line(" bgp router-id %s", c.LAN.Router)
	line(" no bgp ebgp-requires-policy")
	line(" no bgp default ipv4-unicast")
	line(" bgp bestpath as-path multipath-relax")
	var names []string
	for i := range c.routers() {
		_, tor, _ := link(i)
		names = append(names, c.fabric(line, fmt.Sprintf("down%d", i), c.Addresses(tor), c.torASN(i))...)
	}
	c.families(line, names)
	o := router.Options{Config: string(text), Zebra: "hostname " + SpineName, Namespace: l.state.namespace(SpineName),
		Dir: l.state.path(SpineName), Env: []string{l.state.mark}}
	if err := os.Mkdir(o.Dir, 0o755); err != nil {
		return err
	}
	r, err := router.StartFRR(ctx, o)
	if err != nil {
		return fmt.Errorf("%s: %w", SpineName, err)
	}
	l.spine = &Router{Router: r, Name: SpineName, Addr: c.LAN.Router, Dir: o.Dir, lab: l}
	return nil
}

// Spine returns the router between the racks, nil if there are none.
func (l *Lab) Spine() *Router { return l.spine }

// torASN returns the AS number of a ToR router: those of a rack share one.
func (c Cluster) torASN(i int) uint32 { return c.ToR.ASN + uint32(max(c.torRack(i), 1)) - 1 }
