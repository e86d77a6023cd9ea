package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// trap is what keeps a first installation from working. Landfall names it in an Event and in landfallctl,
// and no longer does once it is gone.
type trap struct {
	name   string
	reason lb.Reason
	set    func(ctx context.Context) error
	clear  func(ctx context.Context) error
	// ask is the command of landfallctl that names it, and told what that says of it.
	ask, told string
	// about is the kind of object that the Event is on; empty for a Node.
	about string
	// notes is what helm says at an upgrade; empty for nothing of it.
	notes string
	// cure are values with which Landfall works in spite of it; empty if there are none.
	cure string
}

// traps returns them for this cluster.
func (c *Cluster) traps() []trap {
	node := c.nodes[0]
	on := func(nodes []*Node, script string) func(context.Context) error {
		return func(ctx context.Context) error {
			for _, n := range nodes {
				if _, err := n.Run(ctx, "sh", "-ec", script); err != nil {
					return err
				}
			}
			return nil
		}
	}
	label := func(value string) func(context.Context) error {
		return func(ctx context.Context) error {
			for _, n := range c.nodes {
				patch := fmt.Sprintf(`{"metadata":{"labels":{"%s":%s}}}`, corev1.LabelNodeExcludeBalancers, value)
				if err := c.mergePatch(ctx, n.Name, patch); err != nil {
					return err
				}
			}
			return nil
		}
	}
	upgrade := func(values ...string) func(context.Context) error {
		return func(ctx context.Context) error { _, err := c.upgrade(ctx, values...); return err }
	}
	return []trap{
		{name: "every node has the label of kubeadm's control planes", reason: lb.ReasonNodeExcluded, set: label(`""`),
			clear: label("null"), notes: "Every node of the cluster has the label", cure: "speaker.ignoreExcludeLB=true"},
		{name: "ip_forward is 0", reason: lb.ReasonForwardingOff,
			set:   on(c.nodes[:1], "sysctl -qw net.ipv4.ip_forward=0"),
			clear: on(c.nodes[:1], "sysctl -qw net.ipv4.ip_forward=1")},
		{name: "the chain FORWARD drops", reason: lb.ReasonForwardDropped, set: on(c.nodes[:1], "iptables -P FORWARD DROP"),
			clear: on(c.nodes[:1], "iptables -P FORWARD ACCEPT"), cure: "proxy.acceptForwarded=true"},
		// A bridge, as many kernels have no interfaces of the type dummy.
		{name: "kube-ipvs0 has addresses of Services", reason: lb.ReasonARPNotStrict,
			set: on(c.nodes[:1], "ip link add kube-ipvs0 type bridge\nip addr add "+Webs[0].Addr.String()+
				"/32 dev kube-ipvs0"),
			clear: on(c.nodes[:1], "ip link delete kube-ipvs0")},
		{name: "clusterCIDR has no pod", reason: lb.ReasonPodNetworkUnmatched, set: upgrade("proxy.clusterCIDR=10.99.0.0/16"),
			clear: upgrade()},
		{name: "a firewall drops gossip", reason: lb.ReasonGossipBlocked,
			set: func(ctx context.Context) error {
				if err := on(c.nodes, firewall)(ctx); err != nil {
					return err
				}
				return c.restart(ctx) // it was there before the speakers
			}, clear: on(c.nodes, "nft delete table inet firewall")},
		{name: "a firewall drops gossip of speakers that have met", reason: lb.ReasonGossipBlocked,
			set: on(c.nodes, firewall), clear: on(c.nodes, "nft delete table inet firewall")},
		{name: "ServiceLB of k3s is at work", reason: lb.ReasonForeignAddress, about: "Service", ask: "doctor",
			told: "ServiceLB of k3s also gives addresses", notes: "ServiceLB of k3s (DaemonSet kube-system/svclb-l2-cluster)",
			set: func(ctx context.Context) error {
				if err := c.ApplyYAML(ctx, strings.ReplaceAll(serviceLB, "IMAGE", PauseImage)); err != nil {
					return err
				}
				return errors.Join(c.WaitPods(ctx, "kube-system", "app=svclb-l2-cluster", len(c.nodes)),
					c.writeAddress(ctx, Webs[0], node.Addr.String()))
			},
			clear: func(ctx context.Context) error {
				err := c.Kube().AppsV1().DaemonSets("kube-system").Delete(ctx, "svclb-l2-cluster", metav1.DeleteOptions{})
				return errors.Join(err, c.WaitPods(ctx, "kube-system", "app=svclb-l2-cluster", 0))
			}},
		{name: "MetalLB is at work", reason: lb.ReasonForeignAddress, about: "Service", ask: "doctor",
			told: "MetalLB also gives addresses", notes: "MetalLB (DaemonSet metallb-system/speaker)",
			set: func(ctx context.Context) error { return c.installMetalLB(ctx, otherPool) },
			clear: func(ctx context.Context) error {
				err := c.Kube().CoreV1().Namespaces().Delete(ctx, "metallb-system", metav1.DeleteOptions{})
				return errors.Join(err, c.WaitPods(ctx, "metallb-system", "app=metallb", 0))
			}},
	}
}

const firewall = `nft -f - <<'EOF'
table inet firewall {
	chain input {
		type filter hook input priority filter
		meta l4proto { tcp, udp } th dport 7947 drop
		meta l4proto { tcp, udp } th sport 7947 drop
	}
}
EOF`

// serviceLB is what k3s runs for a Service: a pod on each node, whose address it writes to the status.
const serviceLB = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: svclb-l2-cluster, namespace: kube-system, labels: {svccontroller.k3s.cattle.io/svcname: l2-cluster}}
spec:
  selector: {matchLabels: {app: svclb-l2-cluster}}
  template:
    metadata: {labels: {app: svclb-l2-cluster, svccontroller.k3s.cattle.io/svcname: l2-cluster}}
    spec: {containers: [{name: lb-tcp-80, image: IMAGE, imagePullPolicy: Never}]}
`

// otherPool has MetalLB give the Services of Landfall addresses of its own.
const otherPool = `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: other, namespace: metallb-system}
spec: {addresses: [172.30.0.240-172.30.0.249]}
`

// FirstHour sets, one after another, the traps that a first installation meets, and looks that an Event and
// landfallctl name each while it is there, and that landfallctl finds nothing wrong afterwards. only names
// the reasons to do; empty for all.
func (c *Cluster) FirstHour(ctx context.Context, only string, say func(format string, args ...any)) error {
	if err := c.CreateWeb(ctx); err != nil {
		return err
	}
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.ApplyYAML(ctx, Pool); err != nil {
		return err
	}
	if err := c.allAnswer(ctx); err != nil {
		return err
	}
	for _, t := range c.traps() {
		if only != "" && !strings.Contains(only, string(t.reason)) {
			continue
		}
		if err := c.spring(ctx, t, say); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", t.name, err), c.explain(ctx))
		}
	}
	return nil
}

// spring sets a trap, waits until it is named, and clears it.
func (c *Cluster) spring(ctx context.Context, t trap, say func(format string, args ...any)) error {
	if t.ask == "" {
		t.ask, t.told = "status", "("+string(t.reason)+")"
	}
	began := time.Now()
	if err := t.set(ctx); err != nil {
		return err
	}
	if err := c.named(ctx, t); err != nil {
		return err
	}
	took := time.Since(began)
	if t.notes != "" {
		notes, err := c.upgrade(ctx)
		if err == nil && !strings.Contains(notes, t.notes) {
			err = fmt.Errorf("helm upgrade does not say %q: %s", t.notes, notes)
		}
		if err != nil {
			return err
		}
	}
	if t.cure != "" {
		if _, err := c.upgrade(ctx, t.cure); err != nil {
			return err
		}
		if err := c.well(ctx); err != nil {
			return fmt.Errorf("with %s: %w", t.cure, err)
		}
	}
	if err := t.clear(ctx); err != nil {
		return err
	}
	if t.cure != "" {
		if _, err := c.upgrade(ctx); err != nil {
			return err
		}
	}
	if err := c.well(ctx); err != nil {
		return fmt.Errorf("once it is gone: %w", err)
	}
	say("%s: %s in an Event and in landfallctl %s, %.0f s after its beginning", t.name, t.reason, t.ask, took.Seconds())
	return nil
}

// named waits until an Event and landfallctl name a trap.
func (c *Cluster) named(ctx context.Context, t trap) error {
	about := t.about
	if about == "" {
		about = "Node"
	}
	return lab.WaitFor(ctx, c.options.Progress, string(t.reason), 3*time.Minute, func(ctx context.Context) error {
		events, err := c.Kube().CoreV1().Events("").List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=" + about + ",type=Warning,reason=" + string(t.reason)})
		if err != nil {
			return err
		}
		if len(events.Items) == 0 {
			return fmt.Errorf("there is no Event %s on a %s", t.reason, about)
		}
		code, out, err := c.landfallctl(ctx, c.Kubeconfig(), t.ask)
		if err == nil && (code != 1 || !strings.Contains(out, t.told)) {
			err = fmt.Errorf("landfallctl %s ends with %d, and does not say %q: %s", t.ask, code, t.told, out)
		}
		return err
	})
}

// well waits until landfallctl finds nothing wrong, and all Services answer at their own addresses. What a
// program has found is over half a minute after the start of the next one.
func (c *Cluster) well(ctx context.Context) error {
	for _, line := range []string{"status", "doctor"} {
		if err := c.answers(ctx, c.Kubeconfig(), question{line, 0}); err != nil {
			return err
		}
	}
	return c.allAnswer(ctx)
}

// allAnswer waits until all Services answer both clients.
func (c *Cluster) allAnswer(ctx context.Context) error {
	for _, w := range Webs {
		for _, host := range []string{lab.ClientName, lab.FarClientName} {
			if err := c.WaitAnswer(ctx, host, w.Target()); err != nil {
				return err
			}
		}
	}
	return nil
}

// upgrade gives the installation further values, and returns what helm says.
func (c *Cluster) upgrade(ctx context.Context, values ...string) (string, error) {
	args := append([]string{"upgrade"}, c.InstallArgs()...)
	for _, v := range values {
		args = append(args, "--set", v)
	}
	out, err := c.Helm(ctx, args...)
	if err != nil {
		return out, err
	}
	return out, c.waitRolledOut(ctx)
}

// restart starts the pods of Landfall on all nodes anew.
func (c *Cluster) restart(ctx context.Context) error {
	const selector = "app.kubernetes.io/component=node"
	err := c.Kube().CoreV1().Pods(Namespace).DeleteCollection(ctx, metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: selector})
	return errors.Join(err, c.WaitPods(ctx, Namespace, selector, len(c.nodes)))
}

// writeAddress writes an address into the status of a Service, as another load balancer does.
func (c *Cluster) writeAddress(ctx context.Context, w Web, addr string) error {
	patch := fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":"%s"}]}}}`, addr)
	_, err := c.Kube().CoreV1().Services("web").Patch(ctx, w.Name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}, "status")
	return err
}
