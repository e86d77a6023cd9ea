package kube

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestConvertGatedPod(t *testing.T) {
	since := metav1.NewTime(time.Unix(1e9, 0))
	is := func(types ...corev1.PodConditionType) (conditions []corev1.PodCondition) {
		for _, t := range types {
			conditions = append(conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: since})
		}
		return append(conditions, corev1.PodCondition{Type: "never", Status: corev1.ConditionUnknown})
	}
	gates := func(types ...corev1.PodConditionType) (gates []corev1.PodReadinessGate) {
		for _, t := range types {
			gates = append(gates, corev1.PodReadinessGate{ConditionType: t})
		}
		return gates
	}
	now := metav1.NewTime(time.Now())
	for _, tt := range []struct {
		name          string
		gates         []corev1.PodReadinessGate
		conditions    []corev1.PodCondition
		deleted       *metav1.Time
		ready, opened bool
		passed        bool
	}{
		{"waits for us", gates(lb.ConditionProgrammed), is("ContainersReady"), nil, true, false, false},
		{"starts", gates(lb.ConditionProgrammed), is("PodScheduled"), nil, false, false, false},
		{"waits for another gate", gates("never", lb.ConditionProgrammed), is("ContainersReady"), nil, false, false, false},
		{"another gate is open", gates("x", lb.ConditionProgrammed), is("x", "ContainersReady"), nil, true, false, false},
		{"open", gates(lb.ConditionProgrammed), is("ContainersReady", lb.ConditionProgrammed), nil, true, true, false},
		{"ready", gates(lb.ConditionProgrammed), is("Ready", "ContainersReady", lb.ConditionProgrammed), nil, true, true, true},
		{"stopped", gates(lb.ConditionProgrammed), is(lb.ConditionProgrammed), nil, false, true, false},
		{"ends", gates(lb.ConditionProgrammed), is("ContainersReady"), &now, false, false, false},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a", UID: "u", DeletionTimestamp: tt.deleted},
			Spec: corev1.PodSpec{ReadinessGates: tt.gates},
			Status: corev1.PodStatus{Conditions: tt.conditions,
				PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "nonsense"}, {IP: "fd00::1"}}}}
		key, got := convertGatedPod(pod)
		if got.Passed.Equal(since.Time) != tt.passed || got.Passed.IsZero() == tt.passed {
			t.Errorf("%s: ready since %v", tt.name, got.Passed)
		}
		got.Passed = time.Time{}
		want := lb.GatedPod{UID: "u", Ready: tt.ready, Opened: tt.opened,
			Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
		if want := (lb.Key{Namespace: "shop", Name: "a"}); key != want {
			t.Errorf("%s: key %s, want %s", tt.name, key, want)
		}
		pod.Spec.ReadinessGates = gates("never")
		if _, got := convertGatedPod(pod); got.UID != "" || got.Addrs != nil {
			t.Errorf("%s: without our gate it is %+v", tt.name, got)
		}
	}
}
