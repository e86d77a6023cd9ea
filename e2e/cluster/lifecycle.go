package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Lifecycle installs, upgrades, rolls back and uninstalls Landfall with helm, each change under
// traffic of both policies over ARP and BGP: nothing may break. At the end it says what is left of
// Landfall on the nodes and in the API server.
func (c *Cluster) Lifecycle(ctx context.Context, say func(format string, args ...any)) error {
	if err := c.CreateWeb(ctx); err != nil {
		return err
	}
	before, err := c.traces(ctx)
	if err != nil {
		return err
	}
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.ApplyYAML(ctx, Pool); err != nil {
		return err
	}
	hosts := []string{lab.ClientName, lab.FarClientName}
	for _, w := range Webs {
		for _, host := range hosts {
			if err := c.WaitAnswer(ctx, host, w.Target()); err != nil {
				return errors.Join(err, c.explain(ctx))
			}
		}
	}
	if err := c.Test(ctx, say); err != nil {
		return err
	}
	var all Outcome
	for _, step := range []struct {
		name string
		args []string
	}{
		{"upgrade", append([]string{"upgrade", "--set", "node.podAnnotations.step=two,controller.podAnnotations.step=two"},
			c.InstallArgs()...)},
		{"rollback", []string{"rollback", "landfall", "1", "--namespace", Namespace, "--wait", "--timeout", "3m"}},
	} {
		of, err := c.underLoad(ctx, hosts, func() error {
			if _, err := c.Helm(ctx, step.args...); err != nil {
				return err
			}
			return c.waitRolledOut(ctx)
		})
		say("helm %s: %s", step.name, of)
		all.Add(of)
		if err != nil {
			return fmt.Errorf("helm %s: %w", step.name, err)
		}
	}
	if _, err := c.Helm(ctx, "uninstall", "landfall", "--namespace", Namespace, "--wait", "--timeout", "3m"); err != nil {
		return fmt.Errorf("helm uninstall: %w", err)
	}
	after, err := c.traces(ctx)
	if err != nil {
		return err
	}
	say("after helm uninstall there is more than before helm install:")
	for _, trace := range after {
		if !slices.Contains(before, trace) {
			say("  %s", trace)
		}
	}
	for _, why := range all.Why {
		say("  %s", why)
	}
	if all.Broken+all.Failed > 0 {
		return fmt.Errorf("under helm upgrade and rollback: %s", all)
	}
	return nil
}

// underLoad changes something while connections are open and new ones come.
func (c *Cluster) underLoad(ctx context.Context, hosts []string, change func() error) (Outcome, error) {
	all, err := c.startLoads(ctx, hosts, Webs...)
	if err != nil {
		return Outcome{}, err
	}
	err = pause(ctx, time.Second)
	if err == nil {
		err = change()
	}
	return all.stop(), errors.Join(err, pause(ctx, 2*time.Second))
}

// waitRolledOut waits until all nodes run what the DaemonSet says.
func (c *Cluster) waitRolledOut(ctx context.Context) error {
	return lab.WaitFor(ctx, c.options.Progress, "the nodes' pods", 3*time.Minute, func(ctx context.Context) error {
		sets, err := c.Kube().AppsV1().DaemonSets(Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, s := range sets.Items {
			if s.Status.ObservedGeneration != s.Generation || s.Status.UpdatedNumberScheduled != int32(len(c.nodes)) ||
				s.Status.NumberReady != int32(len(c.nodes)) {
				return fmt.Errorf("%d updated, %d ready", s.Status.UpdatedNumberScheduled, s.Status.NumberReady)
			}
		}
		return nil
	})
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
				"/proc/sys/net/ipv4/conf/*/rp_filter /proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal | grep -v 'veth' || true"},
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
