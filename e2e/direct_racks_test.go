package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// directRacks is a Service of policy Cluster that is forwarded directly, with endpoints in two of three racks: all
// that routers send to the third is for nodes in other racks.
type directRacks struct {
	*lab.Lab
	vips       []netip.AddrPort
	flows      []*rackFlow // over TCP
	datagrams  []*rackFlow // over UDP
	routers    []string    // the nodes that routers send to
	standAlone string      // a node without a pod
}

// startDirectRacks starts it, masqueraded as yet.
func startDirectRacks(t testing.TB) *directRacks {
	t.Helper()
	cluster := lab.RackCluster(3, 2, rackRouters(lab.ToR{Count: 1}))
	cluster.DualStack = true
	pods := []string{"my-nginx-1-1", "my-nginx-3-1", "my-nginx-3-2"}
	cluster.Pods = slices.DeleteFunc(cluster.Pods, func(p lab.Pod) bool { return !slices.Contains(pods, p.Name) })
	for i := range cluster.Pods {
		cluster.Pods[i].UDP = []uint16{80}
	}
	service := lab.SeedService()
	service.Ports = []lab.Port{{Name: "tcp", Port: 80}, {Name: "udp", Protocol: "UDP", Port: 80}}
	// Nodes reach pods of other racks by their default route.
	l := startInRacks(t, cluster, service, map[string]any{
		"proxy": map[string]any{"mode": "nftables", "directForwarding": true, "pathCheck": "default-route"}})
	return &directRacks{Lab: l, vips: bgpVIPs(l), routers: workers(l), standAlone: "k8s-rack-2-1"}
}

// forward asks for direct forwarding, or no more.
func (d *directRacks) forward(t testing.TB, direct bool) {
	t.Helper()
	updateService(t, d.Lab, "my-nginx", func(s *corev1.Service) {
		s.Annotations = map[string]string{}
		if direct {
			s.Annotations["landfall.dev/forwarding"] = "direct"
		}
	})
	if !direct {
		eventually(t, "the annotation is gone", func() error {
			for _, a := range d.Agents("proxy") {
				if forwardsDirectly(t, a) == nil {
					return fmt.Errorf("%s forwards directly", a.Node)
				}
			}
			return nil
		})
		return
	}
	d.wantDirect(t)
}

// wantDirect waits until all nodes hand connections to all endpoints over.
func (d *directRacks) wantDirect(t testing.TB) {
	t.Helper()
	for _, a := range d.Agents("proxy") {
		eventually(t, a.Node+" forwards directly", func() error { return forwardsDirectly(t, a) })
	}
}

// probe opens new connections to each address over TCP and UDP.
func (d *directRacks) probe(t testing.TB) (stop func() []lab.Report) {
	var probes []*lab.Probe
	for _, vip := range d.vips {
		for _, network := range []string{"tcp", "udp"} {
			probes = append(probes, d.StartProbe(t.Context(), lab.FarClientName, network, vip, 2*directEvery))
		}
	}
	return func() []lab.Report {
		reports := make([]lab.Report, len(probes))
		var all lab.Group
		for i, p := range probes {
			all.Run(func() error { reports[i] = p.Stop(); return nil })
		}
		_ = all.Wait()
		return reports
	}
}

// step does something that breaks no connection, and has none of UDP change its pod. It must leave each rack a node: a
// router that has lost its last way answers that there is none until the spine has told it of another.
func (d *directRacks) step(t *testing.T, name string, happen func()) {
	t.Helper()
	stop := d.probe(t)
	happen()
	for range 2 { // the second time nodes remember the connections
		d.use(t, name)
	}
	for i, report := range stop() {
		t.Logf("%s: %d connections and %d flows of UDP stand; new ones, %d: %s", name, len(d.flows), len(d.datagrams), i,
			report)
		if report.Answered == 0 || len(report.Failures) > 0 {
			t.Errorf("%s: new connections were lost: %s", name, report)
		}
	}
}

func (d *directRacks) use(t *testing.T, name string) {
	t.Helper()
	lost := use(d.flows)
	if d.flows = flowsWithout(d.flows, lost); len(lost) > 0 {
		t.Errorf("%s: %d of %d connections were lost", name, len(lost), len(d.flows)+len(lost))
	}
	pods := map[*rackFlow]string{}
	for _, f := range d.datagrams {
		pods[f] = f.pod
	}
	if lost = use(d.datagrams); len(lost) > 0 {
		t.Errorf("%s: %d of %d flows of UDP got no answer", name, len(lost), len(d.datagrams))
	}
	for _, f := range d.datagrams {
		if f.pod != pods[f] {
			t.Errorf("%s: a flow of UDP went from %s to %s", name, pods[f], f.pod)
		}
	}
}

// TestContract5DirectForwardingAcrossRacks has a Service of policy Cluster forwarded directly where only routers join
// the nodes, in both families: pods of other racks see the client's own address over TCP and UDP, with packets of any
// size that fit. No connection is lost when nodes drain and join, when the routers turn to other nodes and when agents
// are upgraded. When the way through the tunnel between two nodes is cut, the first masquerades instead.
func TestContract5DirectForwardingAcrossRacks(t *testing.T) {
	t.Parallel()
	d := startDirectRacks(t)
	d.flows = openDirect(t, d.Lab, "tcp", d.vips, 20) // these are masqueraded
	d.forward(t, true)
	wantClientsSeen(t, d.Lab, d.vips)
	d.anySize(t)
	d.flows = append(d.flows, openDirect(t, d.Lab, "tcp", d.vips, 150)...)
	d.datagrams = openDirect(t, d.Lab, "udp", d.vips, 50)

	const drained = `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`
	const serving = `{"spec":{"taints":null}}`
	for _, node := range []string{d.standAlone, "k8s-rack-3-1"} {
		d.step(t, "drain of "+node, func() {
			patchNode(t, d.Lab, node, drained)
			wantInRacks(t, d.Lab, otherNames(d.routers, node)...)
		})
		d.step(t, "join of "+node, func() {
			patchNode(t, d.Lab, node, serving)
			wantInRacks(t, d.Lab, d.routers...)
		})
	}
	d.step(t, "the spine has one way", func() { d.ways(t, 1) })
	d.step(t, "the spine has all ways", func() {
		d.ways(t, 16)
		wantInRacks(t, d.Lab, d.routers...)
	})
	d.step(t, "upgrade of all agents", func() {
		for _, node := range d.routers {
			restart(t, d.Agent("speaker", node), (*lab.Agent).Stop, 300*time.Millisecond)
			restart(t, d.Agent("proxy", node), (*lab.Agent).Stop, 300*time.Millisecond)
		}
		wantInRacks(t, d.Lab, d.routers...)
	})
	d.wantDirect(t)
	d.only(t, d.standAlone) // a rack's router without a node drops for a moment what the spine still sends there
	d.use(t, "all come in through one node")
	d.cutAndHeal(t)
	d.step(t, "all come in through all nodes", func() { d.only(t, d.routers...) })
	wantClientsSeen(t, d.Lab, d.vips)
}

// ways has the spine use at most so many ways to an address.
func (d *directRacks) ways(t testing.TB, most int) {
	t.Helper()
	lines := []string{fmt.Sprintf("router bgp %d", d.Cluster().ToR.ASN+100)}
	for _, family := range []string{"ipv4", "ipv6"} {
		lines = append(lines, "address-family "+family+" unicast", fmt.Sprintf("maximum-paths %d", most),
			"exit-address-family")
	}
	if err := d.Spine().Configure(t.Context(), lines...); err != nil {
		t.Fatal(err)
	}
	for _, vip := range d.vips {
		eventually(t, "the spine has its ways", func() error {
			hops, err := d.Spine().NextHops(t.Context(), host(vip.Addr()))
			if err != nil || len(hops) != min(most, d.Cluster().Racks) {
				return fmt.Errorf("ways to %s: %v, %w", vip, hops, err)
			}
			return nil
		})
	}
}

// only has these nodes announce the addresses, and no others.
func (d *directRacks) only(t testing.TB, nodes ...string) {
	t.Helper()
	const exclude = `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`
	for _, node := range nodes {
		patchNode(t, d.Lab, node, fmt.Sprintf(exclude, "null"))
	}
	for _, node := range otherNames(d.routers, nodes...) {
		patchNode(t, d.Lab, node, fmt.Sprintf(exclude, `""`))
	}
	wantInRacks(t, d.Lab, nodes...)
}

// anySize has packets that are larger than those that the network between the racks carries with the tunnel's headers:
// the kernels cut them, or tell the client to send smaller ones. Datagrams that come in pieces have to fit.
func (d *directRacks) anySize(t testing.TB) {
	t.Helper()
	for _, vip := range d.vips {
		for network, sizes := range map[string][]int{"tcp": {1300, 1400, 1450, 6000, 100_000}, "udp": {1300, 1400, 1450}} {
			for _, size := range sizes {
				text := strings.Repeat("x", size)
				for range 8 { // all pods, with a high probability
					eventually(t, fmt.Sprintf("%d bytes to %s over %s", size, vip, network), func() error {
						return plugin{d.Lab}.ping(t.Context(), lab.FarClientName, network, vip, text)
					})
				}
			}
		}
	}
}

// cutTunnel drops what comes out of the network for the tunnel between two nodes.
func (d *directRacks) cutTunnel(t testing.TB, a, b string) (heal func()) {
	t.Helper()
	run := func(node, script string) {
		t.Helper()
		if _, err := d.Exec(t.Context(), node, "nft", script); err != nil {
			t.Fatal(err)
		}
	}
	addrs := map[string]netip.Addr{}
	for _, n := range d.Cluster().Nodes {
		addrs[n.Name] = n.Addr
	}
	for node, other := range map[string]string{a: b, b: a} {
		run(node, "add table inet cut; add chain inet cut in { type filter hook prerouting priority -500; }; "+
			fmt.Sprintf("add rule inet cut in ip saddr %s udp dport 7948 drop; ", addrs[other])+
			fmt.Sprintf("add rule inet cut in ip6 saddr %s udp dport 7948 drop", lab.Twin(addrs[other])))
	}
	return func() {
		run(a, "delete table inet cut")
		run(b, "delete table inet cut")
	}
}

// wantAdvice waits until a node says something of direct forwarding.
func (d *directRacks) wantAdvice(t testing.TB, node, words string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s says %q", node, words), func() error {
		if err := forwardsDirectly(t, d.Agent("proxy", node)); err == nil || !strings.Contains(err.Error(), words) {
			return fmt.Errorf("it says %w", err)
		}
		return nil
	})
}

// cutAndHeal cuts the tunnel between the one node to which routers send and one with a pod: new connections to the pod
// are masqueraded, and go on to be when the tunnel is back.
func (d *directRacks) cutAndHeal(t *testing.T) {
	t.Helper()
	const far, pod = "k8s-rack-3-1", "my-nginx-3-1"
	stop := d.probe(t)
	heal := d.cutTunnel(t, d.standAlone, far)
	d.wantAdvice(t, d.standAlone, "without an answer through the tunnel: "+far)
	time.Sleep(500 * time.Millisecond) // rules follow what the node says
	for i, report := range stop() {
		t.Logf("the tunnel is cut, %d: %s", i, report)
	}
	for _, standing := range []*[]*rackFlow{&d.flows, &d.datagrams} {
		lost, through := use(*standing), 0
		for _, f := range *standing {
			if f.pod == pod {
				through++
			}
		}
		t.Logf("the tunnel is cut: %d of %d standing connections are lost, of %d to %s", len(lost), len(*standing),
			through, pod)
		*standing = flowsWithout(*standing, lost)
	}
	for _, vip := range d.vips {
		for _, network := range []string{"tcp", "udp"} {
			s := d.Spread(t.Context(), lab.FarClientName, network, vip, 60)
			own := d.Cluster().Far.Client
			if vip.Addr().Is6() {
				own = lab.Twin(own)
			}
			for name, sources := range s.SourcesOf {
				if masqueraded := name == pod; (sources[own] == 0) != masqueraded || len(sources) != 1 {
					t.Errorf("the tunnel is cut: %s sees clients of %s over %s as %v", name, vip, network, sources)
				}
			}
			if len(s.Failures) > 0 || len(s.Pods) != 3 {
				t.Errorf("the tunnel is cut: answers over %s from %v, failures %v", network, s.Pods, s.Failures)
			}
		}
	}
	d.step(t, "the tunnel is back", func() {
		heal()
		d.wantDirect(t)
	})
	wantClientsSeen(t, d.Lab, d.vips)
}
