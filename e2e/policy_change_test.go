package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestContract3PolicyBecomesLocal changes the external policy of a Service from Cluster to Local while a router goes on
// sending to a node without an endpoint of it, as a router does that has not heard yet: in both modes and families, the
// node delivers for the drain time what it announces no more.
func TestContract3PolicyBecomesLocal(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			testPolicyBecomesLocal(t, mode)
		})
	}
}

func testPolicyBecomesLocal(t *testing.T, mode string) {
	const drain = 40 * time.Second // for a busy machine to be through before
	l := startDualStack(t, lab.Options{Values: map[string]any{"proxy": map[string]any{"mode": mode}},
		Args: map[string][]string{"proxy": {"--drain-time=" + drain.String()}}})
	service := lab.SeedService()
	service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	const without = "k8s-worker-177"
	targets := []netip.AddrPort{seedVIP, seedVIP6}
	for _, target := range targets {
		wantAnswers(t, l, lab.FarClientName, "tcp", target, "my-nginx-1", "my-nginx-2")
		sendVia(t, l, target.Addr(), without)
		wantAnswers(t, l, lab.ClientName, "tcp", target, "my-nginx-1", "my-nginx-2")
	}
	var sent []*traffic    // which the router sends to the node without an endpoint
	var moved []*lab.Probe // which follows the announcement
	for _, target := range targets {
		sent = append(sent, &traffic{l: l, flows: startFlows(t, l, target, longLived),
			probe: l.StartProbe(t.Context(), lab.ClientName, "tcp", target, 2*newEvery)})
		moved = append(moved, l.StartProbe(t.Context(), lab.FarClientName, "tcp", target, 2*newEvery))
	}
	changed := time.Now()
	setLocal(t, l)
	s, err := l.Kube().CoreV1().Services("default").Get(t.Context(), "my-nginx", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantHealth(t, l, without, s.Spec.HealthCheckNodePort, 503)
	for _, target := range targets {
		wantReason(t, l, without, target.Addr(), "NoLocalBackends")
		wantAnswererAmong(t, l, target.Addr(), "k8s-worker-178", "k8s-worker-179")
	}
	time.Sleep(3 * time.Second) // the router goes on
	for i, target := range targets {
		t.Logf("%s by way of %s", target, without)
		sent[i].wantLossless(t)
		report := moved[i].Stop()
		t.Logf("%s where it is announced: %s", target, report)
		wantNoneLost(t, report)
	}
	for _, target := range targets {
		eventually(t, fmt.Sprintf("%s does not deliver to %s after the drain time", without, target), func() error {
			if answer, err := l.Attempt(t.Context(), lab.ClientName, "tcp", target); err == nil {
				return fmt.Errorf("%s answers", answer.Pod)
			}
			return nil
		})
	}
	if past := time.Since(changed); past < drain {
		t.Errorf("%s stopped to deliver %s after the change, before its drain time of %s", without, past, drain)
	}
}

// sendVia has the client on the LAN send to an address by way of a node, whoever announces it.
func sendVia(t *testing.T, l *lab.Lab, addr netip.Addr, node string) {
	t.Helper()
	for _, n := range l.Cluster().Nodes {
		if n.Name != node {
			continue
		}
		way := n.Addr
		if addr.Is6() {
			way = lab.Twin(way)
		}
		mustExec(t, l, lab.ClientName, "ip", "route", "replace", addr.String(), "via", way.String(), "dev", "eth0")
	}
}
