package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// pool describes a pool whose freed addresses are free for everybody at once.
func pool(name, addresses string) string {
	return fmt.Sprintf(
		"apiVersion: landfall.dev/v1beta1\nkind: IPAddressPool\nmetadata: {name: %s}\nspec: {addresses: [%s], quarantine: "+
			"0s}\n", name, addresses)
}

// createService creates a Service of type LoadBalancer without pods in namespace default.
func createService(t *testing.T, l *lab.Lab, name string, change func(*corev1.Service)) {
	t.Helper()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if change != nil {
		change(s)
	}
	if _, err := l.Kube().CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// wantPool waits for the Ready condition of a pool.
func wantPool(t *testing.T, l *lab.Lab, name, status, reason, text string) {
	t.Helper()
	pools := l.Dynamic().Resource(schema.GroupVersionResource{Group: "landfall.dev", Version: "v1beta1",
		Resource: "ipaddresspools"})
	eventually(t, "pool "+name+" is "+status, func() error {
		o, err := pools.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		said := fmt.Sprint(o.Object["status"])
		for _, want := range []string{"status:" + status, "reason:" + reason, text} {
			if !strings.Contains(said, want) {
				return fmt.Errorf("status %s, want %q in it", said, want)
			}
		}
		return nil
	})
}

// wantEvent waits for an Event about a Service whose message contains text.
func wantEvent(t *testing.T, l *lab.Lab, service, reason, text string) {
	t.Helper()
	eventually(t, "Event "+reason+" about "+service, func() error {
		list, err := l.Kube().CoreV1().Events("default").List(t.Context(),
			metav1.ListOptions{FieldSelector: "involvedObject.name=" + service})
		if err != nil {
			return err
		}
		var seen []string
		for _, e := range list.Items {
			if e.Reason == reason && strings.Contains(e.Message, text) {
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("Events: %q", seen)
	})
}

// Addresses over the life of pools and controllers: contract 8 and 10 as an administrator sees
// them.
func TestContract8AnAddressHasOneHolder(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{})
	ctx := t.Context()
	createService(t, l, "early", nil)
	wantCondition(t, l, "early", "landfall.dev/Assigned", "False", "NoPool", "there is no IPAddressPool")
	if err := l.ApplyYAML(ctx, pool("small", "172.26.236.180-172.26.236.181")); err != nil {
		t.Fatal(err)
	}
	wantAddresses(t, l, "early", "172.26.236.180")

	t.Run("outside every pool", func(t *testing.T) {
		createService(t, l, "elsewhere", func(s *corev1.Service) {
			s.Annotations = map[string]string{"landfall.dev/loadBalancerIPs": "10.1.2.3"}
		})
		wantCondition(t, l, "elsewhere", "landfall.dev/Assigned", "False", "AddressOutside", "10.1.2.3")
		wantEvent(t, l, "elsewhere", "AddressOutside", "10.1.2.3")
	})

	t.Run("a full pool serves oldest first when space appears", func(t *testing.T) {
		createService(t, l, "second", nil)
		wantAddresses(t, l, "second", "172.26.236.181")
		for _, name := range []string{"third", "waiting"} { // of one second, perhaps: then the name decides
			createService(t, l, name, nil)
			wantCondition(t, l, name, "landfall.dev/Assigned", "False", "PoolExhausted", "small")
		}
		if err := l.Kube().CoreV1().Services("default").Delete(ctx, "early", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		wantAddresses(t, l, "third", "172.26.236.180")
		if got, err := addressesOf(ctx, l, "waiting"); err != nil || len(got) > 0 {
			t.Errorf("the younger Service got %v, %v", got, err)
		}
		if err := l.ApplyYAML(ctx, pool("small", "172.26.236.180-172.26.236.182")); err != nil {
			t.Fatal(err)
		}
		wantAddresses(t, l, "waiting", "172.26.236.182")
	})

	t.Run("overlapping pools keep what they hold, and the younger hands out nothing new", func(t *testing.T) {
		if err := l.ApplyYAML(ctx, pool("younger", "172.26.236.182-172.26.236.190")); err != nil {
			t.Fatal(err)
		}
		wantPool(t, l, "younger", "False", "Overlapping", "small")
		wantPool(t, l, "small", "True", "Ready", "")
		createService(t, l, "late", nil)
		wantCondition(t, l, "late", "landfall.dev/Assigned", "False", "PoolExhausted", "small")
		wantAddresses(t, l, "waiting", "172.26.236.182")
	})

	t.Run("restarts and a change of leader move nothing", func(t *testing.T) {
		want := map[string]string{"second": "172.26.236.181", "third": "172.26.236.180", "waiting": "172.26.236.182"}
		for _, end := range []func(*lab.Agent) error{(*lab.Agent).Kill, (*lab.Agent).Stop} {
			for _, a := range l.Agents("controller") {
				if err := end(a); err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(a.Start(), a.WaitReady(ctx)); err != nil {
					t.Fatal(err)
				}
			}
		}
		// A new Service that asks for a free address outside the full pool's reach shows that somebody
		// leads again.
		if err := l.ApplyYAML(ctx, pool("third-pool", "172.26.236.195/32")); err != nil {
			t.Fatal(err)
		}
		wantAddresses(t, l, "late", "172.26.236.195")
		for name, vip := range want {
			wantAddresses(t, l, name, vip)
		}
	})
}
