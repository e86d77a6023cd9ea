package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// The worked example's promises.
const (
	serviceSuffix = "BEPXDJBUHFCSYIC3"
	firstSuffix   = "KXZ7A5GCKOVBKJL6" // of the endpoint 192.168.189.131:80
	secondSuffix  = "IQE2HBJHR23S7HKO" // of the endpoint 192.168.100.1:80
	requests      = 200
	probeEvery    = 10 * time.Millisecond
	// recovery is how long the demo waits for another node to take over. It is not what is promised,
	// which is well under a second, as the demo also runs on machines that are busy with other things;
	// the gap that is printed is what counts.
	recovery = 15 * time.Second
)

// tale is what a demo is about: one of the ways in which addresses are announced.
type tale struct {
	opening string
	cluster lab.Cluster
	// manifest is what an administrator applies, and address what the Service then gets.
	manifest, address string
	// values are chart values.
	values map[string]any
	// client is the host that requests come from.
	client string
	steps  func(*story) []step
}

type step struct {
	title string
	run   func(context.Context) error
}

// tales are the demos by name.
var tales = map[string]func() tale{"demo": l2Tale, "demo-bgp": bgpTale}

// demo tells the worked example, step by step, and returns the first thing that was not as
// promised.
func demo(ctx context.Context, out io.Writer, t tale, options lab.Options, keep bool) (err error) {
	p := newPrinter(out)
	options.Progress, options.Values = p.progress, t.values
	p.section(t.opening)
	l, err := lab.Start(ctx, t.cluster, options)
	if err != nil {
		return err
	}
	d := &story{printer: p, lab: l, tale: t}
	err = d.tell(ctx)
	if err != nil {
		d.showLogs()
	}
	if !keep {
		return errors.Join(err, l.Close())
	}
	if keptErr := l.Keep(); keptErr != nil {
		return errors.Join(err, keptErr, l.Close())
	}
	p.section("The lab " + l.Name() + " stays up")
	lookAround(p, l)
	return err
}

// story is what the demo knows while it goes on.
type story struct {
	*printer
	tale
	lab   *lab.Lab
	vip   netip.Addr
	owner string
}

func (d *story) tell(ctx context.Context) error {
	for _, step := range d.steps(d) {
		if step.title != "" {
			d.section(step.title)
		}
		if err := step.run(ctx); err != nil {
			return err
		}
	}
	d.section("All as promised")
	return nil
}

// showCluster shows what is there.
func (d *story) showCluster(context.Context) error {
	c := d.lab.Cluster()
	rows := [][]string{{"NODE", "ADDRESS", "PODS", ""}}
	for _, n := range c.Nodes {
		var pods []string
		for _, p := range c.Pods {
			if p.Node == n.Name {
				pods = append(pods, p.Name+" "+p.Addr.String())
			}
		}
		role := ""
		if n.ControlPlane {
			role = "(etcd, kube-apiserver, landfall-controller)"
		}
		rows = append(rows, []string{n.Name, n.Addr.String(), strings.Join(pods, ", "), role})
	}
	d.table(rows)
	d.line("")
	d.line("On each node: landfall-speaker and landfall-proxy, as the chart's DaemonSet starts them.")
	if len(d.lab.Routers()) == 0 {
		d.line("A client at %s on the nodes' LAN, another at %s behind a router.", c.LAN.Client, c.Far.Client)
		return nil
	}
	for _, r := range d.lab.Routers() {
		d.line("%s at %s: %s, AS %d.", r.Name, r.Addr, c.ToR.Kind, c.ToR.ASN)
	}
	d.line("A client at %s behind them, which spreads its connections over both.", c.Far.Client)
	return nil
}

// showAddress applies the manifest and the Service and waits for the address.
func (d *story) showAddress(ctx context.Context) error {
	for line := range strings.Lines(d.manifest) {
		d.line("│ %s", strings.TrimRight(line, "\n"))
	}
	if err := d.lab.ApplyYAML(ctx, d.manifest); err != nil {
		return err
	}
	s := lab.SeedService()
	if err := d.lab.AddService(ctx, s); err != nil {
		return err
	}
	start := time.Now()
	err := d.wait(ctx, "an address for default/my-nginx", func(ctx context.Context) error {
		svc, err := d.service(ctx)
		if err != nil {
			return err
		}
		if len(svc.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("none in the status; conditions: %s", conditions(svc))
		}
		d.vip, err = netip.ParseAddr(svc.Status.LoadBalancer.Ingress[0].IP)
		return err
	})
	if err != nil {
		return err
	}
	took := time.Since(start)
	svc, err := d.service(ctx)
	if err != nil {
		return err
	}
	d.line("")
	d.table([][]string{
		{"SERVICE", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)"},
		{"default/my-nginx", string(svc.Spec.Type), svc.Spec.ClusterIP, d.vip.String(),
			fmt.Sprintf("%d:%d/TCP", svc.Spec.Ports[0].Port, svc.Spec.Ports[0].NodePort)},
	})
	d.line("")
	return d.promise(d.vip.String() == d.address, "the Service has %s, the pool's first address (after %d ms)", d.vip,
		took.Milliseconds())
}

// programmed shows which nodes' kernels hold the rules.
func (d *story) programmed(ctx context.Context) error {
	rows := [][]string{{"NODE", "PROGRAMMED", "READY BACKENDS", "OF THEM LOCAL"}}
	for _, n := range d.lab.Cluster().Nodes {
		var delivery delivery
		err := d.wait(ctx, "the rules on "+n.Name, func(ctx context.Context) (err error) {
			delivery, err = d.delivery(ctx, n.Name)
			switch {
			case err != nil:
				return err
			case !delivery.Programmed:
				return errors.New(delivery.Message)
			case delivery.Ready != 2:
				return fmt.Errorf("%d ready backends", delivery.Ready)
			}
			return nil
		})
		if err != nil {
			return err
		}
		rows = append(rows, []string{n.Name, "yes", strconv.Itoa(delivery.Ready), strconv.Itoa(delivery.LocalReady)})
	}
	d.table(rows)
	d.line("")
	return d.promise(true, "all %d nodes: the kernel has confirmed each rule for %s", len(d.lab.Cluster().Nodes), d.vip)
}

// chains prints the Service's chains.
func (d *story) chains(ctx context.Context) error {
	rules, err := d.lab.Exec(ctx, "k8s-worker-177", "iptables-save", "-t", "nat")
	if err != nil {
		return err
	}
	var last string
	for _, r := range serviceRules(rules, serviceSuffix, firstSuffix, secondSuffix) {
		if r.chain != last {
			d.line("%s", r.chain)
			last = r.chain
		}
		d.line("    %-92s %s", r.rule, r.comment)
	}
	d.line("")
	for _, chain := range []string{"LF-SVC-" + serviceSuffix, "LF-EXT-" + serviceSuffix, "LF-SEP-" + firstSuffix,
		"LF-SEP-" + secondSuffix} {
		if !strings.Contains(rules, ":"+chain+" ") {
			return d.promise(false, "the chain %s is there", chain)
		}
	}
	return d.promise(true, "the suffixes are those that operators know from kube-proxy")
}

// clusterPolicy sends requests with policy Cluster.
func (d *story) clusterPolicy(ctx context.Context) (lab.Spread, error) {
	spread := d.lab.Spread(ctx, d.client, "tcp", d.target(), requests)
	d.spread(spread)
	if err := d.answered(spread, requests); err != nil {
		return spread, err
	}
	one, two := spread.Pods["my-nginx-1"], spread.Pods["my-nginx-2"]
	// With 200 fair draws, fewer than 60 for one pod comes once in a hundred million runs.
	if err := d.promise(one+two == requests && min(one, two) >= 60, "both pods get their share: %d and %d", one,
		two); err != nil {
		return spread, err
	}
	client := d.clientAddr()
	return spread,
		d.promise(
			spread.Sources[client] == 0, "the client's address %s is hidden behind the node's: what policy Cluster costs",
			client)
}

// setLocal switches the policy, and shows the health ports.
func (d *story) setLocal(ctx context.Context) error {
	patch := []byte(`{"spec":{"externalTrafficPolicy":"Local"}}`)
	svc, err := d.lab.Kube().CoreV1().Services("default").Patch(ctx, "my-nginx", types.MergePatchType, patch,
		metav1.PatchOptions{})
	if err != nil {
		return err
	}
	return d.healthPorts(ctx, svc.Spec.HealthCheckNodePort)
}

// healthPorts shows what each node's health port answers to a load balancer that probes it.
func (d *story) healthPorts(ctx context.Context, port int32) error {
	rows := [][]string{{"NODE", fmt.Sprintf("HEALTH PORT %d", port), "LOCAL ENDPOINTS", ""}}
	for _, n := range d.lab.Cluster().Nodes {
		want := http.StatusServiceUnavailable
		if d.podOn(n.Name) != "" {
			want = http.StatusOK
		}
		var h health
		err := d.wait(ctx, fmt.Sprintf("%d from the health port of %s", want, n.Name), func(ctx context.Context) (err error) {
			h, err = d.health(ctx, n.Addr, port)
			if err == nil && h.code != want {
				err = fmt.Errorf("it answers %d", h.code)
			}
			return err
		})
		if err != nil {
			return err
		}
		rows = append(rows, []string{n.Name, strconv.Itoa(h.code) + " " + http.StatusText(h.code),
			strconv.Itoa(h.LocalEndpoints), d.podOn(n.Name)})
	}
	d.table(rows)
	d.line("")
	return d.promise(true, "200 where a pod is, 503 elsewhere")
}

// report shows what a client that opens connections all the time has seen.
func (d *story) report(r lab.Report) {
	d.table([][]string{
		{"NEW CONNECTIONS", "ANSWERED", "SLOWER THAN 100 ms", "WITHOUT ANSWER", "HIT FOR", "LONGEST GAP"},
		{strconv.Itoa(r.Sent), strconv.Itoa(r.Answered), strconv.Itoa(r.Slow), strconv.Itoa(r.Failed()),
			fmt.Sprintf("%d ms", r.Hit.Milliseconds()), fmt.Sprintf("%d ms", r.Gap.Milliseconds())},
	})
	d.line("")
}

func (d *story) clientAddr() netip.Addr {
	if d.client == lab.FarClientName {
		return d.lab.Cluster().Far.Client
	}
	return d.lab.Cluster().LAN.Client
}
