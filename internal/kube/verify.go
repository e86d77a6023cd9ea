package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What landfallctl verify needs: a few requests, without a watch.

// Workloads returns the Deployments and DaemonSets with these labels, sorted by name.
func (c *Client) Workloads(ctx context.Context, namespace, selector string) ([]lb.Workload, error) {
	options := metav1.ListOptions{LabelSelector: selector}
	var all []lb.Workload
	deployments, err := c.core.Deployments(namespace).List(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("list Deployments: %w", err)
	}
	for _, d := range deployments.Items {
		w := lb.Workload{Kind: "Deployment", Name: d.Name, Wanted: 1}
		if d.Spec.Replicas != nil {
			w.Wanted = int(*d.Spec.Replicas)
		}
		if d.Status.ObservedGeneration >= d.Generation {
			w.Ready = int(min(d.Status.UpdatedReplicas, d.Status.ReadyReplicas))
		}
		all = append(all, w)
	}
	sets, err := c.core.DaemonSets(namespace).List(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("list DaemonSets: %w", err)
	}
	for _, d := range sets.Items {
		w := lb.Workload{Kind: "DaemonSet", Name: d.Name, Wanted: int(d.Status.DesiredNumberScheduled)}
		if d.Status.ObservedGeneration >= d.Generation {
			w.Ready = int(min(d.Status.UpdatedNumberScheduled, d.Status.NumberReady))
		}
		all = append(all, w)
	}
	return all, nil
}

// CreateService creates a Service of type LoadBalancer with one TCP port, which leads to the same
// port of the pods with these labels.
func (c *Client) CreateService(ctx context.Context, key lb.Key, class string, port uint16,
	pods map[string]string) error {
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, Selector: pods,
			Ports: []corev1.ServicePort{{Port: int32(port), TargetPort: intstr.FromInt32(int32(port))}},
		},
	}
	if class != "" {
		o.Spec.LoadBalancerClass = &class
	}
	if _, err := c.core.Services(key.Namespace).Create(ctx, o, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create Service %s: %w", key, err)
	}
	return nil
}

// DeleteService deletes a Service, and is content if there is none.
func (c *Client) DeleteService(ctx context.Context, key lb.Key) error {
	err := c.core.Services(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete Service %s: %w", key, err)
	}
	return nil
}
