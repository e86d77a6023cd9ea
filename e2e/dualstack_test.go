package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

const dualStackPool = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec: {addresses: [172.26.236.180-172.26.236.199, "fd00:172:26:236::180-fd00:172:26:236::199"]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec: {ipAddressPools: [lan]}
`

var seedVIP6 = netip.AddrPortFrom(lab.Twin(seedVIP.Addr()), seedVIP.Port())

// startDualStack starts the seed cluster with both families, and its pool.
func startDualStack(t testing.TB, options lab.Options) *lab.Lab {
	t.Helper()
	cluster := lab.SeedCluster()
	cluster.DualStack = true
	l := labtest.Start(t, cluster, options)
	if err := l.ApplyYAML(t.Context(), dualStackPool); err != nil {
		t.Fatal(err)
	}
	return l
}

// TestDualStack has a Service with an address of each family, which clients on the LAN reach by ARP
// and NDP and others through the router. When the node dies that answers for the one of IPv6,
// another takes over.
func TestDualStack(t *testing.T) {
	t.Parallel()
	l := startDualStack(t, lab.Options{})
	service := lab.SeedService()
	service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String(), seedVIP6.Addr().String())
	for _, target := range []netip.AddrPort{seedVIP, seedVIP6} {
		for _, client := range []string{lab.ClientName, lab.FarClientName} {
			wantAnswers(t, l, client, "tcp", target, "my-nginx-1", "my-nginx-2")
		}
	}
	// The neighbor tables say that it was ARP and NDP.
	for _, vip := range []netip.Addr{seedVIP.Addr(), seedVIP6.Addr()} {
		if neighbor := mustExec(t, l, lab.ClientName, "ip", "neigh", "show", "to", vip.String()); neighbor == "" {
			t.Errorf("the client has no neighbor %s", vip)
		}
	}

	setLocal(t, l)
	for _, target := range []netip.AddrPort{seedVIP, seedVIP6} {
		owner := wantAnswererAmong(t, l, target.Addr(), "k8s-worker-178", "k8s-worker-179")
		pod := map[string]string{"k8s-worker-178": "my-nginx-1", "k8s-worker-179": "my-nginx-2"}[owner]
		client := l.Cluster().LAN.Client
		if target == seedVIP6 {
			client = lab.Twin(client)
		}
		eventually(t, fmt.Sprintf("%s answers at %s, and sees the client's own address", pod, target), func() error {
			if s := l.Spread(t.Context(), lab.ClientName, "tcp", target, 20); s.Pods[pod] != 20 || s.Sources[client] != 20 {
				return fmt.Errorf("answers by %v, sources %v, failures %q", s.Pods, s.Sources, s.Failures)
			}
			return nil
		})
	}

	was := answerer(t, l, seedVIP6.Addr())
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP6, newEvery)
	time.Sleep(300 * time.Millisecond)
	crash(t, l, was)
	wantAnswererAmong(t, l, seedVIP6.Addr(), otherThan(l, was)...)
	time.Sleep(time.Second)
	report := probe.Stop()
	t.Logf("%s crashed: %s", was, report)
	if report.Gap > crashBound {
		t.Errorf("no node took over for %v", report.Gap)
	}
	revive(t, l, was)
}
