package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// bootNode is a node with a pod of the Service, which the advertisement below prefers.
const bootNode = "k8s-worker-178"

const preferBootNode = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec: {addresses: [172.26.236.180-172.26.236.189]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec: {preferredNodes: [{weight: 50, nodeSelector: {matchLabels: {kubernetes.io/hostname: ` + bootNode + `}}}]}
`

// boots is where a node boots: over ARP and NDP, or BGP.
type boots struct {
	*lab.Lab
	vip  netip.AddrPort
	vips []netip.AddrPort // of all families, the first vip
	from string           // a client
	// announces waits until bootNode announces a VIP, or until only others do.
	announces func(t testing.TB, vip netip.Addr, does bool)
}

// served waits until the node announces the VIPs, unserved until only others do.
func (b boots) served(t testing.TB)   { t.Helper(); b.all(t, true) }
func (b boots) unserved(t testing.TB) { t.Helper(); b.all(t, false) }

func (b boots) all(t testing.TB, does bool) {
	t.Helper()
	for _, vip := range b.vips {
		b.announces(t, vip.Addr(), does)
	}
}

func bootsOverL2(t testing.TB) boots { return bootsOverL2With(t, lab.Options{}) }

func bootsOverL2With(t testing.TB, options lab.Options) boots {
	l := labtest.Start(t, lab.SeedCluster(), options)
	if err := l.ApplyYAML(t.Context(), preferBootNode); err != nil {
		t.Fatal(err)
	}
	seedService(t, l)
	return onLAN(l, seedVIP)
}

// bootsOnDualStack has both families.
func bootsOnDualStack(t testing.TB, options lab.Options) boots {
	cluster := lab.SeedCluster()
	cluster.DualStack = true
	l := labtest.Start(t, cluster, options)
	const of4, of6 = "172.26.236.180-172.26.236.189", `"fd00:172:26:236::180-fd00:172:26:236::189"`
	if err := l.ApplyYAML(t.Context(), strings.Replace(preferBootNode, of4, of4+", "+of6, 1)); err != nil {
		t.Fatal(err)
	}
	service := lab.SeedService()
	service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String(), seedVIP6.Addr().String())
	return onLAN(l, seedVIP, seedVIP6)
}

func onLAN(l *lab.Lab, vips ...netip.AddrPort) boots {
	return boots{l, vips[0], vips, lab.ClientName, func(t testing.TB, vip netip.Addr, does bool) {
		t.Helper()
		nodes := []string{bootNode}
		if !does {
			nodes = otherThan(l, bootNode)
		}
		wantAnswererAmong(t, l, vip, nodes...)
	}}
}

func bootsOverBGP(t testing.TB) boots { return bootsOverBGPWith(t, lab.Options{}, false) }

func bootsOverBGPWith(t testing.TB, options lab.Options, dual bool) boots {
	l := startBGPWith(t, options, lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500}, dual, "")
	return boots{l, bgpVIP, bgpVIPs(l), lab.FarClientName, func(t testing.TB, vip netip.Addr, does bool) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s is routed to %s: %v", vip, bootNode, does), func() error {
			nodes, err := l.Routers()[0].Nodes(t.Context(), host(vip))
			if err == nil && (slices.Contains(nodes, bootNode) != does || len(nodes) == 0) {
				err = fmt.Errorf("it is routed to %v", nodes)
			}
			return err
		})
	}}
}

// TestContract1ANodeBoots has proxy and speaker of a node up before its network plugin (CNI), in both families: while
// there is no bridge for pods and no route to any, it announces nothing, and no client is met by
// silence; when they are there, it announces again.
func TestContract1ANodeBoots(t *testing.T) {
	t.Parallel()
	onLANWith := func(mode string) func(testing.TB) boots {
		return func(t testing.TB) boots {
			return bootsOnDualStack(t, lab.Options{Values: map[string]any{"proxy": map[string]any{"mode": mode}}})
		}
	}
	for _, over := range []struct {
		name  string
		start func(testing.TB) boots
	}{
		{"L2", onLANWith("nftables")}, {"L2, iptables", onLANWith("iptables")},
		{"BGP", func(t testing.TB) boots { return bootsOverBGPWith(t, lab.Options{}, true) }},
	} {
		t.Run(over.name, func(t *testing.T) {
			t.Parallel()
			b := over.start(t)
			t.Run("Cluster", func(t *testing.T) { b.boot(t) })
			setLocal(t, b.Lab)
			t.Run("Local", func(t *testing.T) { b.boot(t) })
		})
	}
}

func (b boots) boot(t *testing.T) {
	b.served(t)
	// Other nodes would send connections to a pod that has no network.
	pod := ""
	for _, p := range b.Pods("my-nginx") {
		if p.Node == bootNode {
			pod = p.Name
		}
	}
	b.conditions(t, pod, lab.NotReady)
	programs := []string{"proxy", "speaker"}
	for _, program := range []string{"speaker", "proxy"} {
		if err := b.Agent(program, bootNode).Stop(); err != nil {
			t.Fatal(err)
		}
	}
	b.unserved(t)
	mustExec(t, b.Lab, bootNode, "nft", "flush", "ruleset")
	if err := b.StopCNI(t.Context(), bootNode); err != nil {
		t.Fatal(err)
	}
	elsewhere := ""
	for _, p := range b.Pods("my-nginx") {
		if p.Node != bootNode {
			elsewhere = p.Name
		}
	}
	for _, vip := range b.vips {
		wantAnswers(t, b.Lab, b.from, "tcp", vip, elsewhere)
	}
	wantNone := b.probe(t)
	for _, program := range programs {
		if err := b.Agent(program, bootNode).Start(); err != nil {
			t.Fatal(err)
		}
	}
	for _, program := range programs {
		if err := b.Agent(program, bootNode).WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(3 * time.Second)
	b.unserved(t)
	wantNone()

	wantNone = b.probe(t)
	if err := b.StartCNI(t.Context(), bootNode); err != nil {
		t.Fatal(err)
	}
	b.conditions(t, pod, lab.Ready)
	b.served(t)
	time.Sleep(time.Second)
	wantNone()
}

// probe opens new connections to all VIPs until the function that it returns is called, which wants none lost.
func (b boots) probe(t *testing.T) (wantNone func()) {
	t.Helper()
	var probes []*lab.Probe
	for _, vip := range b.vips {
		probes = append(probes, b.StartProbe(t.Context(), b.from, "tcp", vip, newEvery))
	}
	return func() {
		t.Helper()
		for _, p := range probes {
			wantNoneLost(t, p.Stop())
		}
	}
}

func (b boots) conditions(t *testing.T, pod string, c lab.Conditions) {
	t.Helper()
	if err := b.SetConditions(t.Context(), pod, c); err != nil {
		t.Fatal(err)
	}
}

// pathFault is something that takes the way to pods of some families from bootNode, and gives it back.
type pathFault struct {
	name       string
	families   []lb.Family
	reason     lb.Reason
	make, mend func(testing.TB, *lab.Lab)
	// local is set for one that needs the policy Local, or no pod of the Service on the node.
	local bool
	// ofNode is set for one that the Node's conditions tell the speaker, and not the kernel the proxy.
	ofNode bool
}

// run runs commands on bootNode, each a list of words.
func run(commands ...string) func(testing.TB, *lab.Lab) {
	return func(t testing.TB, l *lab.Lab) {
		t.Helper()
		for _, command := range commands {
			if _, err := l.Exec(t.Context(), bootNode, strings.Fields(command)...); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// pathFaults are those of a node of a cluster with two families.
func pathFaults(c lab.Cluster) []pathFault {
	forwarding := func(family lb.Family, name string) pathFault {
		return pathFault{name: name, families: []lb.Family{family}, reason: lb.ReasonForwardingOff,
			make: run("sysctl -qw " + name + "=0"), mend: run("sysctl -qw " + name + "=1")}
	}
	cni := func(f func(*lab.Lab, context.Context, string) error) func(testing.TB, *lab.Lab) {
		return func(t testing.TB, l *lab.Lab) {
			if err := f(l, t.Context(), bootNode); err != nil {
				t.Fatal(err)
			}
		}
	}
	both := []lb.Family{lb.IPv4, lb.IPv6}
	condition := func(kind corev1.NodeConditionType, bad, good corev1.ConditionStatus, reason lb.Reason) pathFault {
		set := func(to corev1.ConditionStatus) func(testing.TB, *lab.Lab) {
			return func(t testing.TB, l *lab.Lab) { setNodeCondition(t, l, bootNode, kind, to) }
		}
		return pathFault{name: string(kind), families: both, reason: reason, make: set(bad), mend: set(good), ofNode: true}
	}
	var add, del []string
	gateway := ""
	for _, n := range c.Nodes {
		to, via := lab.TwinPrefix(n.PodNetwork), "via "+lab.Twin(n.Addr).String()
		if n.Name == bootNode {
			via = "dev " + lab.PodBridge
			gateway = netip.PrefixFrom(lab.Twin(n.Gateway()), to.Bits()).String()
		}
		add = append(add, fmt.Sprintf("ip route add %s %s", to, via))
		del = append(del, fmt.Sprintf("ip route del %s", to))
	}
	faults := []pathFault{
		{name: "routes and cni0", families: both, reason: lb.ReasonPodRouteMissing, make: cni((*lab.Lab).StopCNI),
			mend: cni((*lab.Lab).StartCNI)},
		{name: "IPv6 routes", families: both[1:], reason: lb.ReasonPodRouteMissing, make: run(del...), mend: run(add...)},
		forwarding(lb.IPv4, "net.ipv4.ip_forward"), forwarding(lb.IPv4, "net.ipv4.conf.eth0.forwarding"),
		forwarding(lb.IPv6, "net.ipv6.conf.all.forwarding"), // those of interfaces are nothing to Linux there
		condition(corev1.NodeNetworkUnavailable, corev1.ConditionTrue, corev1.ConditionFalse, lb.ReasonNetworkUnavailable),
		condition(corev1.NodeReady, corev1.ConditionFalse, corev1.ConditionTrue, lb.ReasonNodeNotReady),
		{name: "cni0 down", families: both, reason: lb.ReasonPodRouteMissing,
			make: run("ip link set " + lab.PodBridge + " down"),
			mend: run("ip link set "+lab.PodBridge+" up", // which lost its IPv6 address when it went down
				"ip addr add "+gateway+" nodad dev "+lab.PodBridge), local: true},
		{name: "conntrack full", families: both, reason: lb.ReasonConntrackFull, make: func(t testing.TB, l *lab.Lab) {
			t.Helper()
			run("sysctl -qw net.netfilter.nf_conntrack_udp_timeout=600")(t, l) // until the fault is mended
			fillConntrack(t, l, bootNode, 995)
		}, mend: run("sysctl -qw net.netfilter.nf_conntrack_udp_timeout=30", "conntrack -F")},
	}
	if nstest.ForcesForwarding() {
		forced := forwarding(lb.IPv6, "net.ipv6.conf.all.forwarding")
		forced.name = "force_forwarding in its place"
		forced.mend = run("sysctl -qw net.ipv6.conf.eth0.force_forwarding=1",
			"sysctl -qw net.ipv6.conf."+lab.PodBridge+".force_forwarding=1")
		faults = append(faults, forced)
	}
	return faults
}

// pathReason returns why a node's proxy does not deliver the VIP.
func pathReason(t testing.TB, l *lab.Lab, node string, vip netip.Addr) (lb.Reason, error) {
	text, err := l.Agent("proxy", node).Get(t.Context(), "/v1/status")
	if err != nil {
		return "", err
	}
	var status struct {
		Services []struct {
			VIPs []struct {
				VIP    netip.Addr `json:"vip"`
				Reason lb.Reason  `json:"reason"`
			} `json:"vips"`
		} `json:"services"`
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return "", fmt.Errorf("status of %s: %w", node, err)
	}
	for _, s := range status.Services {
		for _, v := range s.VIPs {
			if v.VIP == vip {
				return v.Reason, nil
			}
		}
	}
	return "", errors.New("the proxy does not know the VIP")
}

// setNodeCondition sets a condition of a Node.
func setNodeCondition(t testing.TB, l *lab.Lab, node string, kind corev1.NodeConditionType, to corev1.ConditionStatus) {
	t.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":%q,"reason":"Test"}]}}`, kind, to)
	_, err := l.Kube().CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
}

// TestContract1ThePathGoes takes the way to pods of one family or both from a node that announces, in each way: other
// nodes announce the addresses of these families, and the one does again when the way comes back.
func TestContract1ThePathGoes(t *testing.T) {
	t.Parallel()
	options := lab.Options{Values: map[string]any{"speaker": map[string]any{"requireReady": true}}}
	for name, start := range map[string]func(testing.TB) boots{
		"L2":  func(t testing.TB) boots { return bootsOnDualStack(t, options) },
		"BGP": func(t testing.TB) boots { return bootsOverBGPWith(t, options, true) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			start(t).losePath(t)
		})
	}
}

func (b boots) losePath(t *testing.T) {
	for _, f := range pathFaults(b.Cluster()) {
		t.Run(f.name, func(t *testing.T) {
			if f.local {
				setLocal(t, b.Lab)
			}
			b.served(t)
			f.make(t, b.Lab)
			for _, at := range b.vips {
				vip, want := at.Addr(), lb.Reason("")
				if slices.Contains(f.families, lb.FamilyOf(vip)) {
					want = f.reason
				}
				b.announces(t, vip, want == "")
				if f.ofNode {
					wantReason(t, b.Lab, bootNode, vip, string(want))
					continue
				}
				eventually(t, "the proxy says why", func() error {
					got, err := pathReason(t, b.Lab, bootNode, vip)
					if err == nil && got != want {
						err = fmt.Errorf("it says %q of %s, want %q", got, vip, want)
					}
					return err
				})
			}
			b.answered(t)
			f.mend(t, b.Lab)
			b.served(t)
			b.answered(t)
		})
	}
}

// answered waits until a client is answered at each VIP.
func (b boots) answered(t *testing.T) {
	t.Helper()
	for _, vip := range b.vips {
		eventually(t, fmt.Sprint("a client is answered at ", vip), func() error {
			_, err := b.Ask(t.Context(), b.from, "tcp", vip)
			return err
		})
	}
}

// TestContract1APodRouteGoes takes the route to one of two pods from the node that answers: the node
// goes on with the other pod, and no connection goes where there is no way.
func TestContract1APodRouteGoes(t *testing.T) {
	t.Parallel()
	b := bootsOverL2(t)
	b.served(t)
	wantAnswers(t, b.Lab, b.from, "tcp", b.vip, "my-nginx-1", "my-nginx-2")
	var own string
	var there netip.Prefix
	for _, p := range b.Pods("my-nginx") {
		if p.Node == bootNode {
			own = p.Name
			continue
		}
		for _, n := range b.Cluster().Nodes {
			if n.Name == p.Node {
				there = n.PodNetwork
			}
		}
	}
	mustExec(t, b.Lab, bootNode, "ip", "route", "del", there.String())
	wantAnswers(t, b.Lab, b.from, "tcp", b.vip, own)
	b.served(t)
	probe := b.StartProbe(t.Context(), b.from, "tcp", b.vip, newEvery)
	time.Sleep(time.Second)
	wantNoneLost(t, probe.Stop())
}
