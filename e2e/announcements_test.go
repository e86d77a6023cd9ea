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
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
	list, err := announcements(t.Context(), l, "my-nginx")
	if err != nil || len(list) != 1 || list[0].VIP != seedVIP.Addr() || list[0].Owner == "" ||
		list[0].Protocol != "ARP" || len(list[0].Interfaces) != 1 {
		t.Fatalf("announcements %+v, %v", list, err)
	}

	services := l.Kube().CoreV1().Services("default")
	before, err := services.Get(t.Context(), "my-nginx", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Annotations[lb.AnnotationAnnouncements] = "nonsense" })
	eventually(t, "a speaker writes over what a tenant has written", func() error {
		s, err := services.Get(t.Context(), "my-nginx", metav1.GetOptions{})
		if err != nil {
			return err
		}
		got, want := s.Annotations[lb.AnnotationAnnouncements], before.Annotations[lb.AnnotationAnnouncements]
		if got != want {
			return fmt.Errorf("the annotation is %q, not %q", got, want)
		}
		return nil
	})

	updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP })
	var bare *corev1.Service
	eventually(t, "a Service without an address says nothing of who announces it", func() (err error) {
		if bare, err = services.Get(t.Context(), "my-nginx", metav1.GetOptions{}); err != nil {
			return err
		}
		if value, ok := bare.Annotations[lb.AnnotationAnnouncements]; ok || len(bare.Status.Conditions) > 0 {
			return fmt.Errorf("annotation %q, conditions %v", value, bare.Status.Conditions)
		}
		return nil
	})

	watch, err := services.Watch(t.Context(), metav1.ListOptions{ResourceVersion: bare.ResourceVersion,
		FieldSelector: "metadata.name=my-nginx"})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer })
	for written, announced := 0, false; !announced; {
		event, ok := <-watch.ResultChan()
		if !ok {
			t.Fatal("the watch has ended")
		}
		s, ok := event.Object.(*corev1.Service)
		if !ok {
			t.Fatalf("the watch says %+v", event)
		}
		written++
		announced = sameNews(t, s)
		whole, _ := json.Marshal(s)
		stored, _ := s.Marshal()
		t.Logf("write %d: %d bytes of JSON, %d of protobuf, of them %d in the annotation", written, len(whole), len(stored),
			len(s.Annotations[lb.AnnotationAnnouncements]))
	}
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
