package e2e

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// TestCatalogue sends what the catalogue of bad input holds, and checks each answer.
func TestCatalogue(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	cluster.DualStack = true
	l := labtest.Start(t, cluster, lab.Options{Stopped: true})
	hostile := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: hostileNamespace}}
	if _, err := l.Kube().CoreV1().Namespaces().Create(t.Context(), hostile, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	for _, all := range []map[string][]badObject{refusedObjects(t), schemaRows(t)} {
		for _, file := range sortedKeys(all) {
			t.Run(file, func(t *testing.T) { refuseObjects(t, l, file, all[file]) })
		}
	}
}
