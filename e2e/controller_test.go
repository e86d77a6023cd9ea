package e2e

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// holdings returns the addresses of each Service of type LoadBalancer in namespace default.
func holdings(ctx context.Context, l *lab.Lab) (map[string]string, error) {
	list, err := l.Kube().CoreV1().Services("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	held := map[string]string{}
	for _, s := range list.Items {
		var addrs []string
		for _, in := range s.Status.LoadBalancer.Ingress {
			addrs = append(addrs, in.IP)
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
			held[s.Name] = strings.Join(addrs, ",")
		}
	}
	return held, nil
}

// wantAllHeld waits until n Services with the prefix hold an address each, no two of them the same.
func wantAllHeld(t *testing.T, l *lab.Lab, prefix string, n int) map[string]string {
	t.Helper()
	var held map[string]string
	eventually(t, fmt.Sprintf("%d Services %s hold addresses", n, prefix), func() error {
		var err error
		if held, err = holdings(t.Context(), l); err != nil {
			return err
		}
		holder := map[string]string{}
		have := 0
		for name, addr := range held {
			if other := holder[addr]; addr != "" && other != "" {
				t.Fatalf("%s is held by %s and %s", addr, name, other)
			}
			holder[addr] = name
			if strings.HasPrefix(name, prefix) && addr != "" {
				have++
			}
		}
		if have != n {
			return fmt.Errorf("%d do", have)
		}
		return nil
	})
	return held
}

func withoutNodePorts(s *corev1.Service) {
	no := false
	s.Spec.AllocateLoadBalancerNodePorts = &no
}

// wantManyReservations has the API server look at pools with the most pairs that the rule for
// reservations looks at, of the longest CIDRs and found last, and with more.
func wantManyReservations(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, n := range []struct{ addresses, reservations int }{{32, 256}, {256, 32}, {256, 256}} {
		var addresses, reservations []string
		for i := range n.addresses {
			addresses = append(addresses, fmt.Sprintf("'2001:0db8:%04x:0000:0000:0000:0000:0000/112'", i))
		}
		for i := range n.reservations {
			reservations = append(
				reservations,
				fmt.Sprintf("{addresses: '2001:0db8:%04x:0000:0000:0000:0000:%04x/128', namespace: a}", n.addresses-1, i))
		}
		err := l.ApplyYAML(
			t.Context(),
			"apiVersion: landfall.dev/v1beta1\nkind: IPAddressPool\nmetadata: {name: large}\nspec: {autoAssign: false, "+
				"addresses: ["+
				strings.Join(addresses, ", ")+"], reservations: ["+strings.Join(reservations, ", ")+"]}\n")
		if err != nil {
			t.Errorf("%d ranges with %d reservations: %.300v", n.addresses, n.reservations, err)
		}
	}
}

// The rules of pools as the API server takes them, and what they do.
func TestContract8RulesOfPools(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{})
	ctx := t.Context()
	for name, test := range map[string]struct{ spec, refused string }{
		"quarantine": {`{addresses: [10.0.0.0/24], quarantine: soon}`, "must be a time such as 60s or 24h, or forever"},
		"excluded":   {`{addresses: [10.0.0.0/24], excludedAddresses: [10.0.0.9-10.0.0.1]}`, "swap the two addresses"},
		"reservation": {`{addresses: [10.0.0.0/24], reservations: [{addresses: 10.0.0.1, namespace: a}]}`,
			"must be a CIDR such as"},
		"outside": {
			`{addresses: [10.0.0.0/24, "fd00::/120"], reservations: [{addresses: 10.0.0.1/32, namespace: a}, ` +
				`{addresses: 10.0.1.0/30, namespace: a}]}`, "each reservation must have addresses of spec.addresses"},
		"nobody":   {`{addresses: [10.0.0.0/24], reservations: [{addresses: 10.0.0.1/32}]}`, "namespace: Required value"},
		"quota":    {`{addresses: [10.0.0.0/24], addressesPerNamespace: -1}`, "should be greater than or equal to 1"},
		"priority": {`{addresses: [10.0.0.0/24], serviceAllocation: {priority: -1}}`, "should be greater than or equal to 0"},
	} {
		err := l.ApplyYAML(ctx, "apiVersion: landfall.dev/v1beta1\nkind: IPAddressPool\nmetadata: {name: bad}\nspec: "+
			test.spec+"\n")
		if err == nil || !strings.Contains(err.Error(), test.refused) {
			t.Errorf("%s: %v, want a refusal with %q", name, err, test.refused)
		}
	}
	wantManyReservations(t, l)
	if err := l.ApplyYAML(ctx, `apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: general}
spec: {addresses: [172.26.236.176-172.26.236.182], excludedAddresses: [172.26.236.181/32]}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: gold}
spec:
  addresses: [172.26.236.190-172.26.236.195]
  avoidBuggyIPs: true
  serviceAllocation:
    priority: 5
    namespaceSelectors: [{matchLabels: {kubernetes.io/metadata.name: default}}]
    serviceSelectors: [{matchLabels: {tier: gold}}]
  reservations: [{addresses: 172.26.236.195/32, namespace: default, name: precious}]
`); err != nil {
		t.Fatal(err)
	}
	// What the nodes and the network have is nobody's, and the pool says so.
	if err := l.ApplyYAML(ctx, `apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: edge}
spec: {addresses: [172.26.236.0/31], autoAssign: false}
`); err != nil {
		t.Fatal(err)
	}
	wantPool(
		t, l, "edge", "True", "Ready",
		"but not 172.26.236.0 (the network address of node k8s-master-176), 172.26.236.1 (the gateway of node "+
			"k8s-master-176)")
	createService(t, l, "asks-for-the-gateway", func(s *corev1.Service) {
		s.Annotations = map[string]string{"landfall.dev/loadBalancerIPs": "172.26.236.1"}
	})
	wantCondition(t, l, "asks-for-the-gateway", "landfall.dev/Assigned", "False", "AddressExcluded",
		"172.26.236.1, which is the gateway of node")
	gold := func(s *corev1.Service) { s.Labels = map[string]string{"tier": "gold"} }
	createService(t, l, "a-node-has-176-to-179", nil)
	wantAddresses(t, l, "a-node-has-176-to-179", "172.26.236.180")
	createService(t, l, "next", nil)
	wantAddresses(t, l, "next", "172.26.236.182")
	createService(t, l, "full", nil)
	wantCondition(t, l, "full", "landfall.dev/Assigned", "False", "PoolExhausted", "general")
	createService(t, l, "shiny", gold)
	wantAddresses(t, l, "shiny", "172.26.236.190")
	createService(t, l, "precious", gold)
	wantAddresses(t, l, "precious", "172.26.236.195")
	createService(
		t, l, "sneaky", func(s *corev1.Service) { s.Annotations = map[string]string{"metallb.io/address-pool": "gold"} })
	wantCondition(t, l, "sneaky", "landfall.dev/Assigned", "False", "PoolNotAllowed", "gold")
	for i, name := range []string{"shared-a", "shared-b"} {
		createService(t, l, name, func(s *corev1.Service) {
			gold(s)
			s.Annotations = map[string]string{"metallb.universe.tf/allow-shared-ip": "together"}
			s.Spec.Ports[0].Port = int32(8000 + i)
		})
		wantAddresses(t, l, name, "172.26.236.191")
	}
	createService(t, l, "two", func(s *corev1.Service) {
		gold(s)
		s.Annotations = map[string]string{"landfall.dev/addresses-per-family": "2", "landfall.dev/ip-mode": "Proxy"}
	})
	wantAddresses(t, l, "two", "172.26.236.192", "172.26.236.193")
	s, err := l.Kube().CoreV1().Services("default").Get(ctx, "two", metav1.GetOptions{})
	if err != nil || s.Status.LoadBalancer.Ingress[0].IPMode == nil ||
		*s.Status.LoadBalancer.Ingress[0].IPMode != corev1.LoadBalancerIPModeProxy {
		t.Errorf("%v: ingress %+v, want ipMode Proxy", err, s.Status.LoadBalancer.Ingress)
	}
	t.Run("delete and create again: the quarantine keeps the address, across a restart", func(t *testing.T) {
		if err := l.Kube().CoreV1().Services("default").Delete(ctx, "shiny", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		wantPool(t, l, "gold", "True", "Ready", "name:shiny")
		for _, a := range l.Agents("controller") {
			if err := cmp.Or(a.Kill(), a.Start(), a.WaitReady(ctx)); err != nil {
				t.Fatal(err)
			}
		}
		createService(t, l, "stranger", gold)
		wantAddresses(t, l, "stranger", "172.26.236.194")
		createService(t, l, "shiny", gold)
		wantAddresses(t, l, "shiny", "172.26.236.190")
	})
}

// createBare creates a Service without node ports, for tests that create many.
func createBare(ctx context.Context, l *lab.Lab, name string) error {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}},
	}
	withoutNodePorts(s)
	_, err := l.Kube().CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
	return err
}

// 500 Services at once. The figure is only logged; docs/guide/ipam.md has it.
func TestControllerServesABurst(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{})
	if err := l.ApplyYAML(t.Context(), pool("large", "10.64.0.0/16")); err != nil {
		t.Fatal(err)
	}
	wantPool(t, l, "large", "True", "Ready", "")
	const n = 500
	var group errgroup.Group
	group.SetLimit(16)
	for i := range n {
		group.Go(func() error {
			return createBare(t.Context(), l, fmt.Sprintf("burst-%d", i))
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	created := time.Now()
	wantAllHeld(t, l, "burst-", n)
	t.Logf("all %d Services hold addresses %v after the last create call", n,
		time.Since(created).Round(10*time.Millisecond))
}

// TestContract8ControllerKills kills the controller at random moments while Services come and go:
// 60 times, or LANDFALL_KILLS times.
func TestContract8ControllerKills(t *testing.T) {
	t.Parallel()
	kills := 60
	if n, err := strconv.Atoi(os.Getenv("LANDFALL_KILLS")); err == nil {
		kills = n
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, %d kills", seed, kills)
	r := rand.New(rand.NewPCG(seed, 0))
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{})
	ctx := t.Context()
	if err := l.ApplyYAML(ctx, pool("large", "10.64.0.0/24")); err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		createService(t, l, fmt.Sprintf("stays-%d", i), withoutNodePorts)
	}
	first := wantAllHeld(t, l, "stays-", 20)
	agents := l.Agents("controller")
	for i := range kills {
		createService(t, l, fmt.Sprintf("comes-%d", i), withoutNodePorts)
		if i >= 30 {
			if err := l.Kube().CoreV1().Services("default").Delete(ctx, fmt.Sprintf("comes-%d", i-30),
				metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
		a := agents[r.IntN(len(agents))]
		if err := cmp.Or(a.Kill(), a.Start()); err != nil {
			t.Fatal(err)
		}
		now, err := holdings(ctx, l)
		if err != nil {
			t.Fatal(err)
		}
		for name, addr := range first {
			if was, is := addr, now[name]; was != "" && was != is && strings.HasPrefix(name, "stays-") {
				t.Fatalf("kill %d: %s held %s and now %q", i, name, was, is)
			}
		}
		for name, addr := range now {
			// What a newcomer once holds it keeps as well.
			if first[name] == "" {
				first[name] = addr
			} else if first[name] != addr {
				t.Fatalf("kill %d: %s held %s and now %q", i, name, first[name], addr)
			}
		}
	}
	wantAllHeld(t, l, "comes-", min(kills, 30))
}
