package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// gated is how pods get the sleep and the readiness gate; the last step gives them to pods that are there.
var gated = []step{
	{rolling, "kubectl label namespace shop landfall.dev/pre-stop-sleep="},
	{rolling, "helm upgrade landfall charts/landfall"},
	{rolling, "kubectl label namespace shop landfall.dev/wait-until-programmed="},
	{rolling, "kubectl -n shop rollout restart deployment"},
}

// Rollouts restarts a Deployment while new connections come to its Services, of both policies, over ARP and BGP:
// none may fail. The API server gives the pods a sleep and the readiness gate, after the commands of
// docs/guide/rollouts.md. It does so once with Landfall's controller, and once without.
func (c *Cluster) Rollouts(ctx context.Context, say func(format string, args ...any)) (err error) {
	shell, err := c.shell()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(shell.tools)) }()
	if err := c.CreateWeb(ctx); err != nil {
		return err
	}
	if err := c.serve(ctx); err != nil {
		return err
	}
	hosts := []string{lab.ClientName, lab.FarClientName}
	for i, s := range gated {
		if i == len(gated)-1 {
			if err := c.waitGated(ctx); err != nil {
				return err
			}
		}
		if err := c.step(ctx, shell, s, say); err != nil {
			return err
		}
	}
	if err := c.restarted(ctx); err != nil {
		return err
	}
	var all Outcome
	for _, step := range []struct {
		name     string
		replicas int
	}{{"with the controller", 2}, {"without the controller", 0}} {
		if _, err := c.kubectl(ctx, fmt.Sprintf("-n %s scale deployment landfall-controller --replicas=%d", Namespace,
			step.replicas)); err != nil {
			return err
		}
		if err := c.WaitPods(ctx, Namespace, "app.kubernetes.io/component=controller", step.replicas); err != nil {
			return err
		}
		began := time.Now()
		of, err := c.underLoad(ctx, 0, hosts, Webs, func() error {
			if _, err := c.kubectl(ctx, "-n web rollout restart deployment web"); err != nil {
				return err
			}
			return c.restarted(ctx)
		})
		say("a rolling update %s took %.0f s: %s", step.name, time.Since(began).Seconds(), of)
		all.Add(of)
		if err != nil {
			return fmt.Errorf("rolling update %s: %w", step.name, err)
		}
	}
	return all.Err()
}

// kubectl runs a command of kubectl without quotes in it on the client of the nodes' LAN.
func (c *Cluster) kubectl(ctx context.Context, line string) (string, error) {
	argv := append([]string{c.Kubectl(), "--kubeconfig", c.Kubeconfig()}, strings.Fields(line)...)
	return c.Exec(ctx, lab.ClientName, argv...)
}

// waitGated waits until the API server adds the gate to new pods: it takes a moment to heed a policy.
func (c *Cluster) waitGated(ctx context.Context) error {
	deployment, err := c.Kube().AppsV1().Deployments("web").Get(ctx, "web", metav1.GetOptions{})
	if err != nil {
		return err
	}
	template := deployment.Spec.Template
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: "web-", Labels: template.Labels}, Spec: template.Spec}
	return lab.WaitFor(ctx, c.options.Progress, "the readiness gate of new pods", time.Minute,
		func(ctx context.Context) error {
			made, err := c.Kube().CoreV1().Pods("web").Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil && (len(made.Spec.ReadinessGates) != 1 || made.Spec.Containers[0].Lifecycle == nil) {
				err = fmt.Errorf("gates %v, hooks %v", made.Spec.ReadinessGates, made.Spec.Containers[0].Lifecycle)
			}
			return err
		})
}

// restarted waits until pods have replaced the old ones, one after the other, and looks why their gates have
// opened.
func (c *Cluster) restarted(ctx context.Context) error {
	if _, err := c.kubectl(ctx, "-n web rollout status deployment web --timeout=5m"); err != nil {
		return err
	}
	if err := c.WaitPods(ctx, "web", "app=web", len(c.nodes)); err != nil {
		return err
	}
	pods, err := c.Kube().CoreV1().Pods("web").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		if why := gateOf(p); why != string(lb.ReasonProgrammed) {
			return fmt.Errorf("the readiness gate of %s on %s: %q, want %s", p.Name, p.Spec.NodeName, why, lb.ReasonProgrammed)
		}
	}
	return nil
}

// gateOf returns why the readiness gate of a pod is open; "" if it is not.
func gateOf(p corev1.Pod) string {
	for _, condition := range p.Status.Conditions {
		if condition.Type == lb.ConditionProgrammed && condition.Status == corev1.ConditionTrue {
			return condition.Reason
		}
	}
	return ""
}
