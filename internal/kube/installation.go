package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Installation reads what runs of Landfall in a namespace, and deletes what its programs have
// created there.
type Installation struct {
	core                kinds
	namespace, selector string
	leader              string
	leases              []string
}

// Installation returns the access to a namespace. The pods are those that the label selector
// matches; leader is the Lease of the leader election, and leases are all others.
func (c *Client) Installation(namespace, selector, leader string, leases ...string) *Installation {
	return &Installation{core: c.core, namespace: namespace, selector: selector, leader: leader, leases: leases}
}

// InstalledPod is a pod of an installation that has not ended.
type InstalledPod struct {
	Name, Node string
	// Ending is set when the pod was deleted. Its containers have ended after Grace, unless the node
	// cannot be reached.
	Ending bool
	Grace  time.Duration
}

// Pods lists the pods that have not ended.
func (i *Installation) Pods(ctx context.Context) ([]InstalledPod, error) {
	list, err := i.core.Pods(i.namespace).List(ctx, metav1.ListOptions{LabelSelector: i.selector})
	if err != nil {
		return nil, fmt.Errorf("list pods in namespace %s: %w", i.namespace, err)
	}
	var pods []InstalledPod
	for _, o := range list.Items {
		if o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed {
			continue
		}
		p := InstalledPod{Name: o.Name, Node: o.Spec.NodeName, Ending: o.DeletionTimestamp != nil}
		if o.DeletionGracePeriodSeconds != nil {
			p.Grace = time.Duration(*o.DeletionGracePeriodSeconds) * time.Second
		}
		pods = append(pods, p)
	}
	return pods, nil
}

// Leader returns who holds the Lease of the leader election, "" if nobody does, and the version of
// the Lease, which each renewal changes.
func (i *Installation) Leader(ctx context.Context) (holder, version string, err error) {
	lease, err := i.core.Leases(i.namespace).Get(ctx, i.leader, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "", "", nil
	case err != nil:
		return "", "", fmt.Errorf("read Lease %s/%s: %w", i.namespace, i.leader, err)
	case lease.Spec.HolderIdentity != nil:
		holder = *lease.Spec.HolderIdentity
	}
	return holder, lease.ResourceVersion, nil
}

// Delete deletes the Leases, and the ConfigMap in which speakers list their gateways.
func (i *Installation) Delete(ctx context.Context) error {
	var errs []error
	for _, name := range append(slices.Clone(i.leases), i.leader) {
		err := i.core.Leases(i.namespace).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("delete Lease %s/%s: %w", i.namespace, name, err))
		}
	}
	err := i.core.ConfigMaps(i.namespace).Delete(ctx, lb.SurroundingsConfigMap, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		errs = append(errs, fmt.Errorf("delete ConfigMap %s/%s: %w", i.namespace, lb.SurroundingsConfigMap, err))
	}
	return errors.Join(errs...)
}
