package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// TestRelay relays connections to a Service. No connection fails while relays restart, and new ones go
// straight to endpoints after one was killed. With one of three pods silent over TCP and refusing over UDP,
// which nobody knows, no connection through the relay fails, and some do with rules alone. In iptables mode it is TCP alone.
func TestRelay(t *testing.T) {
	t.Parallel()
	t.Run("nftables", func(t *testing.T) {
		t.Parallel()
		testRelay(t, "nftables", "tcp", "udp")
	})
	t.Run("iptables", func(t *testing.T) {
		t.Parallel()
		testRelay(t, "iptables", "tcp")
	})
}

func testRelay(t *testing.T, mode string, networks ...string) {
	cluster := lab.SeedCluster()
	for i := range cluster.Pods {
		cluster.Pods[i].UDP = cluster.Pods[i].TCP
	}
	l := labtest.Start(t, cluster, lab.Options{Values: map[string]any{
		"relay": map[string]any{"enabled": true, "udp": true}, "proxy": map[string]any{"mode": mode}}})
	if err := l.ApplyYAML(t.Context(), preferBootNode); err != nil {
		t.Fatal(err)
	}
	silent := podOn(l, "k8s-worker-177", "silent", 70)
	if err := l.AddPod(t.Context(), silent); err != nil {
		t.Fatal(err)
	}
	service := lab.SeedService()
	service.Ports[0].Name = "tcp"
	service.Ports = append(service.Ports, lab.Port{Name: "udp", Protocol: "UDP", Port: 80, NodePort: service.Ports[0].NodePort})
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
	wantAnswererAmong(t, l, seedVIP.Addr(), bootNode)
	setRelay(t, l, "true")

	probes := map[string]*lab.Probe{}
	for _, network := range networks {
		probes[network] = l.StartProbe(t.Context(), lab.ClientName, network, seedVIP, newEvery)
	}
	for range 3 {
		if err := l.Agent("relay", bootNode).Restart(t.Context()); err != nil {
			t.Error(err)
		}
		waitRelayed(t, l, bootNode, true)
	}
	for network, probe := range probes {
		if report := probe.Stop(); report.Failed() > 0 || report.Answered == 0 {
			t.Errorf("while the relay restarted, over %s: %s", network, report)
		}
	}
	if err := l.Agent("relay", bootNode).Kill(); err != nil {
		t.Fatal(err)
	}
	waitRelayed(t, l, bootNode, false)
	for _, network := range networks {
		if s := l.Spread(t.Context(), lab.ClientName, network, seedVIP, 20); len(s.Failures) > 0 {
			t.Errorf("after the relay was killed, over %s: %v", network, s.Failures)
		}
	}
	if err := l.Agent("relay", bootNode).Start(); err != nil {
		t.Fatal(err)
	}
	waitRelayed(t, l, bootNode, true)

	if out, err := l.Exec(t.Context(), silent.Name, "nft", "add table inet silent; add chain inet silent input "+
		"{ type filter hook input priority 0; }; add rule inet silent input meta l4proto tcp drop; "+
		"add rule inet silent input meta l4proto udp reject"); err != nil {
		t.Fatal(err, out)
	}
	const n = 30
	nodePort := netip.AddrPortFrom(netip.MustParseAddr("172.26.236.178"), 31428)
	for _, target := range []netip.AddrPort{seedVIP, nodePort} {
		for _, network := range networks {
			s := l.Spread(t.Context(), lab.ClientName, network, target, n)
			t.Logf("through the relay to %s over %s: %d of %d failed", target, network, len(s.Failures), n)
			if len(s.Failures) > 0 || s.Pods[silent.Name] > 0 || len(s.Pods) != 2 {
				t.Errorf("through the relay to %s over %s: %v, answers %v", target, network, s.Failures, s.Pods)
			}
		}
	}
	setRelay(t, l, "false")
	for _, network := range networks {
		s := l.Spread(t.Context(), lab.ClientName, network, seedVIP, n)
		t.Logf("with rules alone over %s: %d of %d failed", network, len(s.Failures), n)
		if len(s.Failures) == 0 {
			t.Errorf("the pod answers over %s: %v", network, s.Pods)
		}
	}
}

// TestContract6AnUpgradeOfTheRelay starts the next relay of a node beside the one that is there, as the DaemonSet of
// relay.ownPods does, and then ends that one, twice. Then the address moves to another node and back. No open connection
// breaks and no new one is refused.
func TestContract6AnUpgradeOfTheRelay(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			testRelayUpgrade(t, mode)
		})
	}
}

func testRelayUpgrade(t *testing.T, mode string) {
	const connections = 200
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Values: map[string]any{
		"relay": map[string]any{"enabled": true, "ownPods": true}, "proxy": map[string]any{"mode": mode}}})
	if err := l.ApplyYAML(t.Context(), preferBootNode); err != nil {
		t.Fatal(err)
	}
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
	wantAnswererAmong(t, l, seedVIP.Addr(), bootNode)
	setRelay(t, l, "true")

	flows := startFlows(t, l, seedVIP, connections)
	waitOpen(t, l, bootNode, connections)
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
	for range 2 {
		if err := l.Agent("relay", bootNode).Surge(t.Context()); err != nil {
			t.Error(err)
		}
		waitRelayed(t, l, bootNode, true)
		waitOpen(t, l, bootNode, connections)
	}
	for _, moved := range []bool{true, false} {
		owners := []string{bootNode}
		if moved {
			owners = without(workers(l), owners)
		}
		patchNode(t, l, bootNode, excluded(moved))
		wantAnswererAmong(t, l, seedVIP.Addr(), owners...)
		time.Sleep(time.Second)
		waitOpen(t, l, bootNode, connections)
	}
	report, lost := probe.Stop(), flows.stop()
	t.Logf("new connections: %s; %d of %d open ones were lost", report, lost, connections)
	if report.Failed() > 0 || report.Answered == 0 || lost > 0 {
		t.Errorf("while the relay was upgraded and the address moved: %s; %d of %d open connections were lost", report, lost,
			connections)
	}
}

// waitOpen waits until the relay of a node has at least so many connections.
func waitOpen(t *testing.T, l *lab.Lab, node string, want int) {
	t.Helper()
	eventually(t, fmt.Sprintf("the relay of %s has %d connections", node, want), func() error {
		text, err := l.Agent("relay", node).Run(t.Context(), "relay", "status")
		if err != nil {
			return err
		}
		var status struct{ Services []struct{ Open int } }
		if err := json.Unmarshal([]byte(text), &status); err != nil {
			return err
		}
		open := 0
		for _, s := range status.Services {
			open += s.Open
		}
		if open < want {
			return fmt.Errorf("it has %d", open)
		}
		return nil
	})
}

// setRelay annotates the Service, and waits until each node follows.
func setRelay(t *testing.T, l *lab.Lab, value string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{"landfall.dev/relay":%q}}}`, value)
	if _, err := l.Kube().CoreV1().Services("default").Patch(t.Context(), "my-nginx", types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, a := range l.Agents("proxy") {
		waitRelayed(t, l, a.Node, value == "true")
	}
}

// waitRelayed waits until the kernel of a node leads connections to the Service to the relay, or until
// it does not.
func waitRelayed(t *testing.T, l *lab.Lab, node string, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s leads to the relay: %v", node, want), func() error {
		text, err := l.Agent("proxy", node).Get(t.Context(), "/v1/status?only=default/my-nginx")
		if err != nil {
			return err
		}
		var status struct {
			Relay    struct{ Leads map[string]string }
			Services []struct {
				State   string
				Relayed bool
			}
		}
		if err := json.Unmarshal([]byte(text), &status); err != nil {
			return err
		}
		if len(status.Services) != 1 || status.Services[0].State != "applied" ||
			want != (status.Services[0].Relayed && len(status.Relay.Leads) > 0) {
			return fmt.Errorf("it shows %+v", status)
		}
		return nil
	})
}
