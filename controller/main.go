// Command landfall-controller gives addresses of pools to Services of type LoadBalancer.
package main

import (
	"context"
	"crypto/rand"
	"os"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

const name = "landfall-controller"

// leaseName is also named in the chart's Role.
const leaseName = name

type options struct {
	class, namespace                          string
	leaderElect                               bool
	leaseDuration, renewDeadline, retryPeriod time.Duration
}

func main() {
	var o options
	os.Exit(ops.Main(ops.Program{
		Name:               name,
		Summary:            "gives addresses of IPAddressPools to Services of type LoadBalancer",
		MetricsBindAddress: ":7480",
		Flags:              o.add,
		Run:                func(ctx context.Context, rt *ops.Runtime) error { return run(ctx, rt, o) },
	}))
}

func (o *options) add(flags *pflag.FlagSet) {
	namespace := os.Getenv("POD_NAMESPACE")
	if namespace == "" {
		namespace = "landfall-system"
	}
	flags.StringVar(&o.class, "load-balancer-class", "", "serve only Services with this spec.loadBalancerClass (default: only those without one)")
	flags.StringVar(&o.namespace, "namespace", namespace, "namespace of the Lease (default: $POD_NAMESPACE, else landfall-system)")
	flags.BoolVar(&o.leaderElect, "leader-elect", true, "wait to be the leader before giving out addresses; false is safe only for a single controller")
	flags.DurationVar(&o.leaseDuration, "leader-elect-lease-duration", 15*time.Second, "others take over when a leader has not renewed for this long")
	flags.DurationVar(&o.renewDeadline, "leader-elect-renew-deadline", 10*time.Second, "a leader that could not renew for this long stops leading")
	flags.DurationVar(&o.retryPeriod, "leader-elect-retry-period", 2*time.Second, "time between attempts to become or stay the leader")
}

// check finds what the flags' types cannot.
func (o *options) check() error {
	switch {
	case !o.leaderElect:
		return nil
	case o.retryPeriod <= 0:
		return ops.Usagef("--leader-elect-retry-period: %v is not positive", o.retryPeriod)
	case o.renewDeadline <= o.retryPeriod*6/5:
		return ops.Usagef("--leader-elect-renew-deadline: %v is not more than 1.2 times --leader-elect-retry-period (%v)", o.renewDeadline, o.retryPeriod)
	case o.leaseDuration <= o.renewDeadline:
		return ops.Usagef("--leader-elect-lease-duration: %v is not more than --leader-elect-renew-deadline (%v)", o.leaseDuration, o.renewDeadline)
	}
	return nil
}

func run(ctx context.Context, rt *ops.Runtime, o options) error {
	if err := o.check(); err != nil {
		return err
	}
	if len(rt.Args) > 0 {
		return ops.Usagef("unexpected argument %q", rt.Args[0])
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, UserAgent: name, Log: rt.Log})
	if err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	var c *controller
	services := kube.Services(client, "", func(lb.Key) { c.poke() })
	pools := kube.Pools(client, func(string) { c.poke() })
	status := client.Status(time.Now)
	events := client.Events(name, host)
	c = newController(deps{
		class: o.class, services: services, pools: pools,
		catchUp: func(ctx context.Context) error { return status.CatchUp(ctx, services) },
		status:  status, events: events, metrics: newMetrics(rt.Metrics), log: rt.Log, now: time.Now,
	})
	client.OnSync(c.poke)
	rt.Ready("watches", ready(services, pools))

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return client.Run(ctx) })
	group.Go(func() error { return events.Run(ctx) })
	group.Go(func() error {
		if !o.leaderElect {
			return c.lead(ctx)
		}
		return client.Lead(ctx, kube.Election{
			Namespace: o.namespace, Name: leaseName, Identity: host + "_" + rand.Text()[:8],
			LeaseDuration: o.leaseDuration, RenewDeadline: o.renewDeadline, RetryPeriod: o.retryPeriod,
		}, c.lead)
	})
	return group.Wait()
}
