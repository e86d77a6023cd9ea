package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Namespace is where the chart is installed.
const Namespace = lab.Namespace

// InstallArgs are the arguments of "helm install" and "helm upgrade" that put Landfall on the
// cluster, as an administrator of such a cluster would give them.
func (c *Cluster) InstallArgs() []string {
	args := []string{
		"landfall", c.Repository() + "/charts/landfall", "--namespace", Namespace, "--wait", "--timeout", "3m",
		"--set", "image.repository=" + ImageRepository + ",image.tag=" + ImageTag + ",image.pullPolicy=Never",
		"--set", "proxy.clusterCIDR=" + c.Lab.Cluster().PodNetwork.String(),
	}
	for _, value := range c.options.Values {
		args = append(args, "--set", value)
	}
	return args
}

// Install installs Landfall and waits until its pods are ready.
func (c *Cluster) Install(ctx context.Context) error {
	if err := c.ApplyYAML(ctx, namespaceManifest); err != nil {
		return err
	}
	_, err := c.Helm(ctx, append([]string{"install"}, c.InstallArgs()...)...)
	return err
}

// Web is a Service of the pods "web".
type Web struct {
	Name   string
	Policy string // of external traffic
	Addr   netip.Addr
	Port   uint16 // 0 for 80
}

// Webs are the Services that [Cluster.CreateWeb] creates: of both policies, announced by ARP, and
// by BGP to the router.
var Webs = []Web{
	{Name: "l2-cluster", Policy: "Cluster", Addr: netip.MustParseAddr("172.30.0.201")},
	{Name: "l2-local", Policy: "Local", Addr: netip.MustParseAddr("172.30.0.202")},
	{Name: "bgp-cluster", Policy: "Cluster", Addr: netip.MustParseAddr("203.0.113.1")},
	{Name: "bgp-local", Policy: "Local", Addr: netip.MustParseAddr("203.0.113.2")},
}

// Routed reports whether the Service is announced by BGP.
func (w Web) Routed() bool { return strings.HasPrefix(w.Name, "bgp") }

// Target is the Service's TCP port.
func (w Web) Target() netip.AddrPort { return netip.AddrPortFrom(w.Addr, cmp.Or(w.Port, 80)) }

// CreateWeb creates a pod on each node, and Services of them.
func (c *Cluster) CreateWeb(ctx context.Context) error { return c.createWeb(ctx, len(c.nodes), Webs) }

// createWeb creates that many pods, each on a node of its own, and Services of them.
func (c *Cluster) createWeb(ctx context.Context, pods int, webs []Web) error {
	manifest := []string{strings.NewReplacer("IMAGE", PodImage, "REPLICAS", strconv.Itoa(pods)).Replace(web)}
	for _, w := range webs {
		manifest = append(manifest,
			strings.NewReplacer("NAME", w.Name, "ADDRESS", w.Addr.String(), "POLICY", w.Policy).Replace(service))
	}
	if err := c.ApplyYAML(ctx, strings.Join(manifest, "")); err != nil {
		return err
	}
	return c.WaitPods(ctx, "web", "app=web", pods)
}

// WaitAnswer waits until a Service answers a host.
func (c *Cluster) WaitAnswer(ctx context.Context, host string, target netip.AddrPort) error {
	return lab.WaitFor(ctx, c.options.Progress, fmt.Sprintf("an answer of %s to %s", target, host), time.Minute,
		func(ctx context.Context) error {
			_, err := c.Ask(ctx, host, "tcp", target)
			return err
		})
}

// WaitDNS waits until the cluster's DNS, asked at its cluster IP from a node, knows a Service.
func (c *Cluster) WaitDNS(ctx context.Context, node string) error {
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return c.Dial(ctx, node, "udp", netip.AddrPortFrom(dnsAddr, 53).String())
	}}
	return lab.WaitFor(ctx, c.options.Progress, "the cluster's DNS", time.Minute, func(ctx context.Context) error {
		got, err := resolver.LookupHost(ctx, "l2-cluster.web.svc.cluster.local.")
		if err != nil {
			return err
		}
		service, err := c.Kube().CoreV1().Services("web").Get(ctx, "l2-cluster", metav1.GetOptions{})
		if err == nil && got[0] != service.Spec.ClusterIP {
			err = fmt.Errorf("DNS says %s, the Service has %s", got, service.Spec.ClusterIP)
		}
		return err
	})
}

// Smoke installs Landfall with helm and checks that Services answer both clients, DNS a node, and
// landfallctl its users.
func (c *Cluster) Smoke(ctx context.Context, say func(format string, args ...any)) error {
	if err := c.CreateWeb(ctx); err != nil {
		return err
	}
	began := time.Now()
	if err := c.Install(ctx); err != nil {
		return err
	}
	installed := time.Since(began)
	if err := c.ApplyYAML(ctx, Pool); err != nil {
		return err
	}
	if err := c.WaitAnswer(ctx, lab.ClientName, Webs[0].Target()); err != nil {
		return errors.Join(err, c.explain(ctx))
	}
	say("helm install took %.1f s; the first byte of a Service came %.1f s after its start", installed.Seconds(),
		time.Since(began).Seconds())
	for _, w := range Webs {
		for _, host := range []string{lab.ClientName, lab.FarClientName} {
			if err := c.WaitAnswer(ctx, host, w.Target()); err != nil {
				return errors.Join(err, c.explain(ctx))
			}
			spread := c.Spread(ctx, host, "tcp", w.Target(), 30)
			if len(spread.Failures) > 0 {
				return errors.Join(fmt.Errorf("%s from %s", w.Name, host), errors.Join(spread.Failures...), c.explain(ctx))
			}
			say("%s (%s) answers %s: 30 of 30, from %d pods", w.Name, w.Addr, host, len(spread.Pods))
		}
	}
	if err := c.WaitPods(ctx, "kube-system", "k8s-app=kube-dns", 2); err != nil {
		return err
	}
	if err := c.WaitDNS(ctx, c.nodes[0].Name); err != nil {
		return err
	}
	say("the cluster's DNS answers at %s", dnsAddr)
	if err := c.saysMemory(say); err != nil {
		return err
	}
	if err := c.Operates(ctx, say); err != nil {
		return err
	}
	if err := c.Explains(ctx, say); err != nil {
		return errors.Join(err, c.explain(ctx))
	}
	return nil
}

// saysMemory says how much memory each of Landfall's programs on the nodes uses: resident (RSS), what of
// it is anonymous and what is of files, as the pages of the program itself, and its share of that where
// processes have pages in common (PSS).
func (c *Cluster) saysMemory(say func(format string, args ...any)) error {
	for _, node := range c.nodes {
		for _, name := range []string{"landfall-speaker", "landfall-bfd", "landfall-proxy", "landfall-controller"} {
			pids, err := node.Processes(name)
			if err != nil {
				return err
			}
			for _, pid := range pids {
				status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
				if err != nil {
					return err
				}
				shared, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
				if err != nil {
					return err
				}
				say("%s on %s has %s resident (%s anonymous, %s of files), %s with shared pages in part", name, node.Name,
					mebibytes(string(status), "VmRSS"), mebibytes(string(status), "RssAnon"),
					mebibytes(string(status), "RssFile"), mebibytes(string(shared), "Pss"))
			}
		}
	}
	return nil
}

// mebibytes returns a value of /proc/PID/status or smaps_rollup.
func mebibytes(text, key string) string {
	_, rest, _ := strings.Cut(text, "\n"+key+":")
	line, _, _ := strings.Cut(rest, "\n")
	kibibytes, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(line), " kB"))
	if err != nil {
		return "unknown memory"
	}
	return fmt.Sprintf("%.0f MiB", float64(kibibytes)/1024)
}

// explain says what Landfall's pods say, as an error.
func (c *Cluster) explain(ctx context.Context) error {
	pods, err := c.Kube().CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, p := range pods.Items {
		fmt.Fprintln(&b, describePod(p))
	}
	out, err := c.Exec(ctx, lab.ClientName, c.Kubectl(), "--kubeconfig", c.Kubeconfig(), "-n", Namespace, "exec",
		"daemonset/landfall-node", "-c", "speaker", "--", "landfallctl", "status")
	return errors.Join(errors.New(b.String()+out), err)
}
