package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// metallbController and metallbSpeaker are MetalLB's as its manifests have them, as far as anything here depends on
// it.
const metallbController = `---
apiVersion: apps/v1
kind: Deployment
metadata: {name: controller, namespace: metallb-system, labels: {app: metallb, component: controller}}
spec:
  replicas: 1
  selector: {matchLabels: {app: metallb, component: controller}}
  template:
    metadata: {labels: {app: metallb, component: controller}}
    spec:
      containers:
      - {name: controller, image: "metallb/controller:v0.14.9",
         args: [--port=7473, --webhook-mode=disabled, --disable-cert-rotation=true]}
`

const metallbSpeaker = `---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: speaker, namespace: metallb-system, labels: {app: metallb, component: speaker}}
spec:
  selector: {matchLabels: {app: metallb, component: speaker}}
  template:
    metadata: {labels: {app: metallb, component: speaker}}
    spec:
      hostNetwork: true
      nodeSelector: {kubernetes.io/os: linux}
      containers:
      - {name: speaker, image: "metallb/speaker:v0.14.9", args: [--port=7472]}
`

const metallbL2 = `---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan, namespace: metallb-system, labels: {zone: a}}
spec: {addresses: [172.26.236.180-172.26.236.199], avoidBuggyIPs: true}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: lan, namespace: metallb-system}
spec: {ipAddressPools: [lan]}
`

const metallbBGP = `---
apiVersion: v1
kind: Secret
metadata: {name: tor, namespace: metallb-system}
type: kubernetes.io/basic-auth
stringData: {password: secret}
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: routed, namespace: metallb-system}
spec: {addresses: [203.0.113.180-203.0.113.199]}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: routed, namespace: metallb-system}
spec: {ipAddressPools: [routed]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.26.236.1, passwordSecret: {name: tor}}
`

// metallbCluster is a lab in which MetalLB serves, and Landfall is installed beside it.
type metallbCluster struct {
	l      *lab.Lab
	kubes  *kubelets
	client string
	held   map[string]string
}

// frrMode returns the DaemonSets that MetalLB's manifest of a mode with FRR has.
func frrMode(t *testing.T, manifest string) string {
	t.Helper()
	folder, err := lab.MetalLBFRR(t.Context(), func(line string) { t.Log(line) })
	if err != nil {
		t.Skipf("MetalLB cannot be built here, or has no FRR: %v", err)
	}
	text, err := os.ReadFile(filepath.Join(folder, manifest))
	if err != nil {
		t.Fatal(err)
	}
	var sets strings.Builder
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		if strings.Contains(document, "\nkind: DaemonSet\n") {
			sets.WriteString("---\n" + document + "\n")
		}
	}
	definitions, err := filepath.Glob(filepath.Join(folder, "frr-k8s-crds", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range definitions {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		sets.WriteString("---\n" + string(text) + "\n")
	}
	return sets.String()
}

// startMetalLB starts one, with a real controller and real speakers of MetalLB, whose DaemonSets are speakers.
func startMetalLB(t *testing.T, speakers string, cluster lab.Cluster, objects, client string, options lab.Options) *metallbCluster {
	t.Helper()
	programs, definitions, err := lab.MetalLB(t.Context(), func(line string) { t.Log(line) })
	if err != nil {
		t.Skipf("MetalLB cannot be built here: %v", err)
	}
	options.Stopped = true
	l := labtest.Start(t, cluster, options)
	c := &metallbCluster{l: l, client: client}
	for _, apply := range []func() error{
		func() error { return l.ApplyFolder(t.Context(), definitions) },
		func() error {
			return l.ApplyYAML(t.Context(), "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+metallbNamespace+"}\n")
		},
		func() error { return c.eventuallyApply(t, objects) },
		func() error { return l.ApplyYAML(t.Context(), metallbController+speakers) },
	} {
		if err := apply(); err != nil {
			t.Fatal(err)
		}
	}
	c.kubes = startKubelets(t, l, programs, "")
	for i := range 6 {
		s := lab.SeedService()
		if i > 0 {
			s.Name, s.ClusterIP, s.Ports = fmt.Sprint("web-", i), netip.Addr{}, []lab.Port{{Port: 80}}
		}
		if i == 5 {
			s.ExternalTrafficPolicy = "Local"
		}
		if err := l.AddService(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "MetalLB assigns addresses, and clients reach them", func() error {
		if c.held, err = holdings(t.Context(), l); err != nil {
			return err
		}
		for name, addr := range c.held {
			if addr == "" {
				return fmt.Errorf("%s has no address", name)
			}
			if _, err := l.Ask(t.Context(), client, "tcp", c.at(name)); err != nil {
				return err
			}
		}
		return nil
	})
	return c
}

// eventuallyApply applies objects of kinds that the API server may not serve yet.
func (c *metallbCluster) eventuallyApply(t *testing.T, objects string) error {
	eventually(t, "the API server serves MetalLB's kinds", func() error { return c.l.ApplyYAML(t.Context(), objects) })
	return nil
}

// at returns where clients reach a Service.
func (c *metallbCluster) at(service string) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(c.held[service]), 80)
}

// migrate runs landfallctl migrate metallb.
func (c *metallbCluster) migrate(t *testing.T, flags ...string) string {
	t.Helper()
	ctl := filepath.Join(programFolder(t), "landfallctl")
	args := append([]string{ctl, "--kubeconfig", c.l.Kubeconfig(), "migrate", "metallb", "--cluster-cidr",
		"192.168.0.0/16", "--wait", "1m"}, flags...)
	step(t, "landfallctl migrate metallb "+strings.Join(flags, " "))
	out, err := c.l.Exec(t.Context(), c.l.Cluster().Nodes[0].Name, args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// wantKept fails the test if a Service has another address than MetalLB gave it.
func (c *metallbCluster) wantKept(t *testing.T, when string) {
	t.Helper()
	held, err := holdings(t.Context(), c.l)
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(held, c.held) {
		t.Fatalf("%s: held %v, want %v", when, held, c.held)
	}
}

// announces reports whether a speaker of Landfall answers for an address or announces a route.
func (c *metallbCluster) announces(ctx context.Context) bool {
	for _, a := range c.l.Agents("speaker") {
		views, err := views(ctx, c.l, a.Node)
		for _, v := range views {
			if err == nil && len(v.Answering) > 0 {
				return true
			}
		}
	}
	return false
}

// watchBoth looks until the test calls what it returns, and fails it if a program of both products
// answers at the same time. Of the one that is to start it asks first: if that answers, and the
// other does afterwards, both were there. On the way to Landfall MetalLB's speakers may not even run.
func (c *metallbCluster) watchBoth(t *testing.T, ours func(context.Context) bool, first bool) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	theirs := func() bool { return c.kubes.metallbRuns("speaker-") }
	group.Go(func() {
		for ctx.Err() == nil {
			if first && ours(ctx) && theirs() || !first && theirs() && c.metallbAnnounces(ctx) && ours(ctx) {
				t.Error("MetalLB's speakers run while Landfall's answer")
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	return func() { cancel(); group.Wait() }
}

// metallbAnnounces reports whether MetalLB's L2Advertisement selects nodes.
func (c *metallbCluster) metallbAnnounces(ctx context.Context) bool {
	ad, err := c.l.Dynamic().Resource(schema.GroupVersionResource{Group: "metallb.io", Version: "v1beta1",
		Resource: "l2advertisements"}).Namespace(metallbNamespace).Get(ctx, "lan", metav1.GetOptions{})
	if err != nil {
		return false
	}
	selectors, _, err := unstructured.NestedSlice(ad.Object, "spec", "nodeSelectors")
	return err == nil && len(selectors) == 0
}

// moveTraffic is new connections and established ones to some Services.
type moveTraffic struct {
	probes map[string]*lab.Probe
	flows  map[string]*flows
}

func (c *metallbCluster) startTraffic(t *testing.T) moveTraffic {
	t.Helper()
	f := moveTraffic{map[string]*lab.Probe{}, map[string]*flows{}}
	for name := range c.held {
		f.flows[name] = startFlowsFrom(t, c.l, c.client, c.at(name), 10)
		f.probes[name] = c.l.StartProbe(t.Context(), c.client, "tcp", c.at(name), 4*newEvery)
	}
	return f
}

func (f moveTraffic) stop(t *testing.T) (sent, failed, lost int) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(f.probes)) {
		report := f.probes[name].Stop()
		broken := f.flows[name].stop()
		t.Logf("%s: %s; %d of 10 established connections broke", name, report, broken)
		sent, failed, lost = sent+report.Sent, failed+report.Failed(), lost+broken
	}
	return sent, failed, lost
}

// metallbOwners returns which node announces each Service, as MetalLB says it.
func (c *metallbCluster) metallbOwners(t *testing.T) map[string]string {
	t.Helper()
	list, err := c.l.Dynamic().Resource(schema.GroupVersionResource{Group: "metallb.io", Version: "v1beta1",
		Resource: "servicel2statuses"}).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	owners := map[string]string{}
	for _, o := range list.Items {
		status, _ := o.Object["status"].(map[string]any)
		if name, _ := status["serviceName"].(string); name != "" {
			owners[name] = fmt.Sprint(status["node"])
		}
	}
	return owners
}

// leaveStatus makes what a speaker of MetalLB on another node than the owner leaves of a Service that it took for
// its own before it had met the others: seen on a busy machine.
func (c *metallbCluster) leaveStatus(t *testing.T, service, owner string) {
	t.Helper()
	other := slices.DeleteFunc(workers(c.l), func(node string) bool { return node == owner })[0]
	if err := c.l.ApplyYAML(t.Context(), fmt.Sprintf(`
apiVersion: metallb.io/v1beta1
kind: ServiceL2Status
metadata: {name: l2-00000, namespace: %s, labels: {metallb.io/node: %s, metallb.io/service-name: %s,
  metallb.io/service-namespace: default}}
`, metallbNamespace, other, service)); err != nil {
		t.Fatal(err)
	}
}

// A cluster with real speakers and a real controller of MetalLB moves to Landfall under traffic, and
// back, and again. No address changes, none moves to another node, and no connection breaks.
func TestMigrationFromMetalLB(t *testing.T) {
	t.Parallel()
	c := startMetalLB(t, metallbSpeaker, lab.SeedCluster(), metallbL2, lab.ClientName, lab.Options{})
	var owners map[string]string
	since := time.Now()
	eventually(t, "MetalLB goes on to say who announces each Service", func() error {
		now := c.metallbOwners(t)
		if !maps.Equal(owners, now) {
			owners, since = now, time.Now()
		}
		// Its speakers announce before they have met, and for 5 s: connections to one that yields then break.
		if len(owners) != len(c.held) || time.Since(since) < 8*time.Second {
			return fmt.Errorf("%v for %s", owners, time.Since(since))
		}
		return nil
	})
	c.leaveStatus(t, "my-nginx", owners["my-nginx"])
	plan := c.migrate(t)
	for _, want := range []string{"6 Services keep their addresses", "IPAddressPool lan", "clusterCIDR: 192.168.0.0/16",
		"swap the speakers on all nodes at once"} {
		if !strings.Contains(plan, want) {
			t.Errorf("the plan does not say %q:\n%s", want, plan)
		}
	}
	c.wantKept(t, "after the plan")
	clients := c.startTraffic(t)
	stop := c.watchBoth(t, c.announces, true)
	t.Log(c.migrate(t, "--apply"))
	stop()
	time.Sleep(2 * time.Second) // clients learn of late announcements too
	sent, failed, lost := clients.stop(t)
	t.Logf("Layer 2: %d new connections, %d failed; %d established ones broke", sent, failed, lost)
	if failed > sent/100 || lost > 0 { // a slow machine makes the gap longer
		t.Errorf("Layer 2: %d of %d new connections failed, and %d of %d established ones broke", failed, sent, lost,
			10*len(c.held))
	}
	c.wantKept(t, "with Landfall")
	c.wantOwners(t, owners)
	c.wantSettled(t)
	c.migrate(t, "--apply") // again changes nothing
	c.wantKept(t, "after the second run")
	c.wantOwners(t, owners)
	createService(t, c.l, "new", nil)
	eventually(t, "Landfall assigns", func() error {
		held, err := holdings(t.Context(), c.l)
		if err == nil && held["new"] == "" {
			err = errors.New("no address")
		}
		return err
	})
	if err := c.l.Kube().CoreV1().Services("default").Delete(t.Context(), "new", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	stop = c.watchBoth(t, c.announces, false)
	c.migrate(t, "--undo")
	stop()
	c.wantKept(t, "back at MetalLB")
	eventually(t, "MetalLB announces again", func() error {
		if back := c.metallbOwners(t); len(back) != len(c.held) {
			return fmt.Errorf("%v", back)
		}
		for name := range c.held {
			if _, err := c.l.Ask(t.Context(), c.client, "tcp", c.at(name)); err != nil {
				return err
			}
		}
		return nil
	})
	if c.announces(t.Context()) {
		t.Error("Landfall still announces")
	}
}

// wantOwners fails the test unless Landfall announces each Service from this node.
func (c *metallbCluster) wantOwners(t *testing.T, owners map[string]string) {
	t.Helper()
	said, err := views(t.Context(), c.l, c.l.Cluster().Nodes[1].Name)
	if err != nil {
		t.Fatal(err)
	}
	for name, node := range owners {
		if owner := said[c.at(name).Addr()].Owner; owner != node {
			t.Errorf("%s is announced from %q, and was from %s", name, owner, node)
		}
	}
}

// wantSettled fails the test if anything is left that a migration needs for itself.
func (c *metallbCluster) wantSettled(t *testing.T) {
	t.Helper()
	services, err := c.l.Kube().CoreV1().Services("").List(t.Context(), metav1.ListOptions{
		LabelSelector: "landfall.dev/metallb-owner"})
	if err != nil || len(services.Items) > 0 {
		t.Errorf("labels on Services: %v %v", services.Items, err)
	}
	nodes, err := c.l.Kube().CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: "landfall.dev/migrated"})
	if err != nil || len(nodes.Items) > 0 {
		t.Errorf("labels on Nodes: %v %v", nodes.Items, err)
	}
	if c.kubes.metallbRuns("") {
		t.Error("a program of MetalLB runs")
	}
	pods, err := c.l.Kube().CoreV1().Pods(metallbNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Labels["app"] == "metallb" }) {
		t.Errorf("pods of MetalLB: %v %v", pods.Items, err)
	}
}

// Over BGP the nodes are swapped one after another: routers always have a route.
func TestMigrationFromMetalLBOverBGP(t *testing.T) {
	t.Parallel()
	for mode, manifest := range map[string]string{"native": "", "frr": lab.MetalLBFRRManifest,
		"frr-k8s": lab.MetalLBFRRK8sManifest} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			speakers := metallbSpeaker
			if manifest != "" {
				speakers = frrMode(t, manifest)
			}
			moveOverBGP(t, speakers)
		})
	}
}

// moveOverBGP moves a cluster with these speakers of MetalLB to Landfall and back.
func moveOverBGP(t *testing.T, speakers string) {
	t.Helper()
	cluster := lab.SeedCluster()
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500, Password: "secret"}
	// FRR's BFD daemon, which MetalLB starts in its modes with FRR, ends where its ports are taken.
	c := startMetalLB(t, speakers, cluster, metallbBGP, lab.FarClientName, lab.Options{
		Values: map[string]any{"speaker": map[string]any{"bgpSecrets": []any{"tor"}, "bfdNeighbors": 0}}})
	routed := func(when string) {
		t.Helper()
		for name := range c.held {
			want := workers(c.l)
			if name == "web-5" { // policy Local
				want = []string{"k8s-worker-178", "k8s-worker-179"}
			}
			wantRouted(t, c.l, c.at(name).Addr(), want...)
		}
	}
	routed("with MetalLB")
	if out, err := c.l.Exec(t.Context(), c.l.Cluster().Nodes[0].Name, filepath.Join(programFolder(t), "landfallctl"),
		"--kubeconfig", c.l.Kubeconfig(), "migrate", "metallb", "--cluster-cidr", "192.168.0.0/16", "--apply"); err == nil ||
		!strings.Contains(err.Error()+out, "--copy-secrets") {
		t.Errorf("passwords are copied without consent: %v %s", err, out)
	}
	clients := c.startTraffic(t)
	t.Log(c.migrate(t, "--apply", "--copy-secrets", "--pause", "3s"))
	sent, failed, lost := clients.stop(t)
	// Routers move connections to other nodes when routes go and come, and Landfall's proxies, which are on
	// all nodes by then, pass them on to where they are known.
	t.Logf("BGP: %d new connections, %d failed; %d of %d established ones broke", sent, failed, lost, 10*len(c.held))
	if failed > sent/100 || lost > 0 {
		t.Errorf("BGP: %d of %d new connections failed, and %d of %d established ones broke", failed, sent, lost,
			10*len(c.held))
	}
	c.wantKept(t, "with Landfall")
	routed("with Landfall")
	c.wantSettled(t)
	clients = c.startTraffic(t)
	c.migrate(t, "--undo", "--copy-secrets")
	c.wantKept(t, "back at MetalLB")
	routed("back at MetalLB")
	sent, failed, lost = clients.stop(t) // between the two routers have no route, as the guide says
	t.Logf("back: %d new connections, %d failed; %d of %d established ones broke", sent, failed, lost, 10*len(c.held))
}
