package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	clientPod = "client-pod"
	loadPort  = 8080
)

// loadNode is a node with one pod, whose rules are those that one proxy wrote when there was a
// certain number of Services. Each has two Services of its own, with its own pod as their endpoint
// and one policy each, so that no measurement crosses another node.
type loadNode struct {
	name      string
	contender contender // none on the bare node
	full      bool      // the rules are those of all Services
	vips      map[corev1.ServiceExternalTrafficPolicy]netip.Addr
}

// noRules is the way to a pod of a node that has none.
const noRules = "no rules, to the pod"

// fewSuffix marks the nodes whose rules are those of a handful of Services.
const fewSuffix = "-few"

func (b *bench) loadNodes() []loadNode {
	nodes := []loadNode{{name: bareNode}}
	for _, c := range b.contenders() {
		nodes = append(nodes, loadNode{name: c.name + fewSuffix, contender: c},
			loadNode{name: c.name, contender: c, full: true})
	}
	for i := range nodes {
		nodes[i].vips = map[corev1.ServiceExternalTrafficPolicy]netip.Addr{
			corev1.ServiceExternalTrafficPolicyLocal:   netip.AddrFrom4([4]byte{203, 0, 113, byte(2 * i)}),
			corev1.ServiceExternalTrafficPolicyCluster: netip.AddrFrom4([4]byte{203, 0, 113, byte(2*i + 1)}),
		}
	}
	return nodes
}

// cluster is the lab's: the control plane, the node of the churn, and those of the connections.
func (b *bench) cluster() lab.Cluster {
	c := lab.SeedCluster()
	c.Pods, c.Services = nil, nil
	c.Nodes = c.Nodes[:1]
	add := func(name string, pods ...string) {
		n := byte(len(c.Nodes))
		c.Nodes = append(c.Nodes, lab.Node{
			Name: name, Addr: netip.AddrFrom4([4]byte{172, 26, 236, 100 + n}),
			PodNetwork: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, n, 0}), 24),
		})
		for i, pod := range pods {
			c.Pods = append(c.Pods, lab.Pod{Name: pod, Node: name, Addr: netip.AddrFrom4([4]byte{192, 168, n, byte(10 + i)}),
				TCP: []uint16{80}})
		}
	}
	add(churnNode, clientPod, podA, podB)
	if !b.noLoad {
		for _, n := range b.loadNodes() {
			add(n.name, podOf(n.name))
		}
	}
	if !b.noOutside {
		for _, p := range b.outsidePlans() {
			add(p.host)
		}
	}
	return c
}

func podOf(node string) string { return node + "-pod" }

// prepareLoad creates the Services of the connections.
func (b *bench) prepareLoad(ctx context.Context) error {
	for _, n := range b.loadNodes() {
		if n.contender.name == "" {
			continue
		}
		for policy, vip := range n.vips {
			if err := b.fleet.createVIP(ctx, n.name+"-"+strings.ToLower(string(policy)), policy, vip,
				endpoint(b.fleet.podAddress(podOf(n.name)), n.name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// createVIP creates a Service of type LoadBalancer with a VIP.
func (f *fleet) createVIP(ctx context.Context, name string, policy corev1.ServiceExternalTrafficPolicy, vip netip.Addr,
	endpoints ...discoveryv1.Endpoint) error {
	if err := f.createSliceAt(ctx, name, loadPort, endpoints...); err != nil {
		return err
	}
	service, err := f.lab.Kube().CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: policy,
			Ports: []corev1.ServicePort{{Port: loadPort}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	service.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip.String()}}
	_, err = f.lab.Kube().CoreV1().Services(namespace).UpdateStatus(ctx, service, metav1.UpdateOptions{})
	return err
}

// program starts the proxies of some nodes, waits until they have written their rules and ends
// them; the rules stay. Where a proxy does not get so far, nothing is measured.
func (b *bench) program(ctx context.Context, which func(loadNode) bool) (failed error) {
	for _, n := range b.loadNodes() {
		if n.contender.name == "" || !which(n) {
			continue
		}
		err := b.programOne(ctx, n)
		b.programmed[n.name] = err == nil
		if isOver(err) {
			b.report.Connections = append(b.report.Connections, connectionRow{Path: b.label(n), Over: true})
		}
		if err != nil {
			failed = errors.Join(failed, unlessOver(fmt.Errorf("%s: %w", n.name, err)))
		}
	}
	return failed
}

func (b *bench) programOne(ctx context.Context, n loadNode) error {
	p, err := b.startProxy(n.contender, n.name, n.name)
	if err != nil {
		return err
	}
	return p.use(ctx, func(ctx context.Context) error { return b.awaitRules(ctx, n, p) })
}

func (b *bench) awaitRules(ctx context.Context, n loadNode, p *proxy) error {
	from, err := newProber(b.lab.Namespace(podOf(n.name)))
	if err != nil {
		return err
	}
	defer from.close()
	if _, err := from.wait(ctx, b.fleet.addresses[target], "", time.Now().Add(limit)); err != nil {
		return err
	}
	return settle(ctx, p)
}

// connections measures new connections per second through each node's VIPs, and to a pod of the
// node without rules. The rounds go through all of them in turn, so that a slow moment of the
// machine meets each.
func (b *bench) connections(ctx context.Context) error {
	failed := b.program(ctx, func(n loadNode) bool { return n.full })
	if err := b.flush(ctx, bareNode); err != nil {
		return errors.Join(failed, err)
	}
	nodes := slices.DeleteFunc(b.loadNodes(), func(n loadNode) bool {
		return n.contender.name != "" && !b.programmed[n.name]
	})
	for _, n := range nodes {
		server := exec.Command("ip", "netns", "exec", b.lab.Namespace(podOf(n.name)), b.self, serveCommand)
		server.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
		if err := server.Start(); err != nil {
			return err
		}
		defer func() { _ = server.Process.Kill(); _ = server.Wait() }()
	}
	if _, err := b.lab.Exec(ctx, lab.ClientName, "sysctl", "-qw", "net.ipv4.ip_local_port_range=1024 65535"); err != nil {
		return err
	}
	time.Sleep(time.Second)
	err := b.connectAll(ctx, nodes)
	for name, rates := range b.connected {
		slices.Sort(rates)
		b.report.Connections = append(b.report.Connections,
			connectionRow{Path: name, PerSecond: rates[len(rates)/2], Min: rates[0], Max: rates[len(rates)-1]})
	}
	slices.SortFunc(b.report.Connections, func(a, b connectionRow) int { return strings.Compare(a.Path, b.Path) })
	return errors.Join(failed, err, b.write())
}

// connectAll measures all nodes in turn.
func (b *bench) connectAll(ctx context.Context, nodes []loadNode) error {
	for round := range b.rounds {
		progress(fmt.Sprintf("connections, round %d of %d", round+1, b.rounds))
		for _, n := range nodes {
			if n.contender.name == "" {
				pod, err := netip.ParseAddr(b.fleet.podAddress(podOf(n.name)))
				if err != nil {
					return err
				}
				if err := b.connectTo(ctx, n, noRules, pod); err != nil {
					return err
				}
				continue
			}
			for policy, vip := range n.vips {
				if err := b.connectTo(ctx, n, b.label(n)+", "+string(policy), vip); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// label is what the report calls the way over a node, with as many Services as its rules are for.
func (b *bench) label(n loadNode) string {
	if n.full {
		return fmt.Sprintf("%s at %d Services", n.contender.name, b.fleet.size+1)
	}
	return n.contender.name + " at few Services"
}

func (b *bench) connectTo(ctx context.Context, n loadNode, label string, address netip.Addr) error {
	var node netip.Addr
	for _, candidate := range b.lab.Cluster().Nodes {
		if candidate.Name == n.name {
			node = candidate.Addr
		}
	}
	if _, err := b.lab.Exec(ctx, lab.ClientName, "ip", "route", "replace", address.String(), "via",
		node.String()); err != nil {
		return err
	}
	out, err := b.lab.Exec(ctx, lab.ClientName, b.self, loadCommand, "-target",
		netip.AddrPortFrom(address, loadPort).String(), "-seconds", strconv.Itoa(b.seconds))
	if err != nil {
		return err
	}
	var rate float64
	var failed int
	if _, err := fmt.Sscan(out, &rate, &failed); err != nil {
		return fmt.Errorf("%q: %w", out, err)
	}
	if failed > 0 {
		progress(fmt.Sprintf("%s: %d connections failed", label, failed))
	}
	b.connected[label] = append(b.connected[label], rate)
	return nil
}
