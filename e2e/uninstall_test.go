package e2e

import (
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// wantRulesRemoved has a proxy stop. Its rules stay while its DaemonSet is there, and when that is
// deleted without its pods; they go when it is deleted.
func wantRulesRemoved(t *testing.T, l *lab.Lab) {
	t.Helper()
	node := l.Cluster().Nodes[0].Name
	proxy, sets := l.Agent("proxy", node), l.Kube().AppsV1().DaemonSets(lab.Namespace)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const set = "landfall-node"
	installed, err := sets.Get(t.Context(), set, metav1.GetOptions{})
	check(err)
	begin := func() {
		t.Helper()
		again := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: set}, Spec: installed.Spec}
		_, err := sets.Create(t.Context(), again, metav1.CreateOptions{})
		check(err)
		check(proxy.Start())
		check(proxy.WaitReady(t.Context()))
	}
	stop := func() (rules bool) {
		t.Helper()
		check(proxy.Stop())
		tables, err := l.Exec(t.Context(), node, "nft", "list", "tables")
		check(err)
		return strings.Contains(tables, "landfall")
	}

	if !stop() {
		t.Fatal("the rules are gone although the DaemonSet is there")
	}
	check(proxy.Start())
	check(proxy.WaitReady(t.Context()))
	// There is no garbage collector that would take the finalizer away.
	check(sets.Delete(t.Context(), set, metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationOrphan)}))
	if !stop() {
		t.Fatal("the rules are gone although the DaemonSet is deleted without its pods")
	}
	_, err = sets.Patch(t.Context(), set, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`),
		metav1.PatchOptions{})
	check(err)
	// The proxy may be ready before its watch has shown the DaemonSet, and then leaves its rules.
	eventually(t, "the last proxy removes its rules", func() error {
		begin()
		if err := sets.Delete(t.Context(), set, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		if stop() {
			return errors.New("they stay; the proxy says:\n" + proxy.Log())
		}
		return nil
	})
}
