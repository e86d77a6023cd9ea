// Command landfall-controller assigns addresses from pools to Services of type LoadBalancer.
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/controller/dashboard"
	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/kube/election"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

const name = "landfall-controller"

// What to do with an address outside its pools, or with one that two Services hold.
const (
	keep = "keep"
	move = "move"
)

// Client-side limits: a burst of Services is written as fast as the API server takes it, within its
// own limits per client.
const (
	qps   = 500
	burst = 1000
	// Writes of Services that are under way at a time.
	parallel = 32
)

// leaseName, and speakersLease, which speakers create, are also named in the chart's Roles.
const (
	leaseName     = name
	speakersLease = "landfall-speaker"
)

type options struct {
	class, namespace                          string
	leaderElect                               bool
	metallb                                   bool
	outside, duplicates                       string
	never                                     []string
	leaseDuration, renewDeadline, retryPeriod time.Duration
	clearAddresses                            bool
	dashboard                                 bool
	selector                                  string // of Landfall's pods
}

// cleanupArg has the program take back what Landfall wrote to Services.
const cleanupArg = "cleanup"

func main() {
	var o options
	metrics := "localhost:7480"
	if slices.Contains(os.Args, cleanupArg) {
		metrics = "" // where a controller may still be running
	}
	os.Exit(ops.Main(ops.Program{
		Name:    name,
		Summary: "assigns addresses from IPAddressPools to Services of type LoadBalancer",
		Usage: "With the argument cleanup, the program waits until Landfall's pods have ended, removes what Landfall " +
			"wrote to\nthe Services of its class (conditions, annotations and the finalizer), its Leases and its " +
			"ConfigMap, and exits.\nIt removes nothing while Landfall runs.",
		MetricsBindAddress: metrics,
		Flags:              o.add,
		ProbeSocket:        true,
		Run:                func(ctx context.Context, rt *ops.Runtime) error { return run(ctx, rt, o) },
	}))
}

// candidate returns the name of this process in the election, and how those of all processes of its pod begin. The
// kubelet starts a container again once the last one has ended; of others on the host it is unknown.
func candidate(host, podUID string) (identity, life string) {
	if podUID == "" {
		return host + "_" + rand.Text()[:8], ""
	}
	life = host + "_" + podUID + "_"
	return life + rand.Text()[:8], life
}

func (o *options) add(flags *pflag.FlagSet) {
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		namespace = "landfall-system"
	}
	flags.StringVar(&o.class, "load-balancer-class", "",
		"serve only Services with this spec.loadBalancerClass (default: only Services without one)")
	flags.StringVar(&o.namespace, "namespace", namespace,
		"namespace of the leader election's Lease and of the ConfigMap "+lb.SurroundingsConfigMap+
			", in which speakers list their gateways (default: $POD_NAMESPACE, else landfall-system)")
	flags.BoolVar(&o.leaderElect, "leader-elect", true,
		"assign addresses only while this replica is the leader; without leader election, several controllers assign no "+
			"address twice but refuse one another's writes and slow down")
	flags.BoolVar(&o.metallb, "metallb-annotations", true,
		"read annotations of metallb.io and metallb.universe.tf as well as those of landfall.dev")
	flags.StringVar(&o.outside, "when-outside", keep,
		"what to do when no pool contains a Service's address any more: keep the address, or move the Service to another; "+
			"the Service's annotation "+lb.AnnotationWhenOutside+" overrides this")
	flags.StringVar(&o.duplicates, "when-duplicate", keep,
		"what to do when a Service that comes first holds the same address, as after a restored backup or a change of "+
			"ports: keep the address, or move the Service that comes later")
	flags.StringSliceVar(&o.never, "never-assign", nil,
		"CIDRs and ranges that the controller never assigns, whatever pools contain; it never assigns addresses of Nodes "+
			"and "+
			"gateways that speakers report either")
	flags.DurationVar(&o.leaseDuration, "leader-elect-lease-duration", 15*time.Second,
		"another replica takes over when the leader has not renewed its Lease for this long")
	flags.DurationVar(&o.renewDeadline, "leader-elect-renew-deadline", 10*time.Second,
		"a leader that fails to renew its Lease for this long stops leading; must be shorter than the lease "+
			"duration")
	flags.DurationVar(&o.retryPeriod, "leader-elect-retry-period", 2*time.Second,
		"time between attempts to acquire or renew the Lease")
	flags.BoolVar(&o.dashboard, "dashboard", false,
		"serve a page that shows pools, addresses, sessions and problems at "+dashboard.Path+"/ of the metrics server, for "+
			"users whom the API server lets get the nonResourceURL "+dashboard.Path+"; needs --metrics-secure")
	flags.BoolVar(&o.clearAddresses, "clear-addresses", false,
		"with the argument cleanup, also remove the addresses of Services; by default they stay, so that the next "+
			"installation of Landfall, or MetalLB, goes on with them")
	flags.StringVar(&o.selector, "pod-selector",
		"app.kubernetes.io/name=landfall,app.kubernetes.io/component in (controller,node,proxy,speaker)",
		"with the argument cleanup, label selector of Landfall's pods in --namespace; while one runs, nothing is removed")
}

// check finds what the flags' types cannot.
func (o *options) check() error {
	if err := cmp.Or(
		ops.OneOf("when-outside", o.outside, keep, move), ops.OneOf("when-duplicate", o.duplicates, keep, move),
	); err != nil {
		return err
	}
	switch {
	case !o.leaderElect:
		return nil
	case o.retryPeriod <= 0:
		return ops.Usagef("--leader-elect-retry-period: %v is not positive", o.retryPeriod)
	case o.renewDeadline <= o.retryPeriod*6/5:
		return ops.Usagef("--leader-elect-renew-deadline: %v is not more than 1.2 times --leader-elect-retry-period (%v)",
			o.renewDeadline, o.retryPeriod)
	case o.leaseDuration <= o.renewDeadline:
		return ops.Usagef("--leader-elect-lease-duration: %v is not more than --leader-elect-renew-deadline (%v)",
			o.leaseDuration, o.renewDeadline)
	}
	return nil
}

// config is what the flags say about who gets what.
func (o *options) config() (plan.Config, error) {
	c := plan.Config{Class: o.class, MoveOutside: o.outside == move, MoveDuplicates: o.duplicates == move}
	for _, written := range o.never {
		if addr, err := lb.ParseAddr(written); err == nil {
			c.Never = append(c.Never, lb.Range{From: addr, To: addr})
			continue
		}
		r, err := lb.ParseRange(written)
		if err != nil {
			return c, ops.Usagef("--never-assign: %v", err)
		}
		c.Never = append(c.Never, r)
	}
	return c, nil
}

func run(ctx context.Context, rt *ops.Runtime, o options) error {
	if err := o.check(); err != nil {
		return err
	}
	clean := slices.Equal(rt.Args, []string{cleanupArg})
	if o.clearAddresses && !clean {
		return ops.Usagef("--clear-addresses: only with the argument %s", cleanupArg)
	}
	if len(rt.Args) > 0 && !clean {
		return ops.Usagef("unexpected argument %q", rt.Args[0])
	}
	config, err := o.config()
	if err != nil {
		return err
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, Servers: rt.APIServers, UserAgent: name,
		Log: rt.Log, QPS: qps,
		Burst: burst})
	if err != nil {
		return err
	}
	if clean {
		c := cleaner{
			services: client.Status(time.Now), class: o.class, addresses: o.clearAddresses, log: rt.Log,
			installation: client.Installation(o.namespace, o.selector, leaseName, speakersLease),
		}
		return c.run(ctx)
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	identity, life := candidate(host, os.Getenv("POD_UID"))
	var c *controller
	var board *dashboard.Dashboard // nil: it is off
	services := kube.RequestingServices(client, o.metallb, func(key lb.Key) {
		c.serviceChanged(key)
		board.ServiceChanged(key)
	})
	changed := func(name string) {
		c.factChanged(name)
		board.FactsChanged()
	}
	status := client.Status(time.Now)
	events := client.Events(name, host)
	d := deps{
		config: config, services: services,
		pools: kube.Pools(client, changed, changed), namespaces: kube.Namespaces(client, changed),
		nodes:  kube.Nodes(client, "", changed),
		around: kube.Surroundings(client, o.namespace, changed),
		forgetAround: func(ctx context.Context, nodes []string) error {
			entries := map[string]*string{}
			for _, node := range nodes {
				entries[node] = nil
			}
			return client.TellSurroundings(ctx, o.namespace, entries)
		},
		forgetSessions: status.DropPeerNodes,
		catchUp:        func(ctx context.Context) error { return status.CatchUp(ctx, services) },
		status:         status, events: events, metrics: newMetrics(rt.Metrics), log: rt.Log, now: time.Now,
		identity: identity, parallel: parallel, allocatedFrom: o.metallb,
	}
	if rt.Traces.On() {
		d.trace = rt.Traces.Add
	}
	if tidy := func(string) { c.tidier.runner.Poke() }; o.dashboard {
		shown := showing{deps: d, class: o.class, leads: func() bool { return c.leads() },
			peers: kube.BGPPeerSessions(client, func(name string) { tidy(name); board.FactsChanged() }),
			found: kube.NodeFindings(client, func(string) { board.FactsChanged() })}
		board, d.sessions = shown.dashboard(), peerNodes{shown.peers}
		if err := rt.Serve("dashboard", guardedDashboard, board, reviewDashboard(client)); err != nil {
			return err
		}
	} else {
		d.sessions = kube.BGPPeerNodes(client, tidy)
	}
	c = newController(d)
	client.OnSync(c.poke)
	rt.Ready("watches", ready(d))
	rt.ReviewMetrics(client.ReviewMetrics, nil)

	watch(c, client, events, rt.Live)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return client.Run(ctx) })
	group.Go(func() error { return events.Run(ctx) })
	group.Go(func() error {
		if !o.leaderElect {
			return c.lead(ctx)
		}
		return election.Lead(ctx, client, rt.Log, election.Options{
			Namespace: o.namespace, Name: leaseName, Identity: identity, Life: life,
			LeaseDuration: o.leaseDuration, RenewDeadline: o.renewDeadline, RetryPeriod: o.retryPeriod,
			Ending: &c.ending,
		}, c.lead)
	})
	return group.Wait()
}

// watch has the liveness of each loop watched.
func watch(c *controller, client *kube.Client, events *kube.Events,
	live func(loop string, busy func() time.Duration)) {
	live("assign addresses", c.runner.Busy)
	live("stop leading", c.ending.Busy)
	live("tidy up", c.tidier.runner.Busy)
	live("write since when external IPs are listed", c.lister.runner.Busy)
	live("watches", client.Busy)
	live("events", events.Busy)
}
