package lab

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/landfall-lb/landfall/e2e/router"
)

// routerLoopback is an address of a BIRD that is in no network, at which it speaks with speakers.
var routerLoopback = netip.MustParseAddr("10.255.255.1")

// SpeakerAddr is an address of the node beside that of its Node object, which [CalicoBGP] gives it for its speaker's
// sessions: routers have one session with one address.
func (n Node) SpeakerAddr() netip.Addr {
	a := n.Addr.As4()
	a[3] += 50
	return netip.AddrFrom4(a)
}

// SpeakerPeer is the address of the router that speakers have their sessions with.
func (c Cluster) SpeakerPeer() netip.Addr {
	if c.CNI == CalicoBGP && c.ToR.Kind == BIRD {
		return routerLoopback
	}
	return c.LAN.Router
}

// planSpeaker returns the commands that give a node the addresses of its speaker's sessions. That of IPv6 is
// deprecated, lest the kernel choose it for what else the node sends.
func (c Cluster) planSpeaker(n Node) []string {
	if c.CNI != CalicoBGP {
		return nil
	}
	network, _ := c.nodeNetwork(n)
	addr, bits := n.SpeakerAddr(), network.Prefix.Bits()
	return []string{fmt.Sprintf("addr add %s/%d dev eth0", addr, bits),
		fmt.Sprintf("addr add %s/%d nodad preferred_lft 0 dev eth0", Twin(addr), TwinPrefix(network.Prefix).Bits())}
}

func (c Cluster) planLoopback() (commands []string) {
	if c.CNI == CalicoBGP && c.ToR.Kind == BIRD {
		for _, addr := range c.Addresses(routerLoopback) {
			commands = append(commands, fmt.Sprintf("addr add %s dev lo", host(addr)))
		}
	}
	return commands
}

// speakerAddrs are the addresses from which a node's speaker has its sessions.
func (c Cluster) speakerAddrs(n Node) []netip.Addr {
	if c.CNI == CalicoBGP {
		return c.Addresses(n.SpeakerAddr())
	}
	return c.Addresses(n.Addr)
}

// frrCalico writes a FRR's sessions with Calico on the nodes. Calico hears of pods only: a node's kernel has no use for
// a route to an address that the node delivers.
func (c Cluster) frrCalico(i int, line func(string, ...any)) {
	line(" neighbor calico peer-group")
	line(" neighbor calico remote-as %d", c.ToR.NodeASN)
	line(" neighbor calico timers connect 1")
	for _, n := range c.torNodes(i) {
		for _, addr := range c.Addresses(n.Addr) {
			line(" neighbor %s peer-group calico", addr)
		}
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		line(" address-family %s unicast", family)
		line("  neighbor calico prefix-list pods out")
		line(" exit-address-family")
	}
}

func (c Cluster) frrPods(line func(string, ...any)) {
	for i, pods := range c.prefixes(c.PodNetwork) {
		line("%s prefix-list pods permit %s le %d", []string{"ip", "ipv6"}[i], pods, pods.Addr().BitLen())
	}
}

// birdCalico writes those of a BIRD.
func (c Cluster) birdCalico(line func(string, ...any)) {
	for at, n := range c.Nodes {
		for i, addr := range c.Addresses(n.Addr) {
			line("protocol bgp calico%d_%d { local %s as %d; neighbor %s as %d; direct; graceful restart;", at, i,
				c.Addresses(c.LAN.Router)[i], c.ToR.ASN, addr, c.ToR.NodeASN)
			line(" error wait time 1, 2; %s { import all; export where source = RTS_BGP && net ~ [%s+]; }; }", channel(addr),
				c.prefixes(c.PodNetwork)[i])
		}
	}
}

// channel names an address' family as BIRD does.
func channel(addr netip.Addr) string {
	if addr.Is6() {
		return "ipv6"
	}
	return "ipv4"
}

// calicoConfig returns the configuration of a node's BIRD as Calico writes it, with the mesh of nodes off: the node
// announces the block of its pods to the ToR routers, keeps its routes over a restart, and puts what it hears into the
// kernel. As all nodes have one AS number, it takes routes that have this number in their path (Calico's
// numAllowedLocalASNumbers).
func (c Cluster) calicoConfig(n Node) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("router id %s;", n.Addr)
	line("log stderr all;")
	line("protocol device { scan time 2; }")
	line("protocol direct { ipv4; ipv6; interface -\"cali*\", \"*\"; }")
	for i, addr := range c.Addresses(n.Addr) {
		block, family := c.prefixes(n.PodNetwork)[i], channel(addr)
		line("protocol static { %s; route %s blackhole; }", family, block)
		line("protocol kernel { %s { import none; export where source = RTS_BGP; };", family)
		line(" persist; scan time 2; graceful restart; merge paths on; }")
		for at := range c.routers() {
			if c.torRack(at) != n.Rack {
				continue
			}
			line("protocol bgp tor%d_%s { local %s as %d; neighbor %s as %d;", at+1, family, addr, c.ToR.NodeASN,
				c.Addresses(c.torAddress(at))[i], c.torASN(at))
			line(" multihop; graceful restart; allow local as 1; connect delay time 1; connect retry time 2;")
			line(" error wait time 1, 5;")
			line(" %s { import all; export where source = RTS_STATIC; next hop self; gateway recursive; add paths on; }; }",
				family)
		}
	}
	return b.String()
}

// startCalico starts the nodes' BIRDs.
func (l *Lab) startCalico(ctx context.Context) error {
	if l.cluster.CNI != CalicoBGP {
		return nil
	}
	l.calico = map[string]*router.Router{}
	for _, n := range l.cluster.Nodes {
		o := router.Options{Config: l.cluster.calicoConfig(n), Namespace: l.state.namespace(n.Name),
			Dir: l.state.path("calico-" + n.Name), Env: []string{l.state.mark}, Recover: true}
		if err := os.Mkdir(o.Dir, 0o755); err != nil {
			return err
		}
		r, err := router.StartBIRD(ctx, o)
		if err != nil {
			return fmt.Errorf("BIRD of %s: %w", n.Name, err)
		}
		l.calico[n.Name] = r
	}
	return nil
}

// Calico returns the BIRD of a node in a cluster of [CalicoBGP].
func (l *Lab) Calico(node string) *router.Router { return l.calico[node] }
