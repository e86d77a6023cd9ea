// Package chaos runs a lab through a story of planned changes, churn and faults, and judges what clients, kernels and
// the API server show by the contract. docs/chaos.md is its manual.
package chaos

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// The pools: addresses of the nodes' LAN, and addresses that only the router knows the way to.
const (
	lanPool, lanMore       = "172.26.236.180-172.26.236.199", "172.26.236.210-172.26.236.219"
	routedPool             = "203.0.113.180-203.0.113.199"
	lanPool6, routedPool6  = "fd00:172:26:236::180-fd00:172:26:236::199", "fd00:203:0:113::180-fd00:203:0:113::199"
	namespace              = "chaos"
	idleService            = "idle"
	churnApp               = "churn"
	tcpPort, secondTCPPort = 80, 81
)

// pools returns the objects; more addresses on request.
func pools(more bool) string {
	lan := lanPool
	if more {
		lan += ", " + lanMore
	}
	return fmt.Sprintf(`
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec: {addresses: [%s, "%s"]}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: routed}
spec: {addresses: [%s, "%s"]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec: {ipAddressPools: [lan], interfaces: [eth0]}
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: routed}
spec: {ipAddressPools: [routed]}
`, lan, lanPool6, routedPool, routedPool6)
}

// peers returns the sessions to the router, one for each family.
func peers(c lab.Cluster) string {
	var b strings.Builder
	for suffix, addr := range map[string]netip.Addr{"": c.LAN.Router, "-v6": lab.Twin(c.LAN.Router)} {
		fmt.Fprintf(&b, `---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor%s}
spec: {myASN: %d, peerASN: %d, peerAddress: "%s"}
`, suffix, c.ToR.NodeASN, c.ToR.ASN, addr)
	}
	return b.String()
}

// peerNames are the names of those sessions.
var peerNames = []string{"tor", "tor-v6"}

// cluster returns a lab of five nodes, four of which announce, behind a router that speaks BGP, with both families.
func cluster() lab.Cluster {
	c := lab.SeedCluster()
	c.DualStack = true
	c.ToR = lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64512, NodeASN: 64513}
	c.Nodes = append(c.Nodes, lab.Node{
		Name:       "k8s-worker-200",
		Addr:       netip.MustParseAddr("172.26.236.200"),
		PodNetwork: netip.MustParsePrefix("192.168.200.0/24"),
	})
	c.Pods = nil
	c.Services = nil
	for _, s := range services() {
		for i := range 2 {
			c.Pods = append(c.Pods, podOf(c, s.App, fmt.Sprintf("%s-%d", s.App, i), len(c.Pods)))
		}
	}
	// A pod on each node: what is created while some proxies hang can be announced, with policy Local too.
	for i := range workers(c) {
		c.Pods = append(c.Pods, podOf(c, churnApp, fmt.Sprintf("%s-%d", churnApp, i), len(c.Pods)))
	}
	return c
}

// podOf describes a pod; the number picks its node and address.
func podOf(c lab.Cluster, app, name string, number int) lab.Pod {
	nodes := workers(c)
	node := nodes[number%len(nodes)]
	b := node.PodNetwork.Masked().Addr().As4()
	b[3] = byte(20 + number%200)
	return lab.Pod{Name: name, Node: node.Name, Addr: netip.AddrFrom4(b), App: app,
		TCP: []uint16{tcpPort, secondTCPPort}, UDP: []uint16{tcpPort}}
}

// workers returns the nodes that announce addresses.
func workers(c lab.Cluster) []lab.Node {
	var nodes []lab.Node
	for _, n := range c.Nodes {
		if !n.ControlPlane {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// services returns those that are always there. Each has an app of its own, so that an answer says which it is for.
func services() []lab.Service {
	service := func(name, pool string, local bool, more map[string]string, ports ...lab.Port) lab.Service {
		s := lab.Service{Namespace: namespace, Name: name, App: name, Type: "LoadBalancer", Ports: ports,
			IPFamilies:  []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			Annotations: map[string]string{lb.AnnotationPool: pool}}
		if local {
			s.ExternalTrafficPolicy = "Local"
		}
		maps.Copy(s.Annotations, more)
		return s
	}
	tcp := lab.Port{Name: "tcp", Port: tcpPort}
	udp := lab.Port{Name: "udp", Protocol: "UDP", Port: tcpPort}
	shared := map[string]string{lb.AnnotationShare: "one"}
	affine := service("affine", "lan", false, nil, tcp)
	affine.Affinity = true
	return []lab.Service{
		service("cluster", "lan", false, nil, tcp, udp),
		service("local", "lan", true, nil, tcp, udp),
		affine,
		service("share-a", "lan", false, shared, tcp),
		service("share-b", "lan", false, shared, lab.Port{Name: "tcp", Port: secondTCPPort}),
		service("relayed", "lan", false, map[string]string{lb.AnnotationRelay: "true"}, tcp),
		service("routed", "routed", false, nil, tcp, udp),
		service("rlocal", "routed", true, nil, tcp, udp),
		service(idleService, "lan", false, nil, tcp, udp),
	}
}

// configured returns them as a run has them: two are forwarded directly if it says so.
func configured(c story.Config) []lab.Service {
	all := services()
	for _, s := range all {
		if c.Direct && (s.Name == "cluster" || s.Name == "routed") {
			s.Annotations[lb.AnnotationForwarding] = lb.ForwardingDirect
		}
	}
	return all
}

// churnService returns one that comes and goes; its number picks pool and policy.
func churnService(name string) lab.Service {
	number := 0
	_, _ = fmt.Sscanf(name, "churn-%d", &number)
	s := lab.Service{Namespace: namespace, Name: name, App: churnApp, Type: "LoadBalancer",
		IPFamilies:  []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
		Ports:       []lab.Port{{Name: "tcp", Port: tcpPort}},
		Annotations: map[string]string{lb.AnnotationPool: []string{"lan", "routed"}[number%3/2]}}
	if number%2 == 1 {
		s.ExternalTrafficPolicy = "Local"
	}
	return s
}

// Cast returns what a story may be about.
func Cast() story.Cast {
	c := story.Cast{Programs: []string{"speaker", "proxy", "controller"}, Graceful: []string{"relay"}, Idle: idleService,
		Router: true}
	for _, n := range workers(cluster()) {
		c.Nodes = append(c.Nodes, n.Name)
	}
	for _, s := range services() {
		if s.Name != idleService {
			c.Services = append(c.Services, s.Name)
		}
	}
	return c
}
