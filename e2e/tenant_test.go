package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// addTenant creates a Service whose namespace and age come before those of my-nginx once that is
// created again. It has no endpoints: what it serves is refused.
func addTenant(t *testing.T, l *lab.Lab) {
	t.Helper()
	tenant := lab.Service{Namespace: "aaa", Name: "x", Type: "ClusterIP",
		Ports: []lab.Port{{Name: "http", Port: 80}, {Name: "dns", Protocol: "UDP", Port: 53}, {Name: "dns-tcp", Port: 53}}}
	if err := l.AddService(t.Context(), tenant); err != nil {
		t.Fatal(err)
	}
}

// testContract11Tenant has a tenant list the VIP of another Service, the cluster's DNS, a free
// address of the pool, and a Node's as external IPs while traffic runs. It loses nothing, and the
// tenant is told.
func testContract11Tenant(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	before, err := condition(ctx, l, "my-nginx", "landfall.dev/Announced")
	if err != nil {
		t.Fatal(err)
	}
	web := startTraffic(t, l, seedVIP)
	dns := l.StartProbe(ctx, "my-nginx-1", "udp", dnsVIP, newEvery)
	services := l.Kube().CoreV1().Services("aaa")
	x, err := services.Get(ctx, "x", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	worker := l.Cluster().Nodes[1].Addr.String() // whose sshd and kubelet are not the tenant's
	x.Spec.ExternalIPs = []string{seedVIP.Addr().String(), dnsVIP.Addr().String(), "172.26.236.199", worker}
	if _, err := services.Update(ctx, x, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the tenant is told by every node", func() error {
		events, err := l.Kube().CoreV1().Events("aaa").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, node := range l.Cluster().Nodes {
			if !slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
				return e.Reason == "ExternalIPRefused" && strings.HasPrefix(e.Message, node.Name+": ") &&
					strings.Contains(e.Message, seedVIP.Addr().String()+" lies in the IPAddressPool vmware") &&
					strings.Contains(e.Message, dnsVIP.Addr().String()+" lies in ") &&
					strings.Contains(e.Message, "172.26.236.199 lies in ") &&
					strings.Contains(e.Message, worker+" is an address of the Node ")
			}) {
				return fmt.Errorf("no Event of %s", node.Name)
			}
		}
		return nil
	})
	time.Sleep(time.Second) // for what a wrong proxy would do next
	web.wantLossless(t)
	wantNoneLost(t, dns.Stop())
	after, err := condition(ctx, l, "my-nginx", "landfall.dev/Announced")
	if err != nil || after != before {
		t.Errorf("the condition of the VIP's holder was %+v and is %+v (%v)", before, after, err)
	}
}

// testContract11ExternalIP has the Service that holds the VIP list an external IP, and then the older one of
// [addTenant], which has no endpoints and the same port. Who listed it first goes on.
func testContract11ExternalIP(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	const external = "198.51.100.7"
	list := func(namespace, name string, ips ...string) {
		t.Helper()
		patch := fmt.Appendf(nil, `{"spec":{"externalIPs":["%s"]}}`, strings.Join(ips, `","`))
		if len(ips) == 0 {
			patch = []byte(`{"spec":{"externalIPs":null}}`)
		}
		if _, err := l.Kube().CoreV1().Services(namespace).Patch(ctx, name, types.MergePatchType, patch,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	listed := func(namespace, name string) {
		t.Helper()
		eventually(t, "the controller has seen that "+name+" lists it", func() error {
			s, err := l.Kube().CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			c := meta.FindStatusCondition(s.Status.Conditions, lb.ConditionExternalIPs)
			if c == nil || !strings.Contains(c.Message, external) {
				return fmt.Errorf("its condition is %+v", c)
			}
			return nil
		})
	}
	target := netip.AddrPortFrom(netip.MustParseAddr(external), 80)
	list("default", "my-nginx", external)
	listed("default", "my-nginx")
	eventually(t, "the external IP answers", func() error {
		_, err := l.Ask(ctx, "my-nginx-1", "tcp", target)
		return err
	})
	probe := l.StartProbe(ctx, "my-nginx-1", "tcp", target, newEvery)
	list("aaa", "x", external)
	listed("aaa", "x")
	time.Sleep(time.Second) // for what a wrong proxy would do next
	wantNoneLost(t, probe.Stop())
	list("default", "my-nginx")
	list("aaa", "x")
}
