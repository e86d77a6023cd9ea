package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// nodePort is a port that leads to the pods of "web" with each service proxy.
var nodePort = Web{Name: "node-port", Policy: "Cluster", Addr: topology(2).Nodes[2].Addr, Port: 30080}

const nodePortService = `apiVersion: v1
kind: Service
metadata: {name: node-port, namespace: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}
`

// takeover and giveBack are the steps of the page about kube-proxy, in their order.
var (
	takeover = []step{
		{fromProxy, "kubectl -n kube-system get configmap kube-proxy"},
		{fromProxy, "helm install landfall"},
		{fromProxy, "kubectl -n kube-system patch daemonset kube-proxy"},
		{fromProxy, "kubectl label node NODE kube-proxy=off"},
		{fromProxy, "kubectl apply -f - <<EOF\napiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: cleanup,"},
		{fromProxy, "kubectl -n kube-system rollout status daemonset cleanup"},
	}
	giveBack = []step{
		{fromProxy, "kubectl label node NODE kube-proxy-"},
		{fromProxy, "helm upgrade landfall charts/landfall -n landfall-system --reset-then-reuse-values \\\n  " +
			"--set proxy.enabled=false"},
		{fromProxy, "kubectl apply -f - <<EOF\napiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: landfall-cleanup,"},
		{fromProxy, "kubectl -n landfall-system rollout status daemonset landfall-cleanup"},
		{fromProxy, "kubectl -n kube-system rollout restart daemonset kube-proxy"},
	}
	// byCommand are the migrations that landfallctl does, and back.
	byCommand = []step{
		{fromMetalLB, "landfallctl migrate metallb"},
		{fromMetalLB, "landfallctl migrate metallb --apply"},
		{fromProxy, "landfallctl migrate kube-proxy"},
		{fromProxy, "landfallctl migrate kube-proxy --apply"},
		{fromProxy, "landfallctl migrate kube-proxy --undo"},
		{fromMetalLB, "landfallctl migrate metallb --undo"},
	}
)

// Migrations does what the guides say about the moves from kube-proxy and from MetalLB, and back, on
// a cluster whose service proxy is kube-proxy: under traffic, with the commands of the guides.
func (c *Cluster) Migrations(ctx context.Context, say func(format string, args ...any)) (err error) {
	shell, err := c.shell()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(shell.tools)) }()
	if err := errors.Join(c.publish(ctx), c.ApplyYAML(ctx, namespaceManifest),
		c.installKubeProxy(ctx, "iptables")); err != nil {
		return err
	}
	if err := c.createWeb(ctx, len(c.nodes), nil); err != nil {
		return err
	}
	if err := c.ApplyYAML(ctx, nodePortService); err != nil {
		return err
	}
	hosts := []string{lab.ClientName, lab.FarClientName}
	if err := c.WaitAnswer(ctx, hosts[0], nodePort.Target()); err != nil {
		return err
	}
	load := &steady{cluster: c, hosts: hosts, webs: []Web{nodePort}, say: say}
	for _, part := range []struct {
		name  string
		steps []step
	}{{"from kube-proxy to Landfall", takeover}, {"back to kube-proxy", giveBack}} {
		if err := load.during(ctx, part.name, func() error {
			for _, s := range part.steps {
				if err := c.step(ctx, shell, s, say); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	if _, err := c.Helm(ctx, "uninstall", "landfall", "--namespace", Namespace, "--timeout", "5m"); err != nil {
		return err
	}
	if err := c.announceByMetalLB(ctx, hosts); err != nil {
		return err
	}
	// Connections over BGP break as the router moves them: the page says so.
	load.webs = append(load.webs, Webs[0], Webs[1])
	for _, s := range byCommand {
		if err := load.during(ctx, s.begins, func() error { return c.step(ctx, shell, s, say) }); err != nil {
			return err
		}
	}
	return load.lost()
}

// announceByMetalLB installs MetalLB, and waits until it announces the addresses of [Webs].
func (c *Cluster) announceByMetalLB(ctx context.Context, hosts []string) error {
	if err := c.installMetalLB(ctx, metallbObjects); err != nil {
		return err
	}
	for _, w := range Webs {
		manifest := strings.NewReplacer("landfall.dev/", "metallb.io/", "NAME", w.Name, "ADDRESS", w.Addr.String(), "POLICY",
			w.Policy).Replace(service)
		if err := c.ApplyYAML(ctx, manifest); err != nil {
			return err
		}
	}
	for _, w := range Webs {
		for _, host := range hosts {
			if err := c.WaitAnswer(ctx, host, w.Target()); err != nil {
				return err
			}
		}
	}
	return nil
}

// steady is traffic during changes.
type steady struct {
	cluster *Cluster
	hosts   []string
	webs    []Web
	say     func(format string, args ...any)
	all     Outcome
	failed  []error
}

// during changes something under traffic, and notes the connections that were lost.
func (s *steady) during(ctx context.Context, what string, change func() error) error {
	of, err := s.cluster.underLoad(ctx, longLived, s.hosts, s.webs, change)
	s.say("%s: %s", what, of)
	s.all.Add(of)
	if of.Broken+of.Failed > 0 {
		s.failed = append(s.failed, fmt.Errorf("%s: %w", what, of.Err()))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("%s: %w", what, err), s.lost())
	}
	return nil
}

// lost returns what was, or that too much could not be judged.
func (s *steady) lost() error {
	if len(s.failed) == 0 {
		return s.all.Err()
	}
	return errors.Join(s.failed...)
}

// nodeByNode does a step of the pages on one node after another, each once kube-proxy has come or gone
// there.
func (c *Cluster) nodeByNode(ctx context.Context, in guideShell, command string) error {
	for _, n := range c.nodes {
		if _, err := c.typed(ctx, in, strings.ReplaceAll(command, "NODE", n.Name)); err != nil {
			return err
		}
		if err := c.kubeProxyOn(ctx, n.Name, strings.HasSuffix(command, "-")); err != nil {
			return err
		}
	}
	return nil
}

// kubeProxyOn waits until a node has a pod of kube-proxy that has written its rules, or none.
func (c *Cluster) kubeProxyOn(ctx context.Context, node string, wanted bool) error {
	return lab.WaitFor(ctx, c.options.Progress, "kube-proxy on "+node, 2*time.Minute, func(ctx context.Context) error {
		pods, err := c.Kube().CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{
			LabelSelector: "k8s-app=kube-proxy", FieldSelector: "spec.nodeName=" + node})
		if err != nil {
			return err
		}
		if !wanted {
			if len(pods.Items) > 0 {
				return errors.New("it is there")
			}
			return nil
		}
		_, text, err := c.Get(ctx, node, "http://127.0.0.1:10249/metrics")
		if err != nil {
			return err
		}
		families := 0
		for line := range strings.Lines(text) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if !strings.HasPrefix(name, "kubeproxy_sync_proxy_rules_last_timestamp_seconds") {
				continue
			}
			if families++; value == "0" {
				return errors.New("it has not written the rules of each family")
			}
		}
		if families == 0 {
			return errors.New("it has written no rules")
		}
		return nil
	})
}
