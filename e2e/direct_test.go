package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// directEvery is the pace of new connections to each address.
const directEvery = 20 * time.Millisecond

// TestContract5DirectForwarding has a Service of policy Cluster forwarded directly, in both families, over TCP and
// UDP: all pods are reached, and each sees the client's own address. Connections that were masqueraded
// before go on, and none is lost when the node drains that answers for the addresses, when agents are
// upgraded, and, but for those of pods that end, in a rolling update.
func TestContract5DirectForwarding(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, dayTwoCluster(), lab.Options{Values: map[string]any{
		"proxy": map[string]any{"mode": "nftables", "directForwarding": true}}})
	if err := l.ApplyYAML(t.Context(), dualStackPool); err != nil {
		t.Fatal(err)
	}
	service := lab.SeedService()
	service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	service.Ports = []lab.Port{{Name: "tcp", Port: 80}, {Name: "udp", Protocol: "UDP", Port: 80}}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	vips := []netip.AddrPort{seedVIP, seedVIP6}
	for _, vip := range vips {
		wantAnswers(t, l, lab.ClientName, "tcp", vip, "my-nginx-1", "my-nginx-2", "my-nginx-3")
	}
	flows := openDirect(t, l, "tcp", vips, 20) // these are masqueraded
	updateService(t, l, "my-nginx", func(s *corev1.Service) {
		s.Annotations = map[string]string{"landfall.dev/forwarding": "direct"}
	})
	for _, a := range l.Agents("proxy") {
		eventually(t, a.Node+" forwards directly", func() error { return forwardsDirectly(t, a) })
	}
	wantClientsSeen(t, l, vips)
	flows = append(flows, openDirect(t, l, "tcp", vips, 100)...)

	step := func(name string, happen func()) {
		t.Helper()
		var probes []*lab.Probe
		for _, vip := range vips {
			probes = append(probes, l.StartProbe(t.Context(), lab.FarClientName, "tcp", vip, directEvery))
		}
		happen()
		for range 2 { // the second time nodes remember the connections
			lost := use(flows)
			if flows = flowsWithout(flows, lost); len(lost) > 0 {
				t.Errorf("%s: %d of %d connections were lost", name, len(lost), len(flows)+len(lost))
			}
		}
		for _, p := range probes {
			report := p.Stop()
			t.Logf("%s: %d connections stand; new ones: %s", name, len(flows), report)
			wantNoneLost(t, report)
		}
	}
	const drained = `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`
	for range 2 {
		for _, vip := range vips {
			was := answerer(t, l, vip.Addr())
			step("drain of "+was+" for "+vip.String(), func() {
				patchNode(t, l, was, drained)
				wantAnswererAmong(t, l, vip.Addr(), otherThan(l, was)...)
			})
			patchNode(t, l, was, `{"spec":{"taints":null}}`)
		}
	}
	step("upgrade of all agents", func() {
		for _, node := range workers(l) {
			restart(t, l.Agent("speaker", node), (*lab.Agent).Stop, 300*time.Millisecond)
			restart(t, l.Agent("proxy", node), (*lab.Agent).Stop, 300*time.Millisecond)
		}
	})
	pods := map[string]string{"k8s-worker-177": "my-nginx-3", "k8s-worker-178": "my-nginx-1",
		"k8s-worker-179": "my-nginx-2"}
	for i, node := range slices.Sorted(maps.Keys(pods)) {
		next := podOn(l, node, "rolled-"+node, byte(60+i))
		step("update of "+pods[node], func() {
			flows = slices.DeleteFunc(flows, func(f *rackFlow) bool { return f.pod == pods[node] })
			movePod(t, l, pods[node], next, time.Second)
		})
		flows = append(flows, openDirect(t, l, "tcp", vips, 50)...)
	}
	wantClientsSeen(t, l, vips)
}

// openDirect opens n connections to each address.
func openDirect(t testing.TB, l *lab.Lab, network string, vips []netip.AddrPort, n int) (flows []*rackFlow) {
	t.Helper()
	for _, vip := range vips {
		for range n {
			conn, err := l.Dial(t.Context(), lab.ClientName, network, vip.String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			flows = append(flows, &rackFlow{conn: conn, in: bufio.NewReader(conn)})
		}
	}
	if lost := use(flows); len(lost) > 0 {
		t.Fatalf("%d of %d connections do not work at first", len(lost), len(flows))
	}
	return flows
}

// wantClientsSeen waits until all three pods answer at each address, from near and from behind the router,
// and see the client's own address.
func wantClientsSeen(t testing.TB, l *lab.Lab, vips []netip.AddrPort) {
	t.Helper()
	own := map[string]netip.Addr{lab.ClientName: l.Cluster().LAN.Client, lab.FarClientName: l.Cluster().Far.Client}
	for _, vip := range vips {
		for client, addr := range own {
			if vip.Addr().Is6() {
				addr = lab.Twin(addr)
			}
			for _, network := range []string{"tcp", "udp"} {
				eventually(t, fmt.Sprintf("pods answer at %s %s and see %s", network, vip, addr), func() error {
					const n = 60
					if s := l.Spread(t.Context(), client, network, vip, n); len(s.Pods) != 3 || s.Sources[addr] != n {
						return fmt.Errorf("answers by %v, sources %v, failures %q", s.Pods, s.SourcesOf, s.Failures)
					}
					return nil
				})
			}
		}
	}
}

// forwardsDirectly says what is missing until a proxy forwards my-nginx directly.
func forwardsDirectly(t testing.TB, a *lab.Agent) error {
	text, err := a.Get(t.Context(), "/v1/status?only=default/my-nginx")
	if err != nil {
		return err
	}
	var status struct {
		Services []struct {
			State, Advice string
			Direct        bool
		}
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return err
	}
	if len(status.Services) != 1 || status.Services[0].State != "applied" || !status.Services[0].Direct {
		return fmt.Errorf("it shows %+v", status)
	}
	if advice := status.Services[0].Advice; advice != "" {
		return errors.New(advice)
	}
	return nil
}
