package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
	"github.com/landfall-lb/landfall/internal/lb"
)

// ipvsSchedulers are the names that kube-proxy's IPVS mode takes and Landfall has.
var ipvsSchedulers = []string{"rr", "wrr", "sh", "mh", "dh", "lc", "wlc", "sed", "nq"}

// asking is one way in which clients reach the worked example's Service.
type asking struct {
	from string
	at   netip.AddrPort
}

// askings are all of them: at the node port of a node without a pod, at the external address from the LAN and from
// elsewhere, and at the cluster IP from a pod.
var askings = []asking{{lab.ClientName, seedNodePort}, {lab.ClientName, seedVIP}, {lab.FarClientName, seedVIP},
	{"coredns-2", seedClusterIP}}

// TestWorkedExampleByEachModesName runs the worked example as each of kube-proxy's modes did: by each of
// IPVS' schedulers by its name, and in iptables mode, which refuses each of the
// names for that Service, with a condition, and goes on at random; and in both with a relay in place of the userspace mode, which
// chooses by each. In each of them both policies do what the worked example says.
func TestWorkedExampleByEachModesName(t *testing.T) {
	t.Parallel()
	start := func(t *testing.T, mode string, relay bool) *lab.Lab {
		l := labtest.Start(t, lab.SeedCluster(), lab.Options{Values: map[string]any{
			"relay": map[string]any{"enabled": relay}, "proxy": map[string]any{"mode": mode}}})
		if err := l.ApplyYAML(t.Context(), preferBootNode); err != nil {
			t.Fatal(err)
		}
		seedService(t, l)
		return l
	}
	t.Run("nftables", func(t *testing.T) {
		t.Parallel()
		l := start(t, "nftables", true)
		byEachScheduler(t, l)
		byEachPolicy(t, l, true)
		wantNoEvent(t, l, lb.ReasonSchedulerIgnored)
		// In place of the userspace mode: the relay, which counts its own connections.
		setScheduler(t, l, "random")
		setRelay(t, l, "true")
		byEachScheduler(t, l)
		byEachPolicy(t, l, false)
		wantNoEvent(t, l, lb.ReasonSchedulerIgnored)
	})
	t.Run("iptables", func(t *testing.T) {
		t.Parallel()
		l := start(t, "iptables", true)
		for _, name := range ipvsSchedulers {
			setScheduler(t, l, name)
			wantEvent(t, l, "my-nginx", string(lb.ReasonSchedulerIgnored), fmt.Sprintf("%q needs a proxy in nftables mode", name))
			wantBothPods(t, l)
		}
		last := fmt.Sprintf("%q needs a proxy in nftables mode", ipvsSchedulers[len(ipvsSchedulers)-1])
		wantCondition(t, l, "my-nginx", lb.ConditionAsRequested, "False", string(lb.ReasonSchedulerIgnored), last)
		byEachPolicy(t, l, true)
		setScheduler(t, l, "random")
		eventually(t, "the Service is served as requested", func() error {
			if c, err := condition(t.Context(), l, "my-nginx", lb.ConditionAsRequested); err == nil {
				return fmt.Errorf("the condition is there: %s", c.Message)
			}
			return nil
		})
		setRelay(t, l, "true")
		byEachScheduler(t, l)
		byEachPolicy(t, l, false)
	})
}

// wantBothPods waits until both pods answer, however they are asked.
func wantBothPods(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, a := range askings {
		wantAnswers(t, l, a.from, "tcp", a.at, "my-nginx-1", "my-nginx-2")
	}
}

// byEachPolicy has the Service, which chooses by whatever the test has set, first keep its policy Cluster, and then
// have policy Local. It seesClients unless its connections end at a relay.
func byEachPolicy(t *testing.T, l *lab.Lab, seesClients bool) {
	t.Helper()
	own := map[string]netip.Addr{lab.ClientName: l.Cluster().LAN.Client, lab.FarClientName: l.Cluster().Far.Client}
	for _, pod := range l.Pods("kube-dns") {
		own[pod.Name] = pod.Addr
	}
	for _, a := range askings {
		s, want := l.Spread(t.Context(), a.from, "tcp", a.at, 5), 0
		if a.at == seedClusterIP && seesClients {
			want = 5 // what a pod asks a cluster IP is not masqueraded
		}
		if !own[a.from].IsValid() || len(s.Failures) > 0 || s.Sources[own[a.from]] != want {
			t.Errorf("policy Cluster, %s asks %s: pods see %v, want its own address %d times; failures %v", a.from, a.at,
				s.Sources, want, s.Failures)
		}
	}
	for _, network := range []string{"udp", "tcp"} {
		wantAnswers(t, l, "my-nginx-1", network, dnsVIP, "coredns-1", "coredns-2")
	}
	setLocal(t, l)
	s, err := l.Kube().CoreV1().Services("default").Get(t.Context(), "my-nginx", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for node, want := range map[string]int{"k8s-worker-177": 503, bootNode: 200, "k8s-worker-179": 200} {
		wantHealth(t, l, node, s.Spec.HealthCheckNodePort, want)
	}
	wantAnswererAmong(t, l, seedVIP.Addr(), bootNode)
	for _, from := range []string{lab.ClientName, lab.FarClientName} {
		s := wantAnswers(t, l, from, "tcp", seedVIP, "my-nginx-1") // which is on that node
		want := 0
		if seesClients {
			want = 20
		}
		if s.Sources[own[from]] != want {
			t.Errorf("policy Local, %s asks: pods see %v, want its own address %d times", from, s.Sources, want)
		}
	}
	eventually(t, "once its drain time is over, a node without a pod delivers nothing", func() error {
		if s := l.Spread(t.Context(), lab.ClientName, "tcp", seedNodePort, 3); len(s.Pods) > 0 { // one may fail by itself
			return fmt.Errorf("%v answer", s.Pods)
		}
		return nil
	})
	updateService(t, l, "my-nginx", func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	})
}

// byEachScheduler has the Service choose by each of IPVS' schedulers. For those that count, one of its two pods holds
// connections.
func byEachScheduler(t *testing.T, l *lab.Lab) {
	t.Helper()
	wantBothPods(t, l)
	for _, name := range ipvsSchedulers {
		switch name {
		case "rr", "wrr":
			setScheduler(t, l, name)
			for _, a := range askings {
				wantTurns(t, l, name, a)
			}
		case "lc", "wlc", "sed", "nq":
			setScheduler(t, l, "random")
			wantBothPods(t, l)
			var held []func()
			for _, a := range askings {
				held = append(held, holdAt(t, l, a, "my-nginx-1", 2))
			}
			setScheduler(t, l, name)
			for _, a := range askings {
				wantAnswers(t, l, a.from, "tcp", a.at, "my-nginx-2")
			}
			for _, release := range held {
				release()
			}
		default:
			setScheduler(t, l, name)
			for _, a := range askings {
				eventually(t, fmt.Sprintf("%s sends what %s asks %s to one pod", name, a.from, a.at), func() error {
					if s := l.Spread(t.Context(), a.from, "tcp", a.at, 20); len(s.Failures) > 0 || len(s.Pods) != 1 {
						return fmt.Errorf("answers by %v, failures %q", s.Pods, s.Failures)
					}
					return nil
				})
			}
		}
	}
}

// wantTurns waits until the two pods answer in turn. A table's end, and a connection of others, may give one of them two
// turns; at random they would have half of all.
func wantTurns(t *testing.T, l *lab.Lab, scheduler string, a asking) {
	t.Helper()
	const requests, most = 30, 3
	eventually(t, fmt.Sprintf("%s takes turns when %s asks %s", scheduler, a.from, a.at), func() error {
		again, last := 0, ""
		for range requests {
			answer, err := l.Ask(t.Context(), a.from, "tcp", a.at)
			if err != nil {
				return err
			}
			if answer.Pod == last {
				again++
			}
			last = answer.Pod
		}
		if again > most {
			return fmt.Errorf("of %d requests %d had the pod of the one before", requests, again)
		}
		return nil
	})
}

// wantNoEvent fails if there is an Event about the Service for a reason.
func wantNoEvent(t *testing.T, l *lab.Lab, reason lb.Reason) {
	t.Helper()
	events, err := l.Kube().CoreV1().Events("default").List(t.Context(), metav1.ListOptions{
		FieldSelector: "involvedObject.name=my-nginx,reason=" + string(reason)})
	if err != nil || len(events.Items) > 0 {
		t.Errorf("Events %v, %v", events, err)
	}
}

func setScheduler(t *testing.T, l *lab.Lab, name string) {
	t.Helper()
	updateService(t, l, "my-nginx", func(s *corev1.Service) {
		if s.Annotations == nil {
			s.Annotations = map[string]string{}
		}
		s.Annotations[lb.AnnotationScheduler] = name
	})
}

// holdAt opens connections until a pod has n more, which stay open until release is called.
func holdAt(t *testing.T, l *lab.Lab, a asking, pod string, n int) (release func()) {
	t.Helper()
	var held []net.Conn
	release = func() {
		for _, conn := range held {
			conn.Close()
		}
	}
	t.Cleanup(release)
	eventually(t, fmt.Sprintf("%d connections end at %s", n, pod), func() error {
		conn, err := l.Dial(t.Context(), a.from, "tcp", a.at.String())
		if err != nil {
			return err
		}
		var answer podserver.Answer
		err = conn.SetDeadline(time.Now().Add(lab.LineTimeout))
		if err == nil {
			_, err = conn.Write([]byte("hello\n"))
		}
		if err == nil {
			err = json.NewDecoder(bufio.NewReader(conn)).Decode(&answer)
		}
		switch {
		case err != nil:
			conn.Close()
			return err
		case answer.Pod != pod:
			conn.Close()
			return fmt.Errorf("answered by %s", answer.Pod)
		}
		if held = slices.Concat(held, []net.Conn{conn}); len(held) < n {
			return fmt.Errorf("%d are open", len(held))
		}
		return nil
	})
	return release
}
