package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// takeover is a node that is taken over from kube-proxy, and given back.
type takeover struct {
	l          *lab.Lab
	node       lab.Node
	kube       string // kube-proxy's mode
	ours       *lab.Agent
	healthPort int32
	kubeProxy  *lab.KubeProxy
}

const (
	takeoverNode = "k8s-worker-178" // where my-nginx-1 is
	localVIP     = "172.26.236.180:80"
	clusterVIP   = "172.26.236.181:80"
	// webNodePort lies below what the API server gives out by itself while it has other ports (KEP-3668): another
	// Service's health port may be any of those.
	webNodePort = 30029
)

// Landfall's proxy takes a running node over from kube-proxy, as docs/guide/migrate-kube-proxy.md
// says, and gives it back. Connections that stand go on, and of a stream of new ones none is lost.
func TestTakeOverFromKubeProxy(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run("Landfall "+mode, func(t *testing.T) {
			t.Parallel()
			l := labtest.Start(t, lab.SeedCluster(),
				lab.Options{Stopped: true, Values: map[string]any{"proxy": map[string]any{"mode": mode}}})
			healthPort := takeoverServices(t, l)
			for _, kube := range []string{"iptables", "nftables"} {
				t.Run("kube-proxy "+kube, func(t *testing.T) {
					o := &takeover{l: l, kube: kube, ours: l.Agent("proxy", takeoverNode), healthPort: healthPort}
					for _, n := range l.Cluster().Nodes {
						if n.Name == takeoverNode {
							o.node = n
						}
					}
					defer o.leave(t)
					o.run(t)
				})
			}
		})
	}
}

// A proxy that is started in its other mode takes over from itself: nothing is lost, the rules of
// the mode before go, and those of others stay.
func TestContract6SwitchOfModes(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Stopped: true})
	takeoverServices(t, l)
	o := &takeover{l: l, ours: l.Agent("proxy", takeoverNode)}
	defer o.leave(t)
	foreign := []string{"iptables -t nat -N MINE", "iptables -t nat -A POSTROUTING -j MINE", "nft add table ip mine",
		"nft add chain ip mine one"}
	for _, command := range foreign {
		mustExec(t, l, takeoverNode, strings.Fields(command)...)
	}
	var clients takeoverClients
	for i, mode := range []string{"iptables", "nftables", "iptables", "nftables"} {
		if i > 0 {
			if err := o.ours.Stop(); err != nil {
				t.Fatal(err)
			}
		}
		o.ours.SetFlag("mode", mode)
		if err := o.ours.Start(); err != nil {
			t.Fatal(err)
		}
		if err := o.ours.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			clients = o.startClients(t)
		}
		eventually(t, "only rules of "+mode, func() error {
			rules := o.rules(t)
			for _, other := range map[string][]string{"iptables": {"table ip landfall", "table ip6 landfall"},
				"nftables": {"LF-"}}[mode] {
				if strings.Contains(rules, other) {
					return errors.New("there is still " + other)
				}
			}
			return nil
		})
		if rules := o.rules(t); !strings.Contains(rules, ":MINE ") || !strings.Contains(rules, "-A POSTROUTING -j MINE") ||
			!strings.Contains(rules, "table ip mine") {
			t.Errorf("in mode %s: rules of others are gone:\n%s", mode, rules)
		}
		localnet := strings.TrimSpace(mustExec(t, l, takeoverNode, "sysctl", "-n", "net.ipv4.conf.all.route_localnet"))
		if want := map[string]string{"iptables": "1", "nftables": "0"}[mode]; localnet != want {
			t.Errorf("in mode %s: route_localnet is %s, want %s", mode, localnet, want)
		}
		o.wantBackendsFollow(t)
	}
	clients.wantNoneLost(t)
}

// rules lists the node's rules of iptables, and the names of its tables.
func (o *takeover) rules(t *testing.T) string {
	t.Helper()
	return mustExec(t, o.l, takeoverNode, "iptables-save") + mustExec(t, o.l, takeoverNode, "ip6tables-save") + mustExec(t,
		o.l, takeoverNode, "nft", "list", "tables")
}

// takeoverServices makes a Service of each policy with a VIP that leads to the node, and returns
// the health port of the one.
func takeoverServices(t *testing.T, l *lab.Lab) (healthPort int32) {
	t.Helper()
	local, cluster := lab.SeedService(), lab.SeedService()
	local.ExternalTrafficPolicy = "Local"
	cluster.Name, cluster.ClusterIP, cluster.Ports = "web", netip.Addr{}, []lab.Port{{Port: 80, NodePort: webNodePort}}
	for vip, s := range map[string]lab.Service{localVIP: local, clusterVIP: cluster} {
		if err := l.AddService(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		services := l.Kube().CoreV1().Services("default")
		o, err := services.Get(t.Context(), s.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		healthPort = max(healthPort, o.Spec.HealthCheckNodePort)
		addr := netip.MustParseAddrPort(vip).Addr().String()
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: addr}}
		if _, err := services.UpdateStatus(t.Context(), o, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		mustExec(t, l, lab.ClientName, "ip", "route", "add", addr, "via", "172.26.236.178")
	}
	return healthPort
}

// step logs what happens next, with the time, to compare with that of a lost connection.
func step(t *testing.T, what string) {
	t.Helper()
	t.Logf("%s %s", time.Now().Format("15:04:05.000"), what)
}

func (o *takeover) run(t *testing.T) {
	o.startKubeProxy(t)
	clients := o.startClients(t)

	step(t, "Landfall comes beside kube-proxy")
	if err := o.ours.Start(); err != nil {
		t.Fatal(err)
	}
	if err := o.ours.WaitReady(t.Context()); err != nil { // not before the kernel has all rules
		t.Fatal(err)
	}
	eventually(t, "the taken health ports are reported", func() error {
		for _, port := range []string{"10256", fmt.Sprint(o.healthPort)} {
			if !strings.Contains(o.ours.Log(), "cannot open a health server") || !strings.Contains(o.ours.Log(), port) {
				return errors.New("the log does not say " + port)
			}
		}
		return nil
	})

	step(t, "kube-proxy stops")
	if err := o.kubeProxy.Stop(); err != nil {
		t.Fatal(err)
	}
	o.wantHealthPorts(t, "Landfall")
	o.wantBackendsFollow(t) // although kube-proxy's rules, which do not, are still there
	step(t, "kube-proxy's rules go")
	if err := o.l.CleanupKubeProxy(t.Context(), takeoverNode); err != nil {
		t.Fatal(err)
	}
	o.wantNoRules(t, "KUBE-", "kube-proxy")
	o.wantBackendsFollow(t)
	time.Sleep(time.Second)

	step(t, "the node is given back")
	o.startKubeProxy(t)
	step(t, "Landfall stops")
	if err := o.ours.Stop(); err != nil {
		t.Fatal(err)
	}
	step(t, "Landfall's rules go")
	if _, err := o.ours.Run(t.Context(), "cleanup"); err != nil {
		t.Fatal(err)
	}
	o.wantNoRules(t, "LF-", "landfall")
	o.wantBackendsFollow(t)
	step(t, "kube-proxy restarts")
	// It tries the health port of a Service again only when something changes.
	if err := o.kubeProxy.Stop(); err != nil {
		t.Fatal(err)
	}
	o.startKubeProxy(t)
	o.wantHealthPorts(t, "kube-proxy")
	o.wantBackendsFollow(t)
	clients.wantNoneLost(t)
}

// leave ends what is still running, so that the next finds a bare node.
func (o *takeover) leave(t *testing.T) {
	if o.ours.Running() {
		_ = o.ours.Kill()
	}
	if o.kubeProxy != nil {
		_ = o.kubeProxy.Stop()
	}
	mustExec(t, o.l, takeoverNode, "nft", "flush", "ruleset")
}

// startKubeProxy starts kube-proxy and waits until it has written its rules.
func (o *takeover) startKubeProxy(t *testing.T) {
	t.Helper()
	var err error
	o.kubeProxy, err = o.l.StartKubeProxy(t.Context(), takeoverNode, o.kube, "--v=2")
	if err != nil {
		t.Fatal(err)
	}
	if err := o.kubeProxy.WaitHealthy(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kube-proxy has written its rules", func() error {
		text, err := o.kubeProxy.Metrics(t.Context())
		if err != nil {
			return err
		}
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"}`) &&
				!strings.HasSuffix(strings.TrimSpace(line), " 0") {
				return nil
			}
		}
		return errors.New("no sync so far")
	})
}

// wantHealthPorts waits until a program serves both health ports of the node.
func (o *takeover) wantHealthPorts(t *testing.T, who string) {
	t.Helper()
	for _, port := range []int32{10256, o.healthPort} {
		eventually(t, fmt.Sprintf("%s answers on port %d", who, port), func() error {
			code, body, err := o.l.Get(t.Context(), lab.ClientName, fmt.Sprintf("http://%s:%d/healthz", o.node.Addr, port))
			if err == nil && code != http.StatusOK {
				err = fmt.Errorf("%d %s", code, body)
			}
			return err
		})
	}
}

// wantNoRules fails the test if rules of a program are left: chains of iptables with a prefix, or a
// table of nftables. kube-proxy leaves KUBE-FIREWALL, which is the kubelet's, too.
func (o *takeover) wantNoRules(t *testing.T, prefix, table string) {
	t.Helper()
	for line := range strings.Lines(o.rules(t)) {
		if strings.Contains(line, prefix) && !strings.Contains(line, "KUBE-FIREWALL") ||
			strings.Contains(line, "table ip "+table) || strings.Contains(line, "table ip6 "+table) {
			t.Errorf("left over: %s", strings.TrimSpace(line))
		}
	}
}

// wantBackendsFollow takes an endpoint away and gives it back: whoever has the node follows.
func (o *takeover) wantBackendsFollow(t *testing.T) {
	t.Helper()
	both := []string{"my-nginx-1", "my-nginx-2"}
	at := netip.MustParseAddrPort(clusterVIP)
	for _, step := range []struct {
		conditions lab.Conditions
		pods       []string
	}{{lab.NotReady, both[:1]}, {lab.Ready, both}} {
		if err := o.l.SetConditions(t.Context(), both[1], step.conditions); err != nil {
			t.Fatal(err)
		}
		wantAnswers(t, o.l, lab.ClientName, "tcp", at, step.pods...)
	}
}

// takeoverClients are connections that stand, and streams of new ones.
type takeoverClients struct {
	flows  map[string]*flows
	probes map[string]*lab.Probe
}

const standing = 30 // connections at each address

func (o *takeover) startClients(t *testing.T) takeoverClients {
	t.Helper()
	c := takeoverClients{map[string]*flows{}, map[string]*lab.Probe{}}
	for _, path := range []struct{ name, from, network, to string }{
		{"client to VIP, Local", lab.ClientName, "tcp", localVIP},
		{"client to VIP, Cluster", lab.ClientName, "tcp", clusterVIP},
		{"client to node port", lab.ClientName, "tcp", fmt.Sprintf("172.26.236.178:%d", webNodePort)},
		{"pod to cluster IP", "my-nginx-1", "tcp", "10.106.189.218:80"},
		{"pod to VIP, Cluster", "my-nginx-1", "tcp", clusterVIP},
		{"pod to cluster IP, UDP", "my-nginx-1", "udp", "10.96.0.10:53"},
	} {
		to := netip.MustParseAddrPort(path.to)
		eventually(t, path.name+": an answer", func() error {
			_, err := o.l.Ask(t.Context(), path.from, path.network, to)
			return err
		})
		if path.network == "tcp" {
			c.flows[path.name] = startFlowsFrom(t, o.l, path.from, to, standing)
		}
		c.probes[path.name] = o.l.StartProbe(t.Context(), path.from, path.network, to, 2*newEvery)
	}
	return c
}

func (c takeoverClients) wantNoneLost(t *testing.T) {
	t.Helper()
	for name, probe := range c.probes {
		report := probe.Stop()
		t.Logf("%s: %s", name, report)
		if report.Failed() > 0 || report.Answered < 20 {
			t.Errorf("%s: new connections were lost: %s", name, report)
		}
	}
	for name, f := range c.flows {
		if lost := f.stop(); lost > 0 {
			t.Errorf("%s: %d of %d connections were lost", name, lost, standing)
		}
	}
}
