package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/cluster"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// trial is what is done with a cluster of real kubelets.
type trial struct {
	name  string // returns, helm, guides, migrations, firsthour, rollouts; else a short check
	count int
	away  time.Duration
	only  string // the one way to go away, or the reasons of traps; empty for all
	keep  bool
}

// The stories that need more of the cluster: images of others, or an API that is off by default.
const (
	migrations = "migrations"
	firstHour  = "firsthour"
	rollouts   = "rollouts"
)

// realCluster starts a cluster of real kubelets; it is kept, or Landfall is tried on it and it is
// taken down again.
func realCluster(ctx context.Context, out io.Writer, options cluster.Options, t trial) (err error) {
	p := newPrinter(out)
	options.Progress = p.progress
	if t.name == migrations || t.name == firstHour {
		if options.Archives, err = cluster.UpstreamImages(ctx, p.progress); err != nil {
			return err
		}
	}
	options.MutatingPolicies = t.name == rollouts
	began := time.Now()
	c, err := cluster.Start(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	p.section("The cluster " + c.Name() + " is up")
	p.line("Three nodes are Ready, %.0f s after the start.", time.Since(began).Seconds())
	if t.keep {
		p.line("")
		useCluster(p, c)
		if err := c.Keep(); err != nil {
			return err
		}
	}
	switch {
	case t.name == "" && t.keep:
		return nil
	case t.name == "":
		err = c.Smoke(ctx, p.line)
	case t.name == "returns":
		err = c.Returns(ctx, cluster.Absences{Count: t.count, Length: t.away, Only: t.only}, p.line)
	case t.name == "helm":
		err = c.Lifecycle(ctx, p.line)
	case t.name == "guides":
		err = c.Guides(ctx, p.line)
	case t.name == migrations:
		err = c.Migrations(ctx, p.line)
	case t.name == firstHour:
		err = c.FirstHour(ctx, t.only, p.line)
	case t.name == rollouts:
		err = c.Rollouts(ctx, p.line)
	default:
		err = fmt.Errorf("no story %q: want returns, helm, guides, migrations, firsthour or rollouts", t.name)
	}
	if err == nil {
		p.section("Everything holds")
	}
	return err
}

// useCluster says how to use a cluster that stays.
func useCluster(p *printer, c *cluster.Cluster) {
	topology := c.Lab.Cluster()
	rows := [][]string{}
	for _, n := range c.Nodes() {
		rows = append(rows, []string{n.Name, n.Addr.String(), n.Shell()})
	}
	rows = append(rows,
		[]string{lab.ClientName, topology.LAN.Client.String(), "ip netns exec " + c.Namespace(lab.ClientName) + " bash"},
		[]string{lab.FarClientName, topology.Far.Client.String(), "ip netns exec " + c.Namespace(lab.FarClientName) +
			" bash"})
	for _, r := range c.Routers() {
		rows = append(rows, []string{r.Name, r.Addr.String(), "vtysh --vty_socket " + r.Dir})
	}
	p.table(rows)
	p.line("")
	p.line("For kubectl and helm, in a shell of the client:")
	p.line("")
	p.line("  ip netns exec %s bash", c.Namespace(lab.ClientName))
	p.line("  export KUBECONFIG=%s", c.Kubeconfig())
	p.line("  alias kubectl=%s helm=%s", c.Kubectl(), c.HelmPath())
	p.line("  kubectl create namespace %s", cluster.Namespace)
	p.line("  kubectl label namespace %s pod-security.kubernetes.io/enforce=privileged", cluster.Namespace)
	p.line("  helm install %s", strings.Join(c.InstallArgs(), " "))
	p.line("")
	p.table([][]string{
		{"Images", "the nodes have " + cluster.Image + " and " + cluster.PodImage + "; nothing is pulled"},
		{"Logs", "ls " + c.LogFolder()},
		{"Take down", "go run ./e2e/cmd/landfall-lab down " + c.Name()},
	})
}
