package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/ctl/verify"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// namespaceManifest is the namespace of Landfall, whose speakers and proxies use the network of their
// node. Everything else in the cluster is restricted: see lab.Options.Kubelets.
const namespaceManifest = `apiVersion: v1
kind: Namespace
metadata: {name: ` + Namespace + `, labels: {pod-security.kubernetes.io/enforce: privileged}}
`

// Test runs helm test, and looks that it leaves nothing.
func (c *Cluster) Test(ctx context.Context, say func(format string, args ...any)) error {
	if err := c.restricts(ctx); err != nil {
		return err
	}
	began := time.Now()
	if out, err := c.Helm(ctx, "test", "landfall", "--namespace", Namespace, "--timeout", "3m"); err != nil {
		log, _ := c.Exec(ctx, lab.ClientName, c.Kubectl(), "--kubeconfig", c.Kubeconfig(), "-n", Namespace, "logs",
			"landfall-test")
		return errors.Join(fmt.Errorf("helm test: %w\n%s\n%s", err, out, log), c.explain(ctx))
	}
	_, err := c.Kube().CoreV1().Services(Namespace).Get(ctx, verify.TestService, metav1.GetOptions{})
	if err == nil {
		err = errors.New("it is there")
	}
	if !apierrors.IsNotFound(err) {
		return fmt.Errorf("helm test left the Service %s: %w", verify.TestService, err)
	}
	say("helm test succeeded in %.1f s", time.Since(began).Seconds())
	return nil
}

// restricts looks that the API server refuses a pod on the network of its node where a namespace does
// not say otherwise.
func (c *Cluster) restricts(ctx context.Context) error {
	_, err := c.Kube().CoreV1().Pods("default").Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "forbidden"},
		Spec:       corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Name: "pod", Image: PodImage}}},
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case apierrors.IsForbidden(err):
		return nil
	case err == nil:
		err = errors.New("it took it")
	}
	return fmt.Errorf("the API server should refuse a pod on the network of its node (Pod Security): %w", err)
}
