package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Lifecycle installs, upgrades, rolls back and uninstalls Landfall with helm, each change under
// traffic of both policies over ARP and BGP: nothing may break, and no address may change. What an
// uninstallation leaves on the nodes and in the API server is compared with what was there before.
func (c *Cluster) Lifecycle(ctx context.Context, say func(format string, args ...any)) error {
	if err := c.CreateWeb(ctx); err != nil {
		return err
	}
	before, err := c.traces(ctx)
	if err != nil {
		return err
	}
	if err := c.serve(ctx); err != nil {
		return err
	}
	hosts := []string{lab.ClientName, lab.FarClientName}
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
		of, err := c.underLoad(ctx, longLived, hosts, Webs, func() error {
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
	for _, why := range all.Details() {
		say("  %s", why)
	}
	err = c.uninstalls(ctx, before, hosts, say)
	if lost := all.Err(); lost != nil {
		err = errors.Join(fmt.Errorf("under helm upgrade and rollback: %w", lost), err)
	}
	return err
}

// serve installs Landfall, and waits until all clients get answers from the Services.
func (c *Cluster) serve(ctx context.Context) error {
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.ApplyYAML(ctx, Pool); err != nil {
		return err
	}
	if err := c.allAnswer(ctx); err != nil {
		return errors.Join(err, c.explain(ctx))
	}
	return nil
}

// underLoad changes something while connections are open, so many of each host to each Service, and new ones come.
func (c *Cluster) underLoad(ctx context.Context, long int, hosts []string, webs []Web,
	change func() error) (Outcome, error) {
	watch := c.startControl(ctx, hosts)
	all, err := c.startLoads(ctx, long, hosts, webs...)
	if err != nil {
		return watch.judge(Outcome{}), err
	}
	err = pause(ctx, time.Second)
	if err == nil {
		err = change()
	}
	err = errors.Join(err, pause(ctx, 2*time.Second))
	return watch.judge(all.stop()), err
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
