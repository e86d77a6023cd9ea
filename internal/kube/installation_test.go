package kube

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestInstallation reads what runs, and deletes what belongs to the installation and nothing else.
func TestInstallation(t *testing.T) {
	const namespace = "landfall-system"
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: namespace, Name: name} }
	pod := func(name, app string, change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: meta(name), Spec: corev1.PodSpec{NodeName: "n-" + name}}
		p.Labels = map[string]string{"app": app}
		if change != nil {
			change(p)
		}
		return p
	}
	now := metav1.Now()
	core := fake.NewClientset(
		pod("runs", "landfall", nil), pod("other", "other", nil),
		pod("done", "landfall", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
		pod("ends", "landfall", func(p *corev1.Pod) {
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, new(int64(30))
		}),
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "leader", ResourceVersion: "7"},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: new("me")}},
		&coordinationv1.Lease{ObjectMeta: meta("speaker")}, &coordinationv1.Lease{ObjectMeta: meta("theirs")},
		&corev1.ConfigMap{ObjectMeta: meta(lb.SurroundingsConfigMap)}, &corev1.ConfigMap{ObjectMeta: meta("theirs")},
	)
	i := &Installation{core: fakeKinds{core}, namespace: namespace, selector: "app=landfall", leader: "leader",
		leases: []string{"speaker"}}
	pods, err := i.Pods(t.Context())
	if diff := cmp.Diff([]InstalledPod{{Name: "ends", Node: "n-ends", Ending: true, Grace: 30 * time.Second},
		{Name: "runs", Node: "n-runs"}}, pods); diff != "" || err != nil {
		t.Errorf("%v, pods (-want +got):\n%s", err, diff)
	}
	if holder, version, err := i.Leader(t.Context()); holder != "me" || version != "7" || err != nil {
		t.Errorf("leader %q, version %q, %v", holder, version, err)
	}
	for range 2 { // what is gone is no error
		if err := i.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if holder, version, err := i.Leader(t.Context()); holder != "" || version != "" || err != nil {
		t.Errorf("without a Lease: leader %q, version %q, %v", holder, version, err)
	}
	leases, _ := core.CoordinationV1().Leases(namespace).List(t.Context(), metav1.ListOptions{})
	maps, _ := core.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{})
	if len(leases.Items) != 1 || len(maps.Items) != 1 || leases.Items[0].Name+maps.Items[0].Name != "theirstheirs" {
		t.Errorf("left: %v, %v", leases.Items, maps.Items)
	}
}

// TestInstallationFails has each request fail: all that can be deleted is, and the error says what
// cannot.
func TestInstallationFails(t *testing.T) {
	broken := errors.New("broken")
	core := fake.NewClientset()
	core.PrependReactor("*", "*", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, broken })
	i := &Installation{core: fakeKinds{core}, namespace: "n", leader: "leader", leases: []string{"speaker"}}
	if _, err := i.Pods(t.Context()); !errors.Is(err, broken) {
		t.Errorf("pods: %v", err)
	}
	if _, _, err := i.Leader(t.Context()); !errors.Is(err, broken) {
		t.Errorf("leader: %v", err)
	}
	core.ClearActions()
	if err := i.Delete(t.Context()); !errors.Is(err, broken) || len(core.Actions()) != 3 {
		t.Errorf("%v after %d requests", err, len(core.Actions()))
	}
}

func TestIsRefused(t *testing.T) {
	leases := coordinationv1.Resource("leases")
	for err, want := range map[error]bool{
		apierrors.NewUnauthorized(""): true, apierrors.NewForbidden(leases, "x", nil): true,
		apierrors.NewNotFound(leases, "x"): false, apierrors.NewTooManyRequestsError(""): false, errors.New("x"): false,
		nil: false,
	} {
		if IsRefused(err) != want {
			t.Errorf("%v: %v", err, !want)
		}
	}
}
