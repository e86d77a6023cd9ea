package kube

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// NodeOfPod returns the node of the pod that has an address of its own; "" if none has. The API
// server finds pods by their first address only.
func (c *Client) NodeOfPod(ctx context.Context, addr netip.Addr) (string, error) {
	options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("status.podIP", addr.String()).String()}
	nodes, err := listIn(ctx, c, c.rest.core, "", "pods", "", options, &corev1.PodList{},
		func(l *corev1.PodList) []corev1.Pod { return l.Items }, func(o *corev1.Pod) string {
			ended := o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed
			if ended || o.Spec.HostNetwork || o.Status.PodIP != addr.String() {
				return ""
			}
			return o.Spec.NodeName
		})
	return slices.Max(append(nodes, "")), err
}
