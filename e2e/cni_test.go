package e2e

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// plugin is a network of pods, as a network plugin makes it, with a Service in both families.
type plugin struct{ *lab.Lab }

// TestNetworkPlugins runs the same table on the network of pods of each plugin: VIPs, node ports,
// hairpin, policy Local, packets of any size, moves of an address under connections, and routes
// that are not there yet.
func TestNetworkPlugins(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		cni   lab.CNI
		modes []string
	}{
		{"flannel host-gw", lab.HostGW, []string{"nftables"}}, // as in all other tests
		{"flannel vxlan", lab.VXLAN, []string{"nftables", "iptables"}},
		{"calico", lab.Calico, []string{"nftables", "iptables"}},
		{"calico vxlan", lab.CalicoVXLAN, []string{"nftables"}},
		{"calico ipip", lab.CalicoIPIP, []string{"nftables", "iptables"}},
	} {
		for _, mode := range row.modes {
			t.Run(row.name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				testPlugin(t, startPlugin(t, row.cni, mode))
			})
		}
	}
}

func startPlugin(t *testing.T, cni lab.CNI, mode string) plugin {
	t.Helper()
	cluster := lab.SeedCluster()
	cluster.DualStack, cluster.CNI = true, cni
	for i := range cluster.Pods {
		if cluster.Pods[i].App == "my-nginx" {
			cluster.Pods[i].UDP = []uint16{80}
		}
	}
	l := labtest.Start(t, cluster, lab.Options{Values: map[string]any{"proxy": map[string]any{"mode": mode}}})
	if err := l.ApplyYAML(t.Context(), dualStackPool); err != nil {
		t.Fatal(err)
	}
	s := lab.SeedService()
	s.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	s.Ports = []lab.Port{{Name: "tcp", Port: 80, NodePort: 31428},
		{Name: "udp", Protocol: "UDP", Port: 80, NodePort: 31428}}
	if err := l.AddService(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String(), seedVIP6.Addr().String())
	return plugin{l}
}

func testPlugin(t *testing.T, p plugin) {
	p.tcpAndUDP(t, "policy Cluster", func(t *testing.T, network string, f pluginFamily) {
		for _, client := range []string{lab.ClientName, lab.FarClientName} {
			s := wantAnswers(t, p.Lab, client, network, f.vip, "my-nginx-1", "my-nginx-2")
			if s.Sources[f.of(p.Cluster().LAN.Client)]+s.Sources[f.of(p.Cluster().Far.Client)] > 0 {
				t.Errorf("pods saw the client's own address: %v", s.Sources)
			}
		}
		for _, node := range p.Cluster().Nodes {
			wantAnswers(t, p.Lab, lab.ClientName, network, f.nodePort(node), "my-nginx-1", "my-nginx-2")
		}
		// Each pod reaches both, so itself too.
		for _, from := range []string{"my-nginx-1", "my-nginx-2", "coredns-2", "k8s-worker-177", "k8s-worker-178"} {
			for _, to := range []netip.AddrPort{f.vip, f.clusterIP, f.nodePort(p.Cluster().Nodes[1])} {
				wantAnswers(t, p.Lab, from, network, to, "my-nginx-1", "my-nginx-2")
			}
		}
		s := wantAnswers(t, p.Lab, "coredns-2", network, f.clusterIP, "my-nginx-1", "my-nginx-2")
		if pod := f.of(netip.MustParseAddr("192.168.177.10")); s.Sources[pod] != 20 {
			t.Errorf("pods saw %v behind the cluster IP, want the pod's own address", s.Sources)
		}
	})
	p.tcpAndUDP(t, "packets of any size", p.anySize)
	t.Run("an address moves under connections", p.moves)
	t.Run("the routes come late", p.routes)

	setLocal(t, p.Lab)
	p.tcpAndUDP(t, "policy Local", func(t *testing.T, network string, f pluginFamily) {
		owner := wantAnswererAmong(t, p.Lab, f.vip.Addr(), "k8s-worker-178", "k8s-worker-179")
		own := map[string]string{"k8s-worker-178": "my-nginx-1", "k8s-worker-179": "my-nginx-2"}
		for _, client := range []struct {
			name string
			addr netip.Addr
		}{{lab.ClientName, p.Cluster().LAN.Client}, {lab.FarClientName, p.Cluster().Far.Client}} {
			p.sees(t, client.name, network, f.vip, own[owner], f.of(client.addr))
			for _, node := range p.Cluster().Nodes {
				if pod, has := own[node.Name]; has {
					p.sees(t, client.name, network, f.nodePort(node), pod, f.of(client.addr))
				}
			}
		}
		eventually(t, "the node port of a node without a pod does not answer", func() error {
			a, err := p.Ask(t.Context(), lab.FarClientName, network, f.nodePort(p.Cluster().Nodes[1]))
			if err == nil {
				return fmt.Errorf("%s answers", a.Pod)
			}
			return nil
		})
		for _, from := range []string{"my-nginx-1", "my-nginx-2", "coredns-2", "k8s-worker-177"} {
			wantAnswers(t, p.Lab, from, network, f.vip, "my-nginx-1", "my-nginx-2")
		}
	})
}

// sees waits until one pod answers all requests, and sees the client's own address.
func (p plugin) sees(t *testing.T, from, network string, to netip.AddrPort, pod string, client netip.Addr) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s answers %s at %s over %s, and sees its address", pod, from, to, network), func() error {
		if s := p.Spread(t.Context(), from, network, to, 20); s.Pods[pod] != 20 || s.Sources[client] != 20 {
			return fmt.Errorf("answers by %v, sources %v, failures %q", s.Pods, s.Sources, s.Failures)
		}
		return nil
	})
}

// pluginFamily are the addresses of the Service in one family.
type pluginFamily struct {
	ipv6           bool
	vip, clusterIP netip.AddrPort
}

func (f pluginFamily) of(addr netip.Addr) netip.Addr {
	if f.ipv6 {
		return lab.Twin(addr)
	}
	return addr
}

func (f pluginFamily) nodePort(n lab.Node) netip.AddrPort {
	return netip.AddrPortFrom(f.of(n.Addr), 31428)
}

func (p plugin) families(t *testing.T) []pluginFamily {
	t.Helper()
	s, err := p.Kube().CoreV1().Services("default").Get(t.Context(), "my-nginx", metav1.GetOptions{})
	if err != nil || len(s.Spec.ClusterIPs) != 2 {
		t.Fatalf("cluster IPs %v, %v", s.Spec.ClusterIPs, err)
	}
	at := func(i int) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIPs[i]), 80) }
	return []pluginFamily{{false, seedVIP, at(0)}, {true, seedVIP6, at(1)}}
}

func (p plugin) tcpAndUDP(t *testing.T, name string, f func(*testing.T, string, pluginFamily)) {
	for _, family := range p.families(t) {
		for _, network := range []string{"tcp", "udp"} {
			t.Run(fmt.Sprintf("%s, %s over %s", name, network, lb.FamilyOf(family.vip.Addr())),
				func(t *testing.T) { f(t, network, family) })
		}
	}
}

// anySize has packets that are larger than those that the network between the nodes carries: the
// kernels cut them, or tell the sender to send smaller ones, whatever was translated on the way.
// Pods do not send them to the node port of another node: where bridges have packets pass rules,
// Linux forgets in IPv6 how small a pod has cut its datagrams, and sends them on whole if the LAN
// takes that.
func (p plugin) anySize(t *testing.T, network string, f pluginFamily) {
	nodePort := f.nodePort(p.Cluster().Nodes[1])
	for _, from := range []string{lab.ClientName, lab.FarClientName, "coredns-2", "my-nginx-1"} {
		targets := []netip.AddrPort{f.vip, nodePort}
		if from == "my-nginx-1" {
			targets = targets[:1]
		}
		for _, to := range targets {
			for _, size := range []int{1300, 1400, 1450, 6000} {
				text := strings.Repeat("x", size)
				for range 4 { // both pods, with a high probability
					eventually(t, fmt.Sprintf("%d bytes from %s to %s over %s", size, from, to, network), func() error {
						return p.ping(t.Context(), from, network, to, text)
					})
				}
			}
		}
	}
}

// ping sends a text that comes back.
func (p plugin) ping(ctx context.Context, from, network string, to netip.AddrPort, text string) error {
	conn, err := p.Dial(ctx, from, network, to.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := conn.Write([]byte(text + "\n")); err != nil {
		return err
	}
	answer, err := bufio.NewReaderSize(conn, 64<<10).ReadString('\n')
	if err == nil && !strings.Contains(answer, text) {
		err = fmt.Errorf("the answer has %d bytes", len(answer))
	}
	return err
}

// moves has a node give its addresses up and take them back, twice, while connections go on.
func (p plugin) moves(t *testing.T) {
	const exclude = `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`
	for _, f := range p.families(t) {
		was := answerer(t, p.Lab, f.vip.Addr())
		near, far := startFlows(t, p.Lab, f.vip, 40), startFlowsFrom(t, p.Lab, lab.FarClientName, f.vip, 40)
		probe := p.StartProbe(t.Context(), lab.FarClientName, "tcp", f.vip, newEvery)
		for range 2 {
			patchNode(t, p.Lab, was, fmt.Sprintf(exclude, `""`))
			heir := wantAnswererAmong(t, p.Lab, f.vip.Addr(), otherThan(p.Lab, was)...)
			time.Sleep(time.Second)
			patchNode(t, p.Lab, was, fmt.Sprintf(exclude, "null"))
			was = wantAnswererAmong(t, p.Lab, f.vip.Addr(), was, heir)
			time.Sleep(500 * time.Millisecond)
		}
		report, lost := probe.Stop(), near.stop()+far.stop()
		t.Logf("%s: %s; long-lived: %d of 80 lost", f.vip, report, lost)
		if report.Failed() > 0 || report.Answered == 0 || lost > 0 {
			t.Errorf("%s: connections were lost: %s; long-lived: %d of 80", f.vip, report, lost)
		}
	}
}

// routes takes the way to pods from the node that answers, as before its plugin has started: others
// take the address over, the node says why, and delivers again once the way is there.
func (p plugin) routes(t *testing.T) {
	vip := seedVIP.Addr()
	was := answerer(t, p.Lab, vip)
	if err := p.StopCNI(t.Context(), was); err != nil {
		t.Fatal(err)
	}
	wantAnswererAmong(t, p.Lab, vip, otherThan(p.Lab, was)...)
	says := func(want lb.Reason) {
		eventually(t, fmt.Sprintf("the proxy of %s says %q", was, want), func() error {
			got, err := pathReason(t, p.Lab, was, vip)
			if err == nil && got != want {
				err = fmt.Errorf("it says %q", got)
			}
			return err
		})
	}
	says(lb.ReasonPodRouteMissing)
	if err := p.StartCNI(t.Context(), was); err != nil {
		t.Fatal(err)
	}
	says("")
	for _, target := range []netip.AddrPort{seedVIP, seedVIP6} {
		wantAnswers(t, p.Lab, lab.ClientName, "tcp", target, "my-nginx-1", "my-nginx-2")
	}
}
