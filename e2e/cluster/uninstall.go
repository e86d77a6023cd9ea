package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// uninstalls uninstalls Landfall twice, the second time while a node is away: only what stays may be
// left. Before, it deletes the DaemonSet without its pods, after which no rule may go.
func (c *Cluster) uninstalls(ctx context.Context, before, hosts []string, say func(string, ...any)) error {
	if err := c.orphan(ctx); err != nil {
		return fmt.Errorf("DaemonSet deleted without its pods: %w", err)
	}
	say("the DaemonSet was deleted without its pods, and a pod stopped: its node kept the rules")
	took, err := c.uninstall(ctx, before, hosts)
	if err != nil {
		return err
	}
	say("helm uninstall took %.0f s and left nothing but addresses of Services, custom resources and the namespace",
		took.Seconds())
	if err := c.Install(ctx); err != nil {
		return err
	}
	for _, w := range Webs {
		for _, host := range hosts {
			if err := c.WaitAnswer(ctx, host, w.Target()); err != nil {
				return errors.Join(err, c.explain(ctx))
			}
		}
	}
	return c.uninstallWithout(ctx, c.nodes[len(c.nodes)-1], before, hosts, say)
}

// uninstall uninstalls Landfall and waits until nothing is left that ought not to be.
func (c *Cluster) uninstall(ctx context.Context, before, hosts []string) (took time.Duration, err error) {
	began := time.Now()
	if _, err := c.Helm(ctx, "uninstall", "landfall", "--namespace", Namespace, "--timeout", "5m"); err != nil {
		return 0, fmt.Errorf("helm uninstall: %w", err)
	}
	took = time.Since(began)
	for _, w := range Webs {
		for _, host := range hosts {
			if _, err := c.Ask(ctx, host, "tcp", w.Target()); err == nil {
				return took, fmt.Errorf("%s answers %s after helm uninstall", w.Name, host)
			}
		}
	}
	return took, c.waitClean(ctx, before)
}

// waitClean waits until nothing is left that ought not to be.
func (c *Cluster) waitClean(ctx context.Context, before []string) error {
	return lab.WaitFor(ctx, c.options.Progress, "the end of all traces", time.Minute, func(ctx context.Context) error {
		left, err := c.left(ctx, before)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("helm uninstall leaves:\n%s", strings.Join(left, "\n"))
		}
		return err
	})
}

// left returns what there is beyond what was there before and what stays.
func (c *Cluster) left(ctx context.Context, before []string) ([]string, error) {
	after, err := c.traces(ctx)
	return slices.DeleteFunc(after, func(trace string) bool { return slices.Contains(before, trace) || stays(trace) }), err
}

// stays reports whether a trace is one of those that an uninstallation leaves: addresses of Services
// with the pools they are from, custom resources, and the namespace that helm has created.
func stays(trace string) bool {
	kind, name, _ := strings.Cut(trace, " ")
	switch kind {
	case "IPAddressPool", "L2Advertisement", "BGPAdvertisement", "BFDProfile", "BGPPeer", "Community":
		return true
	case "CustomResourceDefinition", "APIService": // the API server makes the second of the first
		return strings.HasSuffix(name, ".landfall.dev")
	case "Service":
		return strings.Contains(name, ": address ") ||
			strings.HasSuffix(name, ": annotation metallb.io/ip-allocated-from-pool")
	}
	return slices.Contains([]string{"Namespace " + Namespace, "ServiceAccount " + Namespace + "/default",
		"ConfigMap " + Namespace + "/kube-root-ca.crt"}, trace)
}

// orphan deletes the DaemonSet without its pods, stops the pod of one node, and has helm create the
// DaemonSet again.
func (c *Cluster) orphan(ctx context.Context) error {
	sets, pods := c.Kube().AppsV1().DaemonSets(Namespace), c.Kube().CoreV1().Pods(Namespace)
	if err := sets.Delete(ctx, "landfall-node", metav1.DeleteOptions{
		PropagationPolicy: new(metav1.DeletePropagationOrphan)}); err != nil {
		return err
	}
	gone := func(ctx context.Context) error {
		list, err := sets.List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) > 0 {
			err = errors.New("it is there")
		}
		return err
	}
	if err := lab.WaitFor(ctx, c.options.Progress, "the end of the DaemonSet", time.Minute, gone); err != nil {
		return err
	}
	node := c.nodes[0]
	of := metav1.ListOptions{FieldSelector: "spec.nodeName=" + node.Name,
		LabelSelector: "app.kubernetes.io/component=node"}
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{}, of); err != nil {
		return err
	}
	if err := c.waitNoPods(ctx, of); err != nil {
		return err
	}
	tables, err := node.Run(ctx, "nft", "list", "tables")
	if err == nil && !strings.Contains(tables, "table ip landfall\n") {
		err = fmt.Errorf("%s has only these tables:\n%s", node.Name, tables)
	}
	if err != nil {
		return err
	}
	if _, err := c.Helm(ctx, append([]string{"upgrade"}, c.InstallArgs()...)...); err != nil {
		return err
	}
	return c.waitRolledOut(ctx)
}

// waitNoPods waits until Landfall has none of these pods.
func (c *Cluster) waitNoPods(ctx context.Context, of metav1.ListOptions) error {
	return lab.WaitFor(ctx, c.options.Progress, "the end of Landfall's pods", 2*time.Minute,
		func(ctx context.Context) error {
			list, err := c.Kube().CoreV1().Pods(Namespace).List(ctx, of)
			if err == nil && len(list.Items) > 0 {
				err = fmt.Errorf("%s is there", list.Items[0].Name)
			}
			return err
		})
}

// uninstallWithout uninstalls Landfall while a node is cut off. What its proxy leaves there goes as
// the documentation says.
func (c *Cluster) uninstallWithout(ctx context.Context, n *Node, before, hosts []string,
	say func(string, ...any)) error {
	if err := c.Cut(ctx, n.Name); err != nil {
		return err
	}
	away := func(ctx context.Context) error {
		node, err := c.Kube().CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			return errors.New("it is Ready")
		}
		return nil
	}
	if err := lab.WaitFor(ctx, c.options.Progress, n.Name+" to be away", 3*time.Minute, away); err != nil {
		return err
	}
	began := time.Now()
	if _, err := c.Helm(ctx, "uninstall", "landfall", "--namespace", Namespace, "--timeout", "5m"); err != nil {
		return fmt.Errorf("helm uninstall while %s is away: %w", n.Name, err)
	}
	took := time.Since(began)
	if err := c.Heal(ctx, n.Name); err != nil {
		return err
	}
	if err := errors.Join(n.WaitReady(ctx), c.waitNoPods(ctx, metav1.ListOptions{})); err != nil {
		return err
	}
	left, err := c.left(ctx, before)
	if err != nil {
		return err
	}
	for _, trace := range left {
		if !strings.HasPrefix(trace, n.Name+": ") {
			return fmt.Errorf("helm uninstall while %s is away leaves:\n%s", n.Name, strings.Join(left, "\n"))
		}
	}
	// Its speaker could not ask about its DaemonSet, so routers keep its routes as after a restart.
	if err := c.waitSilent(ctx, hosts); err != nil {
		return err
	}
	say("while %s was away, helm uninstall took %.0f s; back again, the node has: %s", n.Name, took.Seconds(),
		strings.Join(left, "; "))
	if err := c.cleanNodes(ctx); err != nil {
		return err
	}
	if err := c.waitClean(ctx, before); err != nil {
		return err
	}
	say("the DaemonSet of docs/guide/migrate-kube-proxy.md that cleans up left nothing of it")
	return nil
}

// waitSilent waits until no Service answers any more: routers keep the routes of a speaker that has
// ended with graceful restart for the restart time, 120 s. What nodes know of the addresses' neighbors is
// forgotten first: all hosts here share a kernel, in which a packet that a client's TCP has sent confirms the
// neighbors of each node that forwards it, so that the questions would keep their way open.
func (c *Cluster) waitSilent(ctx context.Context, hosts []string) error {
	return lab.WaitFor(ctx, c.options.Progress, "the end of all answers", 3*time.Minute, func(ctx context.Context) error {
		for _, n := range c.nodes {
			for _, w := range Webs {
				if _, err := c.Exec(ctx, n.Name, "ip", "neigh", "flush", "to", w.Addr.String()); err != nil {
					return err
				}
			}
		}
		var g lab.Group
		for _, w := range Webs {
			for _, host := range hosts {
				g.Run(func() error {
					if _, err := c.Ask(ctx, host, "tcp", w.Target()); err == nil {
						return fmt.Errorf("%s answers %s", w.Name, host)
					}
					return ctx.Err() // a question that was cut short shows nothing
				})
			}
		}
		return g.Wait()
	})
}

// cleanNodes runs landfall-proxy cleanup on each node, as the documentation says.
func (c *Cluster) cleanNodes(ctx context.Context) error {
	text, err := os.ReadFile(filepath.Join(c.Repository(), "docs", "guide", "migrate-kube-proxy.md"))
	if err != nil {
		return err
	}
	_, manifest, found := strings.Cut(string(text), "metadata: {name: landfall-cleanup,")
	manifest, _, ends := strings.Cut(manifest, "\nEOF\n")
	if !found || !ends {
		return errors.New("docs/guide/migrate-kube-proxy.md has no DaemonSet landfall-cleanup")
	}
	if err := c.ApplyYAML(ctx, strings.NewReplacer("ghcr.io/landfall-lb/landfall:0.1.0", Image,
		"registry.k8s.io/pause:3.10", PauseImage).Replace(
		"apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: landfall-cleanup,"+manifest)); err != nil {
		return err
	}
	if err := c.waitRolledOut(ctx); err != nil {
		return err
	}
	if err := c.Kube().AppsV1().DaemonSets(Namespace).Delete(ctx, "landfall-cleanup", metav1.DeleteOptions{}); err != nil {
		return err
	}
	return c.waitNoPods(ctx, metav1.ListOptions{})
}

// traces lists what Landfall may leave behind: rules, addresses, routes and kernel parameters of the
// nodes, and objects with what it writes to Services and Nodes.
func (c *Cluster) traces(ctx context.Context) ([]string, error) {
	var all []string
	for _, n := range c.nodes {
		for _, show := range [][]string{
			{"sh", "-c", "nft list tables | grep -v 'table ip6\\? \\(filter\\|mangle\\|nat\\|raw\\)$' || true"},
			{"sh", "-c", "iptables-save; ip6tables-save; iptables-legacy-save; ip6tables-legacy-save | grep -o 'LF-[A-Z-]*'" +
				" | sort -u || true"},
			{"sh", "-c", "ip -oneline addr show | grep -v ' cni0 \\| veth' | awk '{print $2, $3, $4}'"},
			{"sh", "-c", "ip route show table all | grep -v 'cni0\\|veth' || true"},
			{"ip", "rule", "show"},
			{"ip", "-6", "rule", "show"},
			{"sh", "-c", "grep -H . /proc/sys/net/ipv4/conf/*/route_localnet /proc/sys/net/ipv4/conf/*/arp_* " +
				"/proc/sys/net/ipv4/conf/*/rp_filter /proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal " +
				"/proc/sys/net/ipv4/tcp_tw_reuse | grep -v 'veth' || true"},
			{"sh", "-c", "tc filter show dev eth0 ingress; ls /run/landfall /sys/fs/bpf/landfall 2>/dev/null || true"},
		} {
			out, err := n.Run(ctx, show...)
			if err != nil {
				return nil, err
			}
			for line := range strings.Lines(out) {
				line = strings.TrimSpace(line)
				if strings.HasPrefix(line, "#") || strings.HasPrefix(line, ":") || strings.Contains(line, "KUBE-") ||
					strings.HasPrefix(line, "*") || line == "COMMIT" || line == "" {
					continue
				}
				all = append(all, n.Name+": "+line)
			}
		}
	}
	objects, err := c.objects(ctx)
	return append(all, objects...), err
}

// notAsked are kinds that come and go by themselves, or that the API server warns of.
var notAsked = []string{"events", "endpoints", "componentstatuses"}

// objects lists the objects of all kinds that name Landfall, and what Services and Nodes carry of it.
func (c *Cluster) objects(ctx context.Context) ([]string, error) {
	lists, err := c.Kube().Discovery().ServerPreferredResources()
	if err != nil {
		return nil, err
	}
	var all []string
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") || slices.Contains(notAsked, r.Name) {
				continue
			}
			got, err := c.Dynamic().Resource(version.WithResource(r.Name)).List(ctx, metav1.ListOptions{})
			if err != nil {
				return nil, fmt.Errorf("%s: %w", r.Name, err)
			}
			for _, o := range got.Items {
				name := r.Kind + " " + strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/")
				if strings.Contains(version.Group+o.GetName()+o.GetNamespace(), "landfall") {
					all = append(all, name)
				}
				if r.Kind != "Service" && r.Kind != "Node" {
					continue
				}
				for _, key := range slices.Sorted(maps.Keys(o.GetAnnotations())) {
					all = append(all, name+": annotation "+key)
				}
				for _, key := range slices.Sorted(maps.Keys(o.GetLabels())) {
					all = append(all, name+": label "+key)
				}
				for _, finalizer := range o.GetFinalizers() {
					all = append(all, name+": finalizer "+finalizer)
				}
				status, _ := o.Object["status"].(map[string]any)
				conditions, _ := status["conditions"].([]any)
				for _, condition := range conditions {
					if m, ok := condition.(map[string]any); ok {
						all = append(all, fmt.Sprintf("%s: condition %v", name, m["type"]))
					}
				}
				if balancer, ok := status["loadBalancer"].(map[string]any); ok && len(balancer) > 0 {
					all = append(all, fmt.Sprintf("%s: address %v", name, balancer["ingress"]))
				}
			}
		}
	}
	return all, nil
}
