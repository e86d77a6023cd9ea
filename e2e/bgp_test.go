package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestBGPRouters has each kind of router, alone and as a pair, internal and external, with IPv4 and
// with both families: all of them spread the Service's addresses over the nodes that deliver them,
// and clients behind them are answered.
func TestBGPRouters(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		tor  lab.ToR
		dual bool
		spec string
	}{
		{"FRR, one, internal", lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64500, NodeASN: 64500}, false, ""},
		{"BIRD, one, external, with a password",
			lab.ToR{Kind: lab.BIRD, Count: 1, ASN: 4200000001, NodeASN: 64500, Password: "secret"}, false,
			", password: secret"},
		{"BIRD, two, internal, both families, BFD",
			lab.ToR{Kind: lab.BIRD, Count: 2, ASN: 64500, NodeASN: 64500, BFD: 50 * time.Millisecond}, true,
			", bfdProfile: fast"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l := startBGP(t, test.tor, test.dual, test.spec)
			for _, vip := range bgpVIPs(l) {
				wantAnswers(t, l, lab.FarClientName, "tcp", vip, "my-nginx-1", "my-nginx-2")
			}
			setLocal(t, l)
			for _, vip := range bgpVIPs(l) {
				wantRouted(t, l, vip.Addr(), "k8s-worker-178", "k8s-worker-179")
				client := l.Cluster().Far.Client
				if vip.Addr().Is6() {
					client = lab.Twin(client)
				}
				eventually(t, "both nodes answer, and see the client's own address", func() error {
					s := l.Spread(t.Context(), lab.FarClientName, "tcp", vip, 40)
					if len(s.Failures) > 0 || len(s.Pods) != 2 || s.Sources[client] != 40 {
						return fmt.Errorf("answers by %v, sources %v, failures %q", s.Pods, s.Sources, s.Failures)
					}
					return nil
				})
			}
			for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
				if err := l.RemovePod(t.Context(), pod); err != nil {
					t.Fatal(err)
				}
			}
			for _, vip := range bgpVIPs(l) {
				wantRouted(t, l, vip.Addr())
			}
		})
	}
}

var bgpAdvertisements = schema.GroupVersionResource{Group: "landfall.dev", Version: "v1beta1",
	Resource: "bgpadvertisements"}

// excluded is a patch that takes a node out of external load balancing, or back in.
func excluded(yes bool) string {
	value := "null"
	if yes {
		value = `""`
	}
	return fmt.Sprintf(`{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`, value)
}

// bgpNode is the node that things happen to. It has no pod of the Service, so that only the way
// there is what matters.
const bgpNode = "k8s-worker-177"

// TestBGPFaults plays what may happen to a cluster behind a pair of routers, while clients of both
// families open new connections through both of them. What is planned loses none; how long gaps are
// after a crash is logged, and measured by BenchmarkBGPCrash.
//
// It runs before other labs do: its routers detect a loss after 150 ms, and one that gets no
// processor for as long drops the routes of nodes that nothing happened to.
func TestBGPFaults(t *testing.T) {
	tor := lab.ToR{Kind: lab.FRR, Count: 2, ASN: 64501, NodeASN: 64500,
		BFD: duration(t, "LANDFALL_BFD", 50*time.Millisecond)}
	l := startBGP(t, tor, true, ", bfdProfile: fast, enableGracefulRestart: true, holdTime: 9s")
	for _, fault := range []struct {
		name string
		play func(*testing.T, *lab.Lab)
	}{
		{"aggregate", aggregateComesAndGoes},
		{"planned drain and back", plannedDrain},
		{"agents restarted and upgraded", agentsRestarted},
		{"agents killed and back", agentsKilled},
		{"rolling update of a Local Service", localRollingUpdate},
		{"session reset by the router, 20 times", sessionFlaps},
		{"router frozen", routerFrozen},
		{"router restarted", routerRestarted},
		// The pods must survive what follows, which is about how the routers learn of it.
		{"the pods move away", func(t *testing.T, l *lab.Lab) { podsOnMaster(t, l) }},
		{"a node is away and back", returnsOverBGP},
		{"drain, then power-off", drainThenPowerOff},
		{"node crash with BFD", crashWithBFD},
		{"node crash without BFD", crashWithoutBFD},
	} {
		t.Run(fault.name, func(t *testing.T) {
			began := time.Now()
			defer func() {
				if t.Failed() {
					t.Log(sessionsSince(l, bgpNode, began))
				}
			}()
			fault.play(t, l)
		})
	}
}

// back waits until the routers spread the Service's addresses over all workers, away until it is
// all but that of the faults.
func back(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, vip := range bgpVIPs(l) {
		wantRouted(t, l, vip.Addr(), workers(l)...)
	}
}

func away(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, vip := range bgpVIPs(l) {
		wantRouted(t, l, vip.Addr(), without(workers(l), []string{bgpNode})...)
	}
}

func aggregateComesAndGoes(t *testing.T, l *lab.Lab) {
	err := l.ApplyYAML(t.Context(), `
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: aggregate}
spec: {ipAddressPools: [routed], aggregationLength: 30, communities: ["64500:30"]}
`)
	if err != nil {
		t.Fatal(err)
	}
	aggregate := netip.MustParsePrefix("203.0.113.180/30")
	eventually(t, "the routers have the aggregate", func() error { return routed(t, l, aggregate, workers(l)...) })
	if out := ask(t, l.Routers()[0], "show bgp ipv4 unicast "+aggregate.String()); strings.Count(out,
		"Community: 64500:30") != 3 {
		t.Errorf("not three times community 64500:30:\n%s", out)
	}
	if err := l.Dynamic().Resource(bgpAdvertisements).Delete(t.Context(), "aggregate",
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the aggregate is gone", func() error { return routed(t, l, aggregate) })
	back(t, l)
}

func plannedDrain(t *testing.T, l *lab.Lab) {
	probes := startFar(t, l)
	patchNode(t, l, bgpNode, excluded(true))
	eventually(t, "the routers receive graceful-shutdown", func() error {
		if out := ask(t, l.Routers()[0], "show bgp ipv4 unicast "+host(bgpVIP.Addr()).String()); !strings.Contains(out,
			"graceful-shutdown") {
			return fmt.Errorf("no community graceful-shutdown:\n%s", out)
		}
		return nil
	})
	away(t, l)
	time.Sleep(500 * time.Millisecond)
	patchNode(t, l, bgpNode, excluded(false))
	back(t, l)
	wantNoneLostFar(t, probes)
}

func agentsRestarted(t *testing.T, l *lab.Lab) {
	for _, program := range []string{"speaker", "proxy"} {
		for tries := 3; ; tries-- {
			changes := watchRoutes(t, l)
			probes := startFar(t, l)
			restart(t, l.Agent(program, bgpNode), (*lab.Agent).Stop, 500*time.Millisecond)
			wantSessions(t, l)
			time.Sleep(2 * time.Second) // with the sessions back, no route may go either
			wantNoneLostFar(t, probes)
			back(t, l)
			seen := changes()
			if tries > 1 && onlyOthersLost(l.Cluster().Nodes, seen) {
				t.Logf("%s restarted: untouched nodes lost their routes, as on a busy machine; once more: %q", program, seen)
				continue
			}
			if len(seen) > 0 {
				t.Errorf("%s restarted: the routers changed routes: %q", program, seen)
			}
			break
		}
	}
}

// onlyOthersLost reports whether a router had a route without one of the workers that nothing
// happened to, and none without bgpNode. BFD detects a loss after 150 ms, so a router loses nodes
// when it gets no processor time for as long.
func onlyOthersLost(nodes []lab.Node, changes []string) (lost bool) {
	for _, change := range changes {
		if strings.Contains(change, "Deleted ") {
			return false
		}
		for _, node := range nodes {
			// 172.26.236.178 and fd00:172:26:236::178
			suffix := fmt.Sprint("236.", node.Addr.As4()[3], " ")
			switch has := strings.Contains(strings.ReplaceAll(change, "236::", "236."), suffix); {
			case has || node.ControlPlane:
			case node.Name == bgpNode:
				return false
			default:
				lost = true
			}
		}
	}
	return lost
}

func agentsKilled(t *testing.T, l *lab.Lab) {
	for _, program := range []string{"speaker", "proxy"} {
		probes := startFar(t, l)
		restart(t, l.Agent(program, bgpNode), (*lab.Agent).Kill, time.Second)
		time.Sleep(time.Second)
		back(t, l)
		wantNoneLostFar(t, probes)
	}
}

func sessionFlaps(t *testing.T, l *lab.Lab) {
	probes := startFar(t, l)
	const flaps = 20
	for range flaps { // in ten seconds
		ask(t, l.Routers()[0], "clear bgp 172.26.236.177")
		time.Sleep(500 * time.Millisecond)
	}
	back(t, l)
	wantNoneLostFar(t, probes)
}

func routerFrozen(t *testing.T, l *lab.Lab) {
	routerFault(t, l, func(r *lab.Router) error { return r.Freeze(t.Context(), 2*time.Second) })
}

func routerRestarted(t *testing.T, l *lab.Lab) {
	routerFault(t, l, func(r *lab.Router) error {
		r.Kill("bgpd")
		time.Sleep(time.Second)
		return r.Launch(t.Context())
	})
}

func localRollingUpdate(t *testing.T, l *lab.Lab) {
	setLocal(t, l)
	away(t, l) // the nodes with a pod
	probes := startFar(t, l)
	for i, pod := range []string{"my-nginx-1", "my-nginx-2", "roll-0", "roll-1"} {
		movePod(t, l, pod, podOn(l, workers(l)[i%3], fmt.Sprintf("roll-%d", i), byte(60+i)), 1500*time.Millisecond)
	}
	time.Sleep(500 * time.Millisecond)
	wantNoneLostFar(t, probes)
	updateService(
		t, l, "my-nginx",
		func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster })
	back(t, l)
}

func drainThenPowerOff(t *testing.T, l *lab.Lab) {
	probes := startFar(t, l)
	patchNode(t, l, bgpNode, excluded(true))
	eventually(t, "the drain is over", func() error { return forgotten(t, l) })
	for _, program := range []string{"speaker", "proxy"} {
		if err := l.Agent(program, bgpNode).Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Cut(t.Context(), bgpNode); err != nil {
		t.Fatal(err)
	}
	for range 10 { // nothing is kept for a node that comes back
		if err := forgotten(t, l); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	away(t, l)
	wantNoneLostFar(t, probes)
	patchNode(t, l, bgpNode, excluded(false))
	revive(t, l, bgpNode)
	back(t, l)
}

// forgotten reports whether no router has a route of the faults' node, stale ones included.
func forgotten(t *testing.T, l *lab.Lab) error {
	t.Helper()
	for _, r := range l.Routers() {
		for _, family := range []string{"ipv4", "ipv6"} {
			if out := ask(t, r, "show bgp "+family+" unicast"); strings.Contains(out, "236.177") ||
				strings.Contains(out, "236::177") {
				return fmt.Errorf("%s has routes of %s:\n%s", r.Name, bgpNode, out)
			}
		}
	}
	return nil
}

func crashWithBFD(t *testing.T, l *lab.Lab) {
	eventually(t, "BFD is up", func() error { return watched(t, l) })
	probes := startFar(t, l)
	time.Sleep(300 * time.Millisecond)
	crash(t, l, bgpNode)
	away(t, l)
	time.Sleep(time.Second)
	if hit := longestHit(t, probes); hit > crashBound {
		t.Errorf("connections were hit for %v", hit)
	}
	revive(t, l, bgpNode)
	back(t, l)
}

func crashWithoutBFD(t *testing.T, l *lab.Lab) {
	// The hold time must be over before the node counts as lost, and nothing else may take longer.
	if err := l.ApplyYAML(t.Context(), bgpPeers(l.Cluster(), ", enableGracefulRestart: true, holdTime: 3s")); err != nil {
		t.Fatal(err)
	}
	wantSessions(t, l, "Hold time is 3 seconds")
	back(t, l)
	crashed := time.Now()
	crash(t, l, bgpNode)
	away(t, l)
	t.Logf("the routes were gone after %v", time.Since(crashed).Round(10*time.Millisecond))
	if took := time.Since(crashed); took < time.Second || took > 3*time.Second+crashBound {
		t.Errorf("the routes were gone after %v, the hold time is 3 s", took)
	}
	revive(t, l, bgpNode)
	back(t, l)
}

// podsOnMaster moves the Service's pods to where the API server is.
func podsOnMaster(t testing.TB, l *lab.Lab) {
	t.Helper()
	old := l.Pods("my-nginx")
	for i := range 2 {
		if err := l.AddPod(t.Context(), podOn(l, "k8s-master-176", fmt.Sprintf("safe-%d", i), byte(80+i))); err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range old {
		if err := l.RemovePod(t.Context(), pod.Name); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(500 * time.Millisecond)
}

// routerFault breaks the second router, waits until it routes again, and logs what clients have
// seen: the half of them that goes through it has no other way, as here nothing beyond the routers
// learns of it.
func routerFault(t *testing.T, l *lab.Lab, fault func(*lab.Router) error) {
	t.Helper()
	probes := startFar(t, l)
	if err := fault(l.Routers()[1]); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	back(t, l)
	t.Logf("all routes were back after %v", time.Since(began).Round(10*time.Millisecond))
	longestHit(t, probes)
	for _, vip := range bgpVIPs(l) {
		eventually(t, "all are answered", func() error {
			if s := l.Spread(t.Context(), lab.FarClientName, "tcp", vip, 40); len(s.Failures) > 0 {
				return fmt.Errorf("failures %q", s.Failures)
			}
			return nil
		})
	}
}
