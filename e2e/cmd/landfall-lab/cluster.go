package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/cluster"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// realCluster starts a cluster of real kubelets; it is kept, or Landfall is tried on it and it is
// taken down again.
func realCluster(ctx context.Context, out io.Writer, options cluster.Options, keep bool) (err error) {
	p := newPrinter(out)
	options.Progress = p.progress
	began := time.Now()
	c, err := cluster.Start(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	p.section("The cluster " + c.Name() + " is up")
	p.line("Three nodes are Ready, %.0f s after the start.", time.Since(began).Seconds())
	if keep {
		p.line("")
		useCluster(p, c)
		return c.Keep()
	}
	if err := c.Smoke(ctx, p.line); err != nil {
		return err
	}
	p.section("Everything answers; the cluster is taken down")
	return nil
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
	p.line("  helm install --create-namespace %s", strings.Join(c.InstallArgs(), " "))
	p.line("")
	p.table([][]string{
		{"Images", "the nodes have " + cluster.Image + " and " + cluster.PodImage + "; nothing is pulled"},
		{"Logs", "ls " + c.LogFolder()},
		{"Take down", "go run ./e2e/cmd/landfall-lab down " + c.Name()},
	})
}
