package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestServicesEnd, in one lab, takes a Service down by the label service.kubernetes.io/headless and
// back, has a foreign address replaced, and deletes Services: one stays until nobody announces it,
// with the chart's roles. In the end it cleans up as helm uninstall does, and stops a proxy.
func TestServicesEnd(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	services := l.Kube().CoreV1().Services("default")
	s, err := services.Get(t.Context(), "my-nginx", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(s.Finalizers, lb.FinalizerCleanup) || s.Annotations[lb.AnnotationAllocatedFrom] != "vmware" {
		t.Errorf("finalizers %v, annotations %v", s.Finalizers, s.Annotations)
	}

	updateService(t, l, "my-nginx", func(s *corev1.Service) {
		s.Labels = map[string]string{lb.LabelHeadless: ""}
	})
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "False", "Headless", lb.LabelHeadless)
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String())
	for _, from := range []string{lab.ClientName, l.Cluster().Nodes[1].Name, "coredns-2"} {
		at := seedClusterIP
		if from == lab.ClientName {
			at = seedVIP
		}
		eventually(t, fmt.Sprintf("%s has no answer at %s", from, at), func() error {
			if answer, err := l.Ask(t.Context(), from, "tcp", at); err == nil {
				return fmt.Errorf("it is answered by %s", answer.Pod)
			}
			return nil
		})
	}
	updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Labels = nil })
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
	wantAnswers(t, l, "coredns-2", "tcp", seedClusterIP, "my-nginx-1", "my-nginx-2")

	if err := services.Delete(t.Context(), "my-nginx", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deleted Service goes", func() error {
		if _, err := services.Get(t.Context(), "my-nginx", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return errors.New("it is still there")
		}
		return nil
	})

	wantForeignReplaced(t, l)
	wantCleanedUp(t, l)
	wantRulesRemoved(t, l)
}

// wantForeignReplaced has another load balancer write its address into the statuses of two
// Services, one of them of its own class.
func wantForeignReplaced(t *testing.T, l *lab.Lab) {
	t.Helper()
	services := l.Kube().CoreV1().Services("default")
	class := "example.com/other"
	for name, class := range map[string]*string{"held": nil, "theirs": &class} {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: class, Ports: []corev1.ServicePort{{Port: 80}}}}
		if _, err := services.Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	wantCondition(t, l, "held", lb.ConditionAssigned, "True", "Assigned", "")
	before, err := addressesOf(t.Context(), l, "held")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"theirs", "held"} {
		eventually(t, "write an address into the status of "+name, func() error {
			s, err := services.Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "172.18.0.3"}}
			_, err = services.UpdateStatus(t.Context(), s, metav1.UpdateOptions{})
			return err
		})
	}
	eventually(t, "an Event says so", func() error {
		events, err := l.Kube().CoreV1().Events("default").List(t.Context(), metav1.ListOptions{
			FieldSelector: "reason=ForeignAddress,involvedObject.name=held"})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
	wantAddresses(t, l, "held", before...)
	theirs, err := services.Get(t.Context(), "theirs", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(theirs.Finalizers) > 0 || len(theirs.Status.Conditions) > 0 ||
		theirs.Status.LoadBalancer.Ingress[0].IP != "172.18.0.3" {
		t.Errorf("a Service of another class was touched: %+v", theirs)
	}
}

// wantCleanedUp stops all that writes Services and has landfall-controller cleanup take back what
// they show.
func wantCleanedUp(t *testing.T, l *lab.Lab) {
	t.Helper()
	services := l.Kube().CoreV1().Services("default")
	wantCondition(t, l, "held", lb.ConditionAnnounced, "False", "NoBackends", "")
	addresses, err := addressesOf(t.Context(), l, "held")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range slices.Concat(l.Agents("controller"), l.Agents("speaker")) {
		if err := a.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	// It came back from a backup, and waits for an address.
	restored, err := services.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "restored", Finalizers: []string{lb.FinalizerCleanup}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new("example.com/restored"),
			Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, class := range []string{"", *restored.Spec.LoadBalancerClass} {
		if _, err := l.Exec(t.Context(), l.Cluster().Nodes[0].Name, filepath.Join(programFolder(t), "landfall-controller"),
			"cleanup", "--kubeconfig="+l.Kubeconfig(), "--load-balancer-class="+class); err != nil {
			t.Fatal(err)
		}
		restored, err = services.Get(t.Context(), "restored", metav1.GetOptions{})
		if ours := class != ""; err != nil || ours != (len(restored.Finalizers) == 0) {
			t.Errorf("after the cleanup of class %q: finalizers %v, %v", class, restored.Finalizers, err)
		}
	}
	got, err := services.Get(t.Context(), "held", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Status.Conditions) > 0 || len(got.Finalizers) > 0 || got.Annotations[lb.AnnotationAnnouncements] != "" {
		t.Errorf("left: %v, finalizers %v, annotations %v", got.Status.Conditions, got.Finalizers, got.Annotations)
	}
	wantAddresses(t, l, "held", addresses...)
	if err := services.Delete(t.Context(), "held", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := services.Get(t.Context(), "held", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("deleted without a controller, it is there: %v", err)
	}
}
