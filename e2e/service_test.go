package e2e

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/landfall-lb/landfall/e2e/lab"
)

var (
	seedClusterIP = netip.MustParseAddrPort("10.106.189.218:80")
	seedNodePort  = netip.MustParseAddrPort("172.26.236.177:31428")
	dnsVIP        = netip.MustParseAddrPort("10.96.0.10:53")
)

// The life of the worked example's Service: each change shows on the wire, and at the end the rules
// are those of a fresh start.
func TestServiceLife(t *testing.T) { inEachMode(t, testServiceLife) }

func testServiceLife(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	steps := []struct {
		name string
		run  func(t *testing.T)
	}{
		{"policy Cluster reaches all pods from everywhere and hides the client", func(t *testing.T) {
			s := wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
			if s.Sources[l.Cluster().LAN.Client] > 0 {
				t.Errorf("pods saw the client's own address: %v", s.Sources)
			}
			wantAnswers(t, l, lab.FarClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
			wantAnswers(t, l, lab.ClientName, "tcp", seedNodePort, "my-nginx-1", "my-nginx-2")
			wantAnswers(t, l, "my-nginx-1", "tcp", seedClusterIP, "my-nginx-1", "my-nginx-2")
			wantAnswers(t, l, "k8s-worker-177", "tcp", seedClusterIP, "my-nginx-1", "my-nginx-2")
			wantAnswers(t, l, "my-nginx-1", "udp", dnsVIP, "coredns-1", "coredns-2")
			wantAnswers(t, l, "my-nginx-2", "tcp", dnsVIP, "coredns-1", "coredns-2")
		}},
		{"a cluster IP that no Service has leads nowhere", func(t *testing.T) {
			network := l.Cluster().ServiceNetwork.String() // as the API server has it in a ServiceCIDR
			for _, node := range l.Cluster().Nodes {
				if !slices.ContainsFunc(ourRules(t, l, node.Name), func(rule string) bool {
					return strings.Contains(rule, network) && strings.HasSuffix(strings.ToLower(rule), "drop") ||
						strings.Contains(rule, network+" fib daddr type != local drop")
				}) {
					t.Errorf("%s has no rule that drops what is for %s", node.Name, network)
				}
			}
			if answer, err := l.Ask(ctx, "my-nginx-1", "tcp", netip.AddrPortFrom(seedClusterIP.Addr().Next(), 80)); err == nil {
				t.Errorf("it is answered by %s", answer.Pod)
			}
		}},
		{"landfallctl shows the owner and finds nothing wrong", func(t *testing.T) {
			ctl := filepath.Join(programFolder(t), "landfallctl")
			out, err := l.Exec(ctx, "k8s-master-176", ctl, "status", "--kubeconfig="+l.Kubeconfig())
			for _, want := range []string{"172.26.236.180-172.26.236.199", "default/my-nginx", ownerOf(t, l) + " (ARP on eth0)",
				"Nothing is wrong."} {
				if err != nil || !strings.Contains(out, want) {
					t.Errorf("%v; %q is not in\n%s", err, want, out)
				}
			}
		}},
		{"a pod more changes only this Service's chains", func(t *testing.T) {
			watch, err := l.WatchRules(ctx, "k8s-worker-177")
			if err != nil {
				t.Fatal(err)
			}
			if err := l.AddPod(ctx, lab.Pod{Name: "my-nginx-3", Node: "k8s-worker-177",
				Addr: netip.MustParseAddr("192.168.177.3"), App: "my-nginx", TCP: []uint16{80}}); err != nil {
				t.Fatal(err)
			}
			wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2", "my-nginx-3")
			changes, err := watch.Stop(ctx)
			if err != nil {
				t.Fatal(err)
			}
			toItsPods := func(text string) bool { // an element about one of its endpoints
				return slices.ContainsFunc(l.Pods("my-nginx"), func(p lab.Pod) bool {
					return strings.Contains(text, " "+p.Addr.String()+" ")
				})
			}
			for _, c := range changes {
				if c.Table == "landfall" && c.What == "element" && (strings.Contains(c.Text, "10.106.189.218") ||
					strings.Contains(c.Text, "31428") || strings.Contains(c.Text, "172.26.236.180") || toItsPods(c.Text)) {
					continue // in nftables mode: elements of the Service
				}
				if !strings.HasPrefix(c.Chain, "LF-SVC-BEPXDJBUHFCSYIC3") &&
					!strings.HasPrefix(c.Chain, "LF-SVL-BEPXDJBUHFCSYIC3") &&
					!strings.HasPrefix(c.Chain, "LF-EXT-BEPXDJBUHFCSYIC3") && !strings.HasPrefix(c.Chain, "LF-SEP-") {
					t.Errorf("changed beside the Service: %+v", c)
				}
			}
			if len(changes) == 0 {
				t.Error("the watch saw no change at all")
			}
		}},
		{"policy Local keeps the client's address and the health ports tell where pods are", func(t *testing.T) {
			updateService(
				t, l, "my-nginx",
				func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
			s, err := l.Kube().CoreV1().Services("default").Get(ctx, "my-nginx", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for node, want := range map[string]int{"k8s-master-176": 503, "k8s-worker-177": 200, "k8s-worker-178": 200,
				"k8s-worker-179": 200} {
				wantHealth(t, l, node, s.Spec.HealthCheckNodePort, want)
			}
			if err := l.RemovePod(ctx, "my-nginx-3"); err != nil {
				t.Fatal(err)
			}
			wantHealth(t, l, "k8s-worker-177", s.Spec.HealthCheckNodePort, 503)
			wantOwnerAmong(t, l, "k8s-worker-178", "k8s-worker-179")
			pod := map[string]string{"k8s-worker-178": "my-nginx-1", "k8s-worker-179": "my-nginx-2"}[ownerOf(t, l)]
			spread := wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, pod)
			if spread.Sources[l.Cluster().LAN.Client] != 20 {
				t.Errorf("sources %v, want the client's own address only", spread.Sources)
			}
			updateService(
				t, l, "my-nginx",
				func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster })
			wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
		}},
		{"another port, and back", func(t *testing.T) {
			other := netip.AddrPortFrom(seedVIP.Addr(), 8080)
			updateService(t, l, "my-nginx", func(s *corev1.Service) {
				s.Spec.Ports[0].Port = 8080
				s.Spec.Ports[0].TargetPort = intstr.FromInt32(80)
			})
			wantAnswers(t, l, lab.ClientName, "tcp", other, "my-nginx-1", "my-nginx-2")
			updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Spec.Ports[0].Port = 80 })
			wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
		}},
		{"without pods it is refused, with pods again it is served", func(t *testing.T) {
			for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
				if err := l.SetConditions(ctx, pod, lab.Conditions{}); err != nil {
					t.Fatal(err)
				}
			}
			wantRefused(t, l, "k8s-worker-177", seedClusterIP)
			wantRefused(t, l, "coredns-2", seedClusterIP)
			wantRefused(t, l, lab.ClientName, seedNodePort)
			wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "False", "NoBackends", "no endpoint is usable")
			for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
				if err := l.SetConditions(ctx, pod, lab.Conditions{Ready: true, Serving: true}); err != nil {
					t.Fatal(err)
				}
			}
			waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
		}},
		{"the rules are those of a fresh start", func(t *testing.T) {
			time.Sleep(settle)
			for _, node := range l.Cluster().Nodes {
				wantRulesOfFreshStart(t, l, node.Name)
			}
			wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
		}},
		{"deleted, it is gone from rules and wire; created again, it is back", func(t *testing.T) {
			addTenant(t, l)
			if err := l.RemoveService(ctx, "default", "my-nginx"); err != nil {
				t.Fatal(err)
			}
			eventually(t, "no rule is left", func() error {
				for _, node := range l.Cluster().Nodes {
					for _, rule := range ourRules(t, l, node.Name) {
						if strings.Contains(rule, "my-nginx") || strings.Contains(rule, "BEPXDJBUHFCSYIC3") ||
							strings.Contains(rule, seedVIP.Addr().String()+" ") ||
							strings.Contains(rule, seedClusterIP.Addr().String()+" ") {
							return fmt.Errorf("%s has %s", node.Name, rule)
						}
					}
				}
				return nil
			})
			if _, err := l.Ask(ctx, lab.ClientName, "tcp", seedVIP); err == nil {
				t.Error("the address still answers")
			}
			if err := l.AddService(ctx, lab.SeedService()); err != nil {
				t.Fatal(err)
			}
			waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
		}},
		{"external IPs of an older Service take nothing", func(t *testing.T) { testContract11Tenant(t, l) }},
		{"who listed an external IP first goes on", func(t *testing.T) { testContract11ExternalIP(t, l) }},
	}
	for _, step := range steps {
		if !t.Run(step.name, step.run) {
			return // the steps build on one another
		}
	}
}

// TestRestartsAreInvisible is contract 6 for each of the programs: ended and killed under traffic,
// nothing that is right is touched, and afterwards all is as before.
func TestContract6RestartsAreInvisible(t *testing.T) { inEachMode(t, testRestarts) }

func testRestarts(t *testing.T, l *lab.Lab) {
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
	for _, program := range []string{"proxy", "speaker", "controller"} {
		for _, end := range []struct {
			name string
			end  func(*lab.Agent) error
		}{
			{"stopped", (*lab.Agent).Stop},
			{"killed", (*lab.Agent).Kill},
		} {
			t.Run(program+" "+end.name, func(t *testing.T) { testRestart(t, l, program, end.end) })
		}
	}
	wantAddresses(t, l, "my-nginx", "172.26.236.180")
}

func testRestart(t *testing.T, l *lab.Lab, program string, end func(*lab.Agent) error) {
	ctx := t.Context()
	owner := ownerOf(t, l)
	agents := l.Agents(program)
	if program != "controller" {
		agents = []*lab.Agent{l.Agent(program, owner)}
	}
	rules := ourRules(t, l, owner)
	watch, err := l.WatchRules(ctx, owner)
	if err != nil {
		t.Fatal(err)
	}
	probe := l.StartProbe(ctx, lab.ClientName, "tcp", seedVIP, 10*time.Millisecond)
	for _, a := range agents {
		if err := end(a); err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
		if err := a.Start(); err != nil {
			t.Fatal(err)
		}
		if err := a.WaitReady(ctx); err != nil {
			t.Fatal(err)
		}
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	time.Sleep(time.Second)
	report := probe.Stop()
	t.Log(report)
	if report.Answered == 0 {
		t.Errorf("nothing was answered: %s", report)
	}
	for why, n := range report.Failures {
		t.Errorf("%d connections were lost: %s", n, why)
	}
	changes, err := watch.Stop(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// Where an address is announced from now is noted where it was before.
	changes = slices.DeleteFunc(changes, func(c lab.RuleChange) bool {
		return c.Add && c.Table == "landfall-rescue" &&
			program == "speaker"
	})
	if len(changes) > 0 {
		t.Errorf("rules that were right were touched: %+v", changes)
	}
	if now := ourRules(t, l, owner); len(without(rules, now))+len(without(now, rules)) > 0 {
		t.Errorf("rules differ: gone %q, new %q", without(rules, now), without(now, rules))
	}
}

// wantHealth waits for the status code of a node's health port.
func wantHealth(t *testing.T, l *lab.Lab, node string, port int32, want int) {
	t.Helper()
	address := ""
	for _, n := range l.Cluster().Nodes {
		if n.Name == node {
			address = n.Addr.String()
		}
	}
	eventually(t, "health port of "+node, func() error {
		code, body, err := l.Get(t.Context(), lab.ClientName,
			"http://"+netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)).String()+"/")
		if err == nil && code != want {
			err = fmt.Errorf("status %d, want %d: %s", code, want, body)
		}
		return err
	})
}

func wantOwnerAmong(t *testing.T, l *lab.Lab, nodes ...string) {
	t.Helper()
	eventually(t, "the owner is one of "+strings.Join(nodes, ", "), func() error {
		owner := ownerOf(t, l)
		if !slices.Contains(nodes, owner) {
			return fmt.Errorf("it is %s", owner)
		}
		return nil
	})
}
