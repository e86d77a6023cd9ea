package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestTellSurroundings creates the ConfigMap, adds to it, changes and removes entries.
func TestTellSurroundings(t *testing.T) {
	core := fake.NewClientset()
	c := &Client{core: fakeKinds{core}}
	a, b := "192.0.2.1 the gateway\n", "192.0.2.2 the gateway\n"
	for _, entries := range []map[string]*string{{"gone": nil}, {"a": &a, "gone": nil}, {"b": &a}, {"b": &b, "c": &a},
		{"c": nil}} {
		if err := c.TellSurroundings(t.Context(), "ns", entries); err != nil {
			t.Fatal(err)
		}
	}
	got, err := core.CoreV1().ConfigMaps("ns").Get(t.Context(), lb.SurroundingsConfigMap, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": a, "b": b}, got.Data); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
