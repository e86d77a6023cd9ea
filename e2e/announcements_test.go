package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestContract10AnnouncementsAreData checks the annotation with who announces a Service's addresses
// on the real API server with the chart's roles, which let a speaker write the subresource status
// only: it changes together with the condition, in one write, is written over after somebody else
// has edited it, and goes with the address.
func TestContract10AnnouncementsAreData(t *testing.T) {
	l := startProduct(t)
	watch, err := l.Kube().CoreV1().Services("default").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	createService(t, l, "data", nil)
	eventually(t, "the Service says who announces it", func() error {
		list, err := announcements(t.Context(), l, "data")
		if err == nil && (len(list) != 1 || list[0].Owner == "" || list[0].Reason != lb.ReasonAnnounced ||
			list[0].Protocol != "ARP" || len(list[0].Interfaces) != 1) {
			err = fmt.Errorf("it says %+v", list)
		}
		return err
	})
	for written, announced := 0, false; !announced; {
		event, ok := <-watch.ResultChan()
		if !ok {
			t.Fatal("the watch has ended")
		}
		s, ok := event.Object.(*corev1.Service)
		if !ok || s.Name != "data" {
			continue
		}
		written++
		announced = sameNews(t, s)
		whole, _ := json.Marshal(s)
		t.Logf("state %d of the Service: %d bytes of JSON, of them %d in the annotation", written, len(whole),
			len(s.Annotations[lb.AnnotationAnnouncements]))
	}

	before, err := l.Kube().CoreV1().Services("default").Get(t.Context(), "data", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	updateService(t, l, "data", func(s *corev1.Service) { s.Annotations[lb.AnnotationAnnouncements] = "nonsense" })
	eventually(t, "a speaker writes over what a tenant has written", func() error {
		s, err := l.Kube().CoreV1().Services("default").Get(t.Context(), "data", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got, want := s.Annotations[lb.AnnotationAnnouncements],
			before.Annotations[lb.AnnotationAnnouncements]; got != want {
			return fmt.Errorf("the annotation is %q, not %q", got, want)
		}
		return nil
	})

	updateService(t, l, "data", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP })
	eventually(t, "a Service without an address says nothing of who announces it", func() error {
		s, err := l.Kube().CoreV1().Services("default").Get(t.Context(), "data", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if value, ok := s.Annotations[lb.AnnotationAnnouncements]; ok || len(s.Status.Conditions) > 0 {
			return fmt.Errorf("annotation %q, conditions %v", value, s.Status.Conditions)
		}
		return nil
	})
}

// sameNews fails if the annotation of a Service says something else than its condition Announced,
// and reports whether the Service is announced.
func sameNews(t *testing.T, s *corev1.Service) (announced bool) {
	t.Helper()
	value := s.Annotations[lb.AnnotationAnnouncements]
	list, err := lb.DecodeAnnouncements(value)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range s.Status.Conditions {
		if c.Type != lb.ConditionAnnounced {
			continue
		}
		if len(list) == 0 || string(list[0].Reason) != c.Reason || !strings.Contains(c.Message, list[0].Owner) {
			t.Errorf("the condition says %s (%s), the annotation %s", c.Message, c.Reason, value)
		}
		return c.Status == metav1.ConditionTrue
	}
	if value != "" {
		t.Errorf("the annotation was written without the condition: %s", value)
	}
	return false
}
