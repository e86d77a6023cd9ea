package kube

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

func convertDaemonSet(o *appsv1.DaemonSet) lb.DaemonSet {
	gone := o.DeletionTimestamp != nil
	return lb.DaemonSet{
		Stays: !gone, Orphans: gone && slices.Contains(o.Finalizers, metav1.FinalizerOrphanDependents),
		Ready: int(o.Status.NumberReady),
	}
}

// AskDaemonSet reads one DaemonSet as the API server has it now, and reports whether there is one.
// It sends one request: see IsRefused for its errors.
func (c *Client) AskDaemonSet(ctx context.Context, namespace, name string) (d lb.DaemonSet, there bool, err error) {
	var o appsv1.DaemonSet
	get := c.rest.apps.Get().Namespace(namespace).Resource("daemonsets").Name(name)
	err = get.MaxRetries(0).Do(ctx).Into(&o)
	switch {
	case apierrors.IsNotFound(err):
		return d, false, nil
	case err != nil:
		return d, false, fmt.Errorf("read DaemonSet %s/%s: %w", namespace, name, err)
	}
	return convertDaemonSet(&o), true, nil
}

// IsRefused reports whether the API server has answered, and this user may not do what it asked for.
func IsRefused(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) }
