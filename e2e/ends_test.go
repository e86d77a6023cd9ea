package e2e

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestServicesEnd takes a Service down by the label service.kubernetes.io/headless and back, has a
// foreign address replaced, and deletes Services: one stays until nobody announces it, with the
// chart's roles.
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
	eventually(t, "no node answers", func() error {
		if answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", seedVIP); err == nil {
			return fmt.Errorf("it is answered by %s", answer.Pod)
		}
		return nil
	})
	updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Labels = nil })
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())

	if err := services.Delete(t.Context(), "my-nginx", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deleted Service goes", func() error {
		if _, err := services.Get(t.Context(), "my-nginx", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %v", err)
		}
		return nil
	})
}
