package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

var configBlock = regexp.MustCompile("(?ms)^```haproxy\n(.*?)^```$")

// balancerAt is where the guide's frontends listen, on the far client.
func balancerAt(l *lab.Lab, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(l.Cluster().Far.Client, port)
}

// TestBehindBalancer plays the load balancer of a cloud: HAProxy on another network, with the
// configuration of the guide, checks nodes by their health ports.
func TestBehindBalancer(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	setLocal(t, l)
	b := startBalancer(t, l)
	wantTargets(t, b, "local", "k8s-worker-178 k8s-worker-179")
	wantTargets(t, b, "cluster", "k8s-worker-177 k8s-worker-178 k8s-worker-179")

	t.Run("pods move", func(t *testing.T) {
		wantTold(t, l, balancerAt(l, 8080))
		probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", balancerAt(l, 8080), newEvery)
		for i, node := range []string{"k8s-worker-177", "k8s-worker-178"} {
			next := podOn(l, node, fmt.Sprintf("moved-%d", i), byte(60+i))
			movePod(t, l, fmt.Sprintf("my-nginx-%d", i+1), next, 4*time.Second)
		}
		report := probe.Stop()
		t.Log(report)
		wantNoneLost(t, report)
		wantTargets(t, b, "local", "k8s-worker-177 k8s-worker-178")
	})
	t.Run("policy Local", func(t *testing.T) { plannedBehind(t, l, b, "local", 8080) })
	t.Run("weights are the numbers of pods", func(t *testing.T) {
		if err := l.AddPod(t.Context(), podOn(l, "k8s-worker-178", "second", 70)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "HAProxy has the weights", func() error {
			targets, err := b.Targets(t.Context(), "local")
			if err == nil && (targets["k8s-worker-177"].Weight != 1 || targets["k8s-worker-178"].Weight != 2) {
				err = fmt.Errorf("%+v", targets)
			}
			return err
		})
		s := l.Spread(t.Context(), lab.ClientName, "tcp", balancerAt(l, 8080), 90)
		if n := s.Pods["moved-0"]; len(s.Failures) > 0 || n < 28 || n > 32 {
			t.Errorf("the only pod of its node answered %d of 90, want a third: %v %v", n, s.Pods, s.Failures)
		}
	})
	t.Run("a node dies, policy Local", func(t *testing.T) {
		diesBehind(t, l, b, "local", 8080, "k8s-worker-177", "k8s-worker-178")
	})
	t.Run("policy Cluster", func(t *testing.T) {
		updateService(t, l, "my-nginx", func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		})
		wantTold(t, l, balancerAt(l, 8081))
		plannedBehind(t, l, b, "cluster", 8081)
	})
	t.Run("pods move, policy Cluster", func(t *testing.T) {
		probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", balancerAt(l, 8081), newEvery)
		for i, move := range []struct{ from, to string }{
			{"moved-0", "k8s-worker-179"}, {"moved-1", "k8s-worker-177"}, {"moved-2", "k8s-worker-178"},
		} {
			next := podOn(l, move.to, fmt.Sprintf("moved-%d", 2+i), byte(62+i))
			movePod(t, l, move.from, next, 2*time.Second)
			eventually(t, next.Name+" answers", func() error {
				answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", balancerAt(l, 8081))
				if err == nil && answer.Pod != next.Name {
					err = fmt.Errorf("%+v", answer)
				}
				return err
			})
		}
		report := probe.Stop()
		t.Log(report)
		wantNoneLost(t, report)
		wantTargets(t, b, "cluster", "k8s-worker-177 k8s-worker-178 k8s-worker-179") // whoever has pods
	})
	t.Run("a node dies, policy Cluster", func(t *testing.T) {
		diesBehind(t, l, b, "cluster", 8081, "k8s-worker-177", "k8s-worker-178 k8s-worker-179")
	})
	t.Run("the Service's address is the target", func(t *testing.T) {
		wantTold(t, l, balancerAt(l, 8082))
		updateService(t, l, "my-nginx", func(s *corev1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{l.Cluster().Far.Client.String() + "/32"}
		})
		eventually(t, "clients cannot go round the load balancer", func() error {
			if answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", seedVIP); err == nil {
				return fmt.Errorf("%+v", answer)
			}
			return nil
		})
		wantTold(t, l, balancerAt(l, 8082))
	})
	t.Run("ipMode Proxy", func(t *testing.T) { throughProxy(t, l) })
}

// startBalancer starts HAProxy as the guide says, with the health port that the Service got.
func startBalancer(t *testing.T, l *lab.Lab) *lab.Balancer {
	t.Helper()
	s, err := l.Kube().CoreV1().Services("default").Get(t.Context(), "my-nginx", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile(filepath.Join(repository, "docs", "guide", "behind-a-load-balancer.md"))
	if err != nil {
		t.Fatal(err)
	}
	here := strings.ReplaceAll(string(guide), "32000", strconv.Itoa(int(s.Spec.HealthCheckNodePort)))
	var config strings.Builder
	for _, block := range configBlock.FindAllStringSubmatch(here, -1) {
		config.WriteString(block[1])
	}
	b, err := l.StartBalancer(t.Context(), lab.FarClientName, config.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Stop(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// wantTargets waits until just the given nodes are up in a backend, their names in order.
func wantTargets(t *testing.T, b *lab.Balancer, backend, nodes string) {
	t.Helper()
	eventually(t, backend+" goes to "+nodes, func() error {
		targets, err := b.Targets(t.Context(), backend)
		if err != nil {
			return err
		}
		maps.DeleteFunc(targets, func(_ string, target lab.Target) bool { return !target.Up })
		if up := strings.Join(slices.Sorted(maps.Keys(targets)), " "); up != nodes {
			return fmt.Errorf("it goes to %s", up)
		}
		return nil
	})
}

// wantTold waits until pods that are asked through the balancer are told the client's address.
func wantTold(t *testing.T, l *lab.Lab, at netip.AddrPort) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s tells the client", at), func() error {
		answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", at)
		if err == nil && answer.Told.Addr() != l.Cluster().LAN.Client {
			err = fmt.Errorf("%+v", answer)
		}
		return err
	})
}

// plannedBehind drains a node, takes it back and upgrades its proxy under traffic, of which nothing
// is lost.
func plannedBehind(t *testing.T, l *lab.Lab, b *lab.Balancer, backend string, port uint16) {
	const node = "k8s-worker-177"
	wantUp := func(up bool) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s is a target: %t", node, up), func() error {
			targets, err := b.Targets(t.Context(), backend)
			if err == nil && targets[node].Up != up {
				err = fmt.Errorf("%+v", targets)
			}
			return err
		})
	}
	wantUp(true)
	run := startTraffic(t, l, balancerAt(l, port))
	const label = `{"metadata":{"labels":{"landfall.dev/drain":%s}}}` // as landfallctl drain sets it
	patchNode(t, l, node, fmt.Sprintf(label, `""`))
	wantUp(false)
	time.Sleep(time.Second)
	patchNode(t, l, node, fmt.Sprintf(label, "null"))
	wantUp(true)
	restart(t, l.Agent("proxy", node), (*lab.Agent).Stop, 500*time.Millisecond)
	time.Sleep(2 * time.Second)
	run.wantLossless(t)
}

// diesBehind takes the cable of a node with a pod away. HAProxy tries another node when the dead one, or with policy
// Cluster a pod there, does not answer: a connection is lost if it stood, or if all its tries ended there. Once the
// checks have failed, and the other nodes know that the pod is gone, none is.
func diesBehind(t *testing.T, l *lab.Lab, b *lab.Balancer, backend string, port uint16, node, others string) {
	if !slices.ContainsFunc(l.Pods("my-nginx"), func(p lab.Pod) bool { return p.Node == node }) {
		t.Fatalf("%s has no pod", node)
	}
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", balancerAt(l, port), newEvery)
	time.Sleep(500 * time.Millisecond)
	if err := l.Cut(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	cut := time.Now()
	wantTargets(t, b, backend, others)
	eventually(t, "no connection goes to "+node, func() error {
		s := l.Spread(t.Context(), lab.ClientName, "tcp", balancerAt(l, port), 30)
		return errors.Join(s.Failures...)
	})
	report := probe.Stop()
	t.Logf("while %s died: %s", node, report)
	if report.Answered == 0 || report.Gap > crashBound {
		t.Errorf("the other nodes did not go on while %s died: %s", node, report)
	}
	for _, lost := range report.Lost {
		if backend == "local" && lost.Began.After(cut) {
			t.Errorf("a connection did not go to another node while %s died: %+v", node, lost)
		}
	}
	probe = l.StartProbe(t.Context(), lab.ClientName, "tcp", balancerAt(l, port), newEvery)
	time.Sleep(time.Second)
	wantNoneLost(t, probe.Stop())
	if err := l.Heal(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	all := append(strings.Fields(others), node)
	slices.Sort(all)
	wantTargets(t, b, backend, strings.Join(all, " "))
}

// throughProxy gives a Service an address that is the balancer's own: a node that connects to it goes
// through the balancer.
func throughProxy(t *testing.T, l *lab.Lab) {
	at := balancerAt(l, 8081)
	if err := l.ApplyYAML(t.Context(), strings.Replace(pool("front", at.Addr().String()+"/32"), "spec: {",
		"spec: {autoAssign: false, ", 1)); err != nil {
		t.Fatal(err)
	}
	createService(t, l, "front", func(s *corev1.Service) {
		s.Annotations = map[string]string{"landfall.dev/ip-mode": "Proxy", "landfall.dev/loadBalancerIPs": at.Addr().String()}
		s.Spec.Ports = []corev1.ServicePort{{Port: int32(at.Port())}}
	})
	wantAddresses(t, l, "front", at.Addr().String())
	time.Sleep(time.Second) // a proxy that took the address for its own would have rules by now
	answer, err := l.Ask(t.Context(), "k8s-worker-177", "tcp", at)
	if err != nil || answer.Told.Addr() != seedNodePort.Addr() {
		t.Errorf("a node asked past the balancer: %+v, %v", answer, err)
	}
}
