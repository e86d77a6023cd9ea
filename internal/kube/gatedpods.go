package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/internal/lb"
)

// GatedPods watches the pods of a node. Those without the readiness gate lb.ConditionProgrammed are zero
// in the table.
func GatedPods(c *Client, node string, changed func(lb.Key)) *Table[lb.Key, lb.GatedPod] {
	table := newTable[lb.Key, lb.GatedPod](nil, changed)
	// Without a right to see them, rules go by EndpointSlices alone.
	c.register(resource{client: c.rest.core, name: "pods", example: &corev1.Pod{}, optional: true,
		fieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()},
		objects[lb.Key, lb.GatedPod, *corev1.Pod]{table, convertGatedPod})
	return table
}

func convertGatedPod(o *corev1.Pod) (lb.Key, lb.GatedPod) {
	key := keyOf(o)
	isOurs := func(g corev1.PodReadinessGate) bool { return g.ConditionType == lb.ConditionProgrammed }
	if !slices.ContainsFunc(o.Spec.ReadinessGates, isOurs) {
		return key, lb.GatedPod{}
	}
	since := func(t corev1.PodConditionType) (at time.Time, is bool) {
		for _, c := range o.Status.Conditions {
			if c.Type == t && c.Status == corev1.ConditionTrue {
				return c.LastTransitionTime.Time, true
			}
		}
		return at, false
	}
	is := func(t corev1.PodConditionType) bool { _, is := since(t); return is }
	pod := lb.GatedPod{UID: string(o.UID), Labels: o.Labels, Opened: is(lb.ConditionProgrammed),
		Ready: o.DeletionTimestamp == nil && is(corev1.ContainersReady)}
	pod.Passed, _ = since(corev1.PodReady)
	for _, gate := range o.Spec.ReadinessGates {
		pod.Ready = pod.Ready && (isOurs(gate) || is(gate.ConditionType))
	}
	for _, ip := range o.Status.PodIPs {
		if addr, err := lb.ParseAddr(ip.IP); err == nil {
			pod.Addrs = append(pod.Addrs, addr)
		}
	}
	return key, pod
}

// OpenGate sets the condition lb.ConditionProgrammed of a pod. A pod of that name that was created anew is
// not touched.
func (c *Client) OpenGate(ctx context.Context, pod lb.Key, uid string, reason lb.Reason, message string,
	at time.Time) error {
	patch, since := statusPatch{Metadata: patchedMetadata{UID: uid}}, metav1.NewTime(at)
	patch.Status.Conditions = []any{patchedCondition{Type: lb.ConditionProgrammed, Status: conditionStatus(true),
		Reason: reason, Message: message, LastTransitionTime: &since}}
	body, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encode status of pod %s: %w", pod, err)
	}
	_, err = c.core.Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, body,
		metav1.PatchOptions{}, "status")
	if err != nil {
		return fmt.Errorf("write status of pod %s: %w", pod, err)
	}
	return nil
}
