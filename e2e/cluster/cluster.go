// Package cluster builds a real Kubernetes cluster on one Linux machine, as root and without
// Docker: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, three nodes with a
// kubelet, containerd and runc each, CoreDNS, and no kube-proxy. The network is the lab's
// (e2e/lab): a switch, a ToR router that speaks BGP, a client on the nodes' LAN and one behind the
// router. docs/design/cluster.md says how to use it.
//
// A node is a network namespace of the lab, and a first process with mounts, process IDs and a host
// name of its own. Its file system is the machine's, with folders of its own where a kubelet
// writes. When the first process ends, everything on the node ends, as when its power is cut.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Options say how to start a cluster.
type Options struct {
	// Name is that of the lab; empty for the next free one.
	Name string
	// CNI is Bridge, Routed or Flannel; empty for Bridge.
	CNI string
	// Nodes is how many nodes have a kubelet, spread over three zones, at most 9; 0 for 3.
	Nodes int
	// Image is an archive of Landfall's image with the name [Image]; empty to build it.
	Image string
	// Archives are further images that the nodes get.
	Archives []string
	// MutatingPolicies has the API server serve MutatingAdmissionPolicies: see [lab.Options].
	MutatingPolicies bool
	// Values are further arguments of "helm --set" for Landfall's chart.
	Values []string
	// Progress gets a line for each slow step.
	Progress func(line string)
}

// What carries packets between the pods of two nodes.
const (
	// Bridge is nothing but the CNI plugin bridge, and static routes to the pods of other nodes.
	Bridge = "bridge"
	// Routed is the CNI plugin ptp: no bridge, but a link and a route for each pod, as Calico has them, and
	// the same static routes.
	Routed = "ptp"
	// Flannel is flanneld, over VXLAN.
	Flannel = "flannel"
)

// Addresses of the cluster.
var (
	controlPlane = lab.Node{Name: "control-plane", Addr: netip.MustParseAddr("172.30.0.10"),
		PodNetwork: netip.MustParsePrefix("10.244.0.0/24"), ControlPlane: true}
	dnsAddr = netip.MustParseAddr("10.96.0.10")
)

// ASN and NodeASN are the AS numbers of the router and of the nodes.
const ASN, NodeASN = 64501, 64500

// topology describes the network: n nodes beside the control plane, which has no kubelet.
func topology(n int) lab.Cluster {
	c := lab.Cluster{
		LAN: lab.Network{Prefix: netip.MustParsePrefix("172.30.0.0/24"), Router: netip.MustParseAddr("172.30.0.1"),
			Client: netip.MustParseAddr("172.30.0.100")},
		Far: lab.Network{Prefix: netip.MustParsePrefix("172.31.0.0/24"), Router: netip.MustParseAddr("172.31.0.1"),
			Client: netip.MustParseAddr("172.31.0.100")},
		PodNetwork:     netip.MustParsePrefix("10.244.0.0/16"),
		ServiceNetwork: netip.MustParsePrefix("10.96.0.0/16"),
		ToR:            lab.ToR{Kind: lab.FRR, Count: 1, ASN: ASN, NodeASN: NodeASN, BFD: 300 * time.Millisecond},
		Nodes:          []lab.Node{controlPlane},
	}
	for i := byte(1); int(i) <= n; i++ {
		c.Nodes = append(c.Nodes, lab.Node{
			Name: fmt.Sprintf("node-%d", i), Addr: netip.AddrFrom4([4]byte{172, 30, 0, 10 + i}),
			PodNetwork: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, i, 0}), 24),
		})
	}
	return c
}

// Cluster is a running cluster.
type Cluster struct {
	*lab.Lab

	options Options
	tools   tools
	images  []string // archives
	nodes   []*Node
}

// tools are the programs that a cluster runs, and the folder of CNI's plugins.
type tools struct{ controllerManager, scheduler, kubelet, kubectl, helm, coredns, flanneld, plugins string }

// Start builds the cluster and returns when its nodes are Ready and CoreDNS runs. What is missing
// on the machine is installed or built, which takes long once. On an error nothing is left behind.
func Start(ctx context.Context, options Options) (_ *Cluster, err error) {
	options.CNI = cmp.Or(options.CNI, Bridge)
	if known := []string{Bridge, Routed, Flannel}; !slices.Contains(known, options.CNI) {
		return nil, fmt.Errorf("CNI %q: want one of %v", options.CNI, known)
	}
	options.Nodes = cmp.Or(options.Nodes, 3)
	if options.Nodes < 1 || options.Nodes > 9 {
		return nil, fmt.Errorf("%d nodes: want 1 to 9", options.Nodes)
	}
	repository, err := lab.FindRepository(".")
	if err != nil {
		return nil, err
	}
	c := &Cluster{options: options}
	if err := c.prepare(ctx, repository); err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c.Lab, err = lab.Start(ctx, topology(options.Nodes), lab.Options{
		Name: options.Name, Repository: repository, Kubelets: true, Tool: self, Progress: options.Progress,
		MutatingPolicies: options.MutatingPolicies,
	})
	if err != nil {
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(err, c.logs(), c.Close())
	}
	return c, nil
}

// prepare finds, installs or builds programs and images.
func (c *Cluster) prepare(ctx context.Context, repository string) (err error) {
	if c.tools.plugins, err = lab.PrepareNodes(ctx, c.options.Progress); err != nil {
		return err
	}
	wanted := map[string]*string{
		"kube-controller-manager": &c.tools.controllerManager, "kube-scheduler": &c.tools.scheduler,
		"kubelet": &c.tools.kubelet, "kubectl": &c.tools.kubectl, "helm": &c.tools.helm, "coredns": &c.tools.coredns,
	}
	if c.options.CNI == Flannel {
		wanted["flanneld"] = &c.tools.flanneld
	}
	for name, path := range wanted {
		if *path, err = lab.Tool(ctx, repository, name, c.options.Progress); err != nil {
			return err
		}
	}
	c.images, err = c.buildImages(ctx, repository)
	c.images = append(c.images, c.options.Archives...)
	return err
}

// start starts what the lab has not: the controllers, the nodes and CoreDNS.
func (c *Cluster) start(ctx context.Context) error {
	if err := errors.Join(c.startControllers(), c.startControlServer()); err != nil {
		return err
	}
	var g lab.Group
	for _, n := range c.Lab.Cluster().Nodes[1:] {
		node := &Node{Node: n, cluster: c}
		c.nodes = append(c.nodes, node)
		g.Run(func() error {
			if err := node.prepare(); err != nil {
				return err
			}
			return node.Start(ctx)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, n := range c.nodes {
		if err := n.register(ctx); err != nil {
			return err
		}
	}
	for _, n := range c.nodes {
		if err := n.WaitReady(ctx); err != nil {
			return err
		}
	}
	return c.ApplyYAML(ctx, strings.NewReplacer("IMAGE", coreDNSImage, "ADDRESS", dnsAddr.String()).Replace(coreDNS))
}

// startControllers starts the controller-manager and the scheduler beside the API server.
func (c *Cluster) startControllers() error {
	for name, argv := range map[string][]string{
		"kube-controller-manager": {
			c.tools.controllerManager, "--use-service-account-credentials", "--root-ca-file=" + c.Path("ca.crt"),
			"--service-account-private-key-file=" + c.Path("signing.key"), "--allocate-node-cidrs=false",
			"--cluster-cidr=" + c.Lab.Cluster().PodNetwork.String(),
			"--service-cluster-ip-range=" + c.Lab.Cluster().ServiceNetwork.String(),
		},
		"kube-scheduler": {c.tools.scheduler},
	} {
		is, err := c.Credentials("system:"+name, nil)
		if err != nil {
			return err
		}
		argv = append(argv, "--leader-elect=false", "--kubeconfig="+is.Kubeconfig,
			"--authentication-kubeconfig="+is.Kubeconfig, "--authorization-kubeconfig="+is.Kubeconfig)
		if err := c.Run(name, controlPlane.Name, argv...); err != nil {
			return err
		}
	}
	return nil
}

// Nodes returns the nodes that have a kubelet.
func (c *Cluster) Nodes() []*Node { return slices.Clone(c.nodes) }

// Node returns a node by its name, or nil.
func (c *Cluster) Node(name string) *Node {
	for _, n := range c.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// Kubectl and Helm return the paths of the programs.
func (c *Cluster) Kubectl() string { return c.tools.kubectl }

// Helm runs helm on the client of the nodes' LAN.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return c.Exec(ctx, lab.ClientName, append([]string{"env", "KUBECONFIG=" + c.Kubeconfig(), c.tools.helm}, args...)...)
}

// HelmPath returns the path of helm.
func (c *Cluster) HelmPath() string { return c.tools.helm }

// logs returns, as an error, what was logged last before a start failed.
func (c *Cluster) logs() error {
	var b strings.Builder
	for name, text := range c.Logs(6) {
		fmt.Fprintf(&b, "the last lines of %s:\n%s\n", name, text)
	}
	return errors.New(b.String())
}

// WaitPods waits until n pods of an app in a namespace are ready.
func (c *Cluster) WaitPods(ctx context.Context, namespace, selector string, n int) error {
	what := fmt.Sprintf("%d pods %s in %s", n, selector, namespace)
	return lab.WaitFor(ctx, c.options.Progress, what, 3*time.Minute, func(ctx context.Context) error {
		pods, err := c.Kube().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err
		}
		ready, why := 0, "there is none"
		for _, p := range pods.Items {
			if p.DeletionTimestamp == nil && isReady(p.Status.Conditions) {
				ready++
			} else {
				why = describePod(p)
			}
		}
		if ready != n || len(pods.Items) != n {
			return fmt.Errorf("%d of %d are ready: %s", ready, len(pods.Items), why)
		}
		return nil
	})
}

func isReady(conditions []corev1.PodCondition) bool {
	return slices.ContainsFunc(conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// describePod says why a pod is not ready.
func describePod(p corev1.Pod) string {
	text := []string{p.Name + " is " + string(p.Status.Phase)}
	for _, s := range p.Status.ContainerStatuses {
		if s.State.Waiting != nil {
			text = append(text, fmt.Sprintf("%s: %s %s", s.Name, s.State.Waiting.Reason, s.State.Waiting.Message))
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			text = append(text, c.Message)
		}
	}
	return strings.Join(text, ", ")
}

// mergePatch patches a Node.
func (c *Cluster) mergePatch(ctx context.Context, node, patch string) error {
	_, err := c.Kube().CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// write writes a file in the lab's folder.
func (c *Cluster) write(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o644)
}
