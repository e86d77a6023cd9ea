package e2e

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestPreStopSleep has the API server add a sleep to the containers that lack a preStop hook, in
// namespaces that ask for it, where the pod has time for it.
func TestPreStopSleep(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Stopped: true, MutatingPolicies: true})
	for name, labels := range map[string]map[string]string{"asks": {lb.LabelPreStopSleep: ""}, "not": nil} {
		if _, err := l.Kube().CoreV1().Namespaces().Create(t.Context(),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	own := &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	start := &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	for _, tt := range []struct {
		name, namespace string
		change          func(*corev1.PodSpec)
		want            string // of each container: its sleep, or its own hook
	}{
		{"plain", "asks", func(*corev1.PodSpec) {}, "3 own 3+start"},
		{"elsewhere", "not", func(*corev1.PodSpec) {}, "- own -+start"},
		{"job", "asks", func(s *corev1.PodSpec) { s.RestartPolicy = corev1.RestartPolicyNever }, "- own -+start"},
		{"hasty", "asks", func(s *corev1.PodSpec) { s.TerminationGracePeriodSeconds = new(int64(3)) }, "- own -+start"},
		{"own", "asks", func(s *corev1.PodSpec) { s.Containers = s.Containers[1:2] }, "own"},
	} {
		ask := func() (string, error) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: tt.name}, Spec: corev1.PodSpec{Containers: []corev1.Container{
				{Name: "a", Image: "a"}, {Name: "b", Image: "b", Lifecycle: own}, {Name: "c", Image: "c", Lifecycle: start}}}}
			tt.change(&pod.Spec)
			made, err := l.Kube().CoreV1().Pods(tt.namespace).Create(t.Context(), pod,
				metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err != nil {
				return "", err
			}
			got := ""
			for _, c := range made.Spec.Containers {
				got += " " + hook(c.Lifecycle)
			}
			return got[1:], nil
		}
		// The API server takes a moment to heed a new policy.
		eventually(t, tt.name, func() error {
			got, err := ask()
			if err == nil && got != tt.want {
				err = fmt.Errorf("hooks %q, want %q", got, tt.want)
			}
			return err
		})
	}
}

func hook(l *corev1.Lifecycle) string {
	if l == nil {
		return "-"
	}
	text := "-"
	switch {
	case l.PreStop != nil && l.PreStop.Sleep != nil:
		text = fmt.Sprint(l.PreStop.Sleep.Seconds)
	case l.PreStop != nil:
		text = "own"
	}
	if l.PostStart != nil {
		text += "+start"
	}
	return text
}
