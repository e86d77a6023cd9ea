//go:build vm

package vm

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	echoPort = 81 // of the Services, and of a backend that keeps its connections
	kept     = 10 // connections that stay open
)

// Two Services: one of each external policy.
func services(w cases.World) (all []runtime.Object, slices []runtime.Object) {
	for i, policy := range []corev1.ServiceExternalTrafficPolicy{
		corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal,
	} {
		name, vip, cluster := strings.ToLower(string(policy)), w.VIP, w.ClusterIP
		if i == 1 {
			vip, cluster = w.VIP2, w.ClusterIP.Next()
		}
		svc := &corev1.Service{
			TypeMeta:   metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: name, ResourceVersion: "1"},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIP: cluster.String(),
				ClusterIPs: []string{cluster.String()}, IPFamilies: []corev1.IPFamily{corev1.IPFamily(w.Family)},
				ExternalTrafficPolicy: policy, InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyCluster),
				Ports: []corev1.ServicePort{
					{Name: "web", Protocol: corev1.ProtocolTCP, Port: cases.ServicePort, NodePort: cases.NodePort + int32(i),
						TargetPort: intstr.FromInt32(int32(cases.BackendPort(lb.TCP)))},
					{Name: "dns", Protocol: corev1.ProtocolUDP, Port: cases.ServicePort, NodePort: cases.NodePort + int32(i),
						TargetPort: intstr.FromInt32(int32(cases.BackendPort(lb.UDP)))},
					{Name: "echo", Protocol: corev1.ProtocolTCP, Port: echoPort, NodePort: cases.NodePort + 10 + int32(i),
						TargetPort: intstr.FromInt32(echoPort)},
				}},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{
				Ingress: []corev1.LoadBalancerIngress{{IP: vip.String()}}}},
		}
		slice := &discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "test", Name: name, ResourceVersion: "1",
				Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressType(w.Family),
			Ports: []discoveryv1.EndpointPort{
				{Name: new("web"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(cases.BackendPort(lb.TCP)))},
				{Name: new("dns"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(cases.BackendPort(lb.UDP)))},
				{Name: new("echo"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(echoPort))},
			},
		}
		for at, node := range map[string]string{"local": cases.Here, "remote": cases.There} {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{w.Endpoint(at).String()},
				NodeName: new(node), Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
		}
		all, slices = append(all, svc), append(slices, slice)
	}
	return all, slices
}

// node is a node with clients and pods around it, and programs that run on it.
type node struct {
	*cases.Site
	folder, kubeconfig string
	cluster            *cluster
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{Site: cases.NewSite(t, cases.WorldOf(lb.IPv4)), folder: t.TempDir()}
	n.kubeconfig = filepath.Join(n.folder, "kubeconfig")
	svcs, slices := services(n.World)
	object := &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: cases.Here, ResourceVersion: "1",
			Labels: map[string]string{corev1.LabelOSStable: "linux"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: n.World.Node.String()}}}}
	n.cluster = newCluster(t, n, n.configure(t), object)
	objects := api{objects: map[string][]runtime.Object{"services": svcs, "endpointslices": slices, "nodes": {object}},
		cluster: n.cluster}
	n.Node.Do(t, func() error { return objects.serve(t, n.kubeconfig) })
	for _, at := range []string{"local", "remote"} {
		n.echo(t, at)
	}
	return n
}

// echo answers on connections that stay open.
func (n *node) echo(t *testing.T, at string) {
	n.At[at].Serve(t, netip.AddrPortFrom(n.World.Endpoint(at), echoPort).String(),
		func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
}

// start starts a program on the node. The function that it returns ends it and waits.
func (n *node) start(t *testing.T, argv ...string) (stop func()) {
	t.Helper()
	log, err := os.Create(filepath.Join(n.folder, filepath.Base(argv[0])+".log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("ip", append([]string{"netns", "exec", n.Node.Name}, argv...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		end := os.Interrupt
		if t.Failed() {
			end = syscall.SIGQUIT // which has a program of Go say what it is at
			stacks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", cmd.Process.Pid))
			for _, stack := range stacks {
				text, _ := os.ReadFile(stack)
				t.Logf("%s in the kernel:\n%s", argv[0], text)
			}
		}
		_ = cmd.Process.Signal(end)
		kill := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // kube-proxy ends by the signal
		kill.Stop()
		log.Close()
	})
	t.Cleanup(func() {
		stop()
		text, err := os.ReadFile(log.Name())
		switch {
		case err != nil:
			t.Error(err)
		case t.Failed():
			t.Logf("%s:\n%s", argv[0], text[max(0, len(text)-32_000):])
		default:
			for line := range strings.Lines(string(text)) { // what another kernel lacks
				if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
					t.Logf("%s: %s", filepath.Base(argv[0]), line)
				}
			}
		}
	})
	return stop
}

// configure writes kube-proxy's configuration, and returns it.
func (n *node) configure(t *testing.T) (config string) {
	t.Helper()
	config = fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: %q}
hostnameOverride: %q
clusterCIDR: %q
mode: ipvs
ipvs: {scheduler: rr, strictARP: true}
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, n.kubeconfig, cases.Here, n.World.Pods)
	if err := os.WriteFile(n.kubeProxyConfig(), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return config
}

func (n *node) kubeProxyConfig() string { return filepath.Join(n.folder, "config.conf") }

func (n *node) kubeProxy(t *testing.T) (stop func()) {
	return n.start(t, kubeProxy, "--config="+n.kubeProxyConfig())
}

func (n *node) landfall(t *testing.T, mode string, more ...string) (stop func()) {
	return n.start(t, append([]string{landfallProxy, "--mode=" + mode, "--kubeconfig=" + n.kubeconfig,
		"--node-name=" + cases.Here, "--cluster-cidr=" + n.World.Pods.String(),
		"--feed-socket=" + filepath.Join(n.folder, "feed.sock"), "--metrics-bind-address=127.0.0.1:7482",
		"--status-socket="}, more...)...)
}

// The programs.
const (
	kubeProxy     = "/landfall/kube-proxy"
	landfallProxy = "/landfall/landfall-proxy"
	landfallctl   = "/landfall/landfallctl"
)

// get asks a program on the node over HTTP, and returns its answer; "" unless it is 200.
func (n *node) get(t *testing.T, url string) (body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	var conn net.Conn
	n.Node.Do(t, func() error {
		conn, _ = net.DialTimeout("tcp", request.Host, 10*time.Second)
		return nil
	})
	if conn == nil {
		return ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if request.Write(conn) != nil {
		return ""
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), request)
	if err != nil || response.StatusCode != http.StatusOK {
		return ""
	}
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return ""
	}
	return string(text)
}

// eventually waits for long. It looks seldom, as looking is what takes time on an emulated processor, which skips idle
// time.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Minute); !f(); time.Sleep(500 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so: %s", what)
		}
	}
}

// synced reports whether kube-proxy has written all of its rules, for both families.
func (n *node) synced(t *testing.T) bool {
	families := 0
	for line := range strings.Lines(n.get(t, "http://127.0.0.1:10249/metrics")) {
		if strings.HasPrefix(line, "kubeproxy_sync_proxy_rules_last_timestamp_seconds{") && !strings.HasSuffix(line, " 0\n") {
			families++
		}
	}
	return families == 2
}

// leftovers are what kube-proxy's IPVS mode has in the kernel. The sets of IPv6, which its cleanup
// forgets (1.35), are left out: no rule uses them then.
func (n *node) leftovers(t *testing.T) (virtual, sets, links, chains int) {
	virtual = len(lines(n.Node.Run(t, "ipvsadm", "-Ln"))) - 3 // headings
	for _, set := range lines(n.Node.Run(t, "ipset", "list", "-n")) {
		if !strings.HasPrefix(set, "KUBE-6-") {
			sets++
		}
	}
	links = len(lines(n.Node.Run(t, "ip", "-o", "link", "show", "type", "dummy")))
	for _, line := range lines(n.Node.Run(t, "iptables-save")) {
		if strings.HasPrefix(line, ":KUBE-") && !strings.HasPrefix(line, ":KUBE-FIREWALL") &&
			!strings.HasPrefix(line, ":KUBE-KUBELET-CANARY") {
			chains++
		}
	}
	return virtual, sets, links, chains
}

func lines(text string) (all []string) {
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) != "" {
			all = append(all, line)
		}
	}
	return all
}

// landfallctl migrate kube-proxy takes a node with kube-proxy in IPVS mode over under traffic, and gives it back. The
// proxy runs with the plan's values, and once more in iptables mode, which auto takes on older kernels.
func TestIPVSIsTakenOverAndGivenBack(t *testing.T) {
	for _, mode := range []string{"auto", "iptables"} {
		t.Run(mode, func(t *testing.T) { takeOver(t, newNode(t), mode) })
	}
}

func takeOver(t *testing.T, n *node, mode string) {
	c := n.cluster
	eventually(t, "kube-proxy serves by IPVS", func() bool { c.sync(t); return c.serves })
	virtual, sets, links, chains := n.leftovers(t)
	t.Logf("kube-proxy has %d lines of virtual servers, %d sets, %d dummy interface, %d chains", virtual, sets, links, chains)
	r, throughIPVS := n.traffic(t), n.open(t)
	r.next(t, "kube-proxy")
	scheduler := n.planned(t)
	r.some(t, 5*len(ways))

	r.next(t, "Landfall beside kube-proxy")
	stopLandfall := n.landfall(t, mode, "--scheduler="+scheduler)
	eventually(t, "Landfall serves", func() bool { return n.get(t, "http://127.0.0.1:7482/readyz") != "" })
	t.Logf("Landfall runs in %s mode", n.mode(t))
	c.installed(t)
	r.some(t, 5*len(ways))
	before := n.connectionsOfIPVS(t)
	throughLandfall := n.open(t)
	if count := alive(throughLandfall); count != kept {
		t.Errorf("%d of %d connections through Landfall answer", count, kept)
	}
	if after := n.connectionsOfIPVS(t); after != before {
		t.Errorf("IPVS had %s connections and has %s: Landfall does not get new ones", before, after)
	}

	var began []string
	c.began = func(what string) {
		if began = append(began, what); len(began) == 2 { // the first cleanup
			if count := alive(throughIPVS); count != kept {
				t.Errorf("%d of %d connections through IPVS live until the cleanup", count, kept)
			}
		}
		r.some(t, 5*len(ways))
		r.next(t, what)
	}
	c.migrate(t, "--apply")
	r.some(t, 5*len(ways))
	want := []string{"kube-proxy has stopped", "kube-proxy --cleanup", "kube-proxy --cleanup"}
	if !slices.Equal(began, want) {
		t.Errorf("--apply did %q, want %q", began, want)
	}
	if virtual, sets, links, chains := n.leftovers(t); virtual+sets+links+chains > 0 {
		t.Errorf("kube-proxy --cleanup leaves %d virtual servers, %d sets, %d dummy interfaces, %d chains:\n%s", virtual, sets,
			links, chains, n.Node.Run(t, "iptables-save"))
	}
	t.Logf("%d of %d connections through IPVS live after the cleanup", alive(throughIPVS), kept)
	if count := alive(throughLandfall); count != kept {
		t.Errorf("%d of %d connections through Landfall live once kube-proxy is gone", count, kept)
	}
	if out := c.migrate(t, "--apply"); !strings.Contains(out, "Nothing to do") {
		t.Errorf("a second run says\n%s", out)
	}

	c.migrate(t, "--undo") // kube-proxy starts beside Landfall
	if !c.serves {
		t.Fatal("kube-proxy does not serve after --undo")
	}
	if err := c.marks(); err != nil {
		t.Errorf("--undo leaves %v", err)
	}
	r.some(t, 5*len(ways))
	r.next(t, "Landfall stopped")
	stopLandfall()
	r.some(t, 5*len(ways))
	r.next(t, "landfall-proxy cleanup")
	n.Node.Run(t, landfallProxy, "cleanup")
	r.some(t, 5*len(ways))
	r.next(t, "the end")
	if count := alive(throughLandfall); count != kept {
		t.Errorf("%d of %d connections through Landfall live after it was given back", count, kept)
	}
	if err := n.clean(t); err != nil {
		t.Error(err)
	}
	c.stopKubeProxy()
}

// planned returns the scheduler of the plan's values. The mode is not in them: auto is the default.
func (n *node) planned(t *testing.T) (scheduler string) {
	t.Helper()
	var values any
	if err := yaml.Unmarshal([]byte(n.cluster.migrate(t, "-o", "values")), &values); err != nil {
		t.Fatal(err)
	}
	scheduler = "round-robin"
	want := map[string]any{"proxy": map[string]any{"clusterCIDR": n.World.Pods.String(), "scheduler": scheduler}}
	if diff := cmp.Diff(any(want), values); diff != "" {
		t.Errorf("the plan's values (-want +got):\n%s", diff)
	}
	return scheduler
}

// mode returns the mode in which Landfall's proxy runs.
func (n *node) mode(t *testing.T) string {
	if strings.Contains(n.Node.Run(t, "iptables-save"), "LF-SERVICES") {
		return "iptables"
	}
	return "nftables"
}

// connectionsOfIPVS returns how many connections to the echo port IPVS has handled.
func (n *node) connectionsOfIPVS(t *testing.T) string {
	var echoes []string
	for _, line := range lines(n.Node.Run(t, "ipvsadm", "-Ln", "--stats")) {
		fields := strings.Fields(line)
		if len(fields) > 2 && fields[0] == "TCP" && fields[1] == netip.AddrPortFrom(n.World.VIP, echoPort).String() {
			echoes = append(echoes, fields[2])
		}
	}
	return strings.Join(echoes, " ")
}

// clean returns an error if something of Landfall is left.
func (n *node) clean(t *testing.T) error {
	var errs []error
	if text := n.Node.Run(t, "nft", "list", "tables"); strings.Contains(text, "landfall") {
		errs = append(errs, fmt.Errorf("left: %s", text))
	}
	if text := n.Node.Run(t, "iptables-save"); strings.Contains(text, "LF-") {
		errs = append(errs, fmt.Errorf("left: %s", text))
	}
	return errors.Join(errs...)
}
