package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
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

// TestWorkedExampleByEachModesName runs the worked example as each of kube-proxy's modes did: by each of
// IPVS' schedulers by its name, and in iptables mode, which refuses each of the
// names for that Service, with a condition, and goes on at random; and in both with a relay in place of the userspace mode, which
// chooses by each.
func TestWorkedExampleByEachModesName(t *testing.T) {
	t.Parallel()
	start := func(t *testing.T, mode string, relay bool) *lab.Lab {
		l := labtest.Start(t, lab.SeedCluster(), lab.Options{Values: map[string]any{
			"relay": map[string]any{"enabled": relay}, "proxy": map[string]any{"mode": mode}}})
		if err := l.ApplyYAML(t.Context(), preferBootNode); err != nil {
			t.Fatal(err)
		}
		seedService(t, l)
		wantAnswers(t, l, lab.ClientName, "tcp", seedNodePort, "my-nginx-1", "my-nginx-2")
		return l
	}
	t.Run("nftables", func(t *testing.T) {
		t.Parallel()
		l := start(t, "nftables", true)
		byEachScheduler(t, l)
		wantNoEvent(t, l, lb.ReasonSchedulerIgnored)
		// In place of the userspace mode: the relay, which counts its own connections.
		setScheduler(t, l, "random")
		setRelay(t, l, "true")
		byEachScheduler(t, l)
		wantNoEvent(t, l, lb.ReasonSchedulerIgnored)
	})
	t.Run("iptables", func(t *testing.T) {
		t.Parallel()
		l := start(t, "iptables", true)
		for _, name := range ipvsSchedulers {
			setScheduler(t, l, name)
			wantEvent(t, l, "my-nginx", string(lb.ReasonSchedulerIgnored), fmt.Sprintf("%q needs a proxy in nftables mode", name))
			wantAnswers(t, l, lab.ClientName, "tcp", seedNodePort, "my-nginx-1", "my-nginx-2")
		}
		last := fmt.Sprintf("%q needs a proxy in nftables mode", ipvsSchedulers[len(ipvsSchedulers)-1])
		wantCondition(t, l, "my-nginx", lb.ConditionAsRequested, "False", string(lb.ReasonSchedulerIgnored), last)
		setScheduler(t, l, "random")
		eventually(t, "the Service is served as requested", func() error {
			if c, err := condition(t.Context(), l, "my-nginx", lb.ConditionAsRequested); err == nil {
				return fmt.Errorf("the condition is there: %s", c.Message)
			}
			return nil
		})
		setRelay(t, l, "true")
		byEachScheduler(t, l)
	})
}

// byEachScheduler has the Service choose by each of IPVS' schedulers, while one of its two pods holds connections.
func byEachScheduler(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range ipvsSchedulers {
		setScheduler(t, l, "random")
		wantAnswers(t, l, lab.ClientName, "tcp", seedNodePort, "my-nginx-1", "my-nginx-2")
		release := holdAt(t, l, "my-nginx-1", 4)
		setScheduler(t, l, name)
		switch name {
		case "rr", "wrr":
			wantTurns(t, l, name)
		case "lc", "wlc", "sed", "nq":
			wantAnswers(t, l, lab.ClientName, "tcp", seedNodePort, "my-nginx-2")
		default:
			eventually(t, name+" sends a client to one pod", func() error {
				if s := l.Spread(t.Context(), lab.ClientName, "tcp", seedNodePort, 20); len(s.Failures) > 0 || len(s.Pods) != 1 {
					return fmt.Errorf("answers by %v, failures %q", s.Pods, s.Failures)
				}
				return nil
			})
		}
		release()
	}
}

// wantTurns waits until the two pods answer in turn. A table's end, and a connection of others, may give one of them two
// turns; at random they would have half of all.
func wantTurns(t *testing.T, l *lab.Lab, scheduler string) {
	t.Helper()
	const requests, most = 30, 3
	eventually(t, scheduler+" takes turns", func() error {
		again, last := 0, ""
		for range requests {
			answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", seedNodePort)
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

// holdAt opens connections until a pod has n, which stay open until release is called.
func holdAt(t *testing.T, l *lab.Lab, pod string, n int) (release func()) {
	t.Helper()
	var held []net.Conn
	release = func() {
		for _, conn := range held {
			conn.Close()
		}
	}
	t.Cleanup(release)
	eventually(t, fmt.Sprintf("%d connections end at %s", n, pod), func() error {
		conn, err := l.Dial(t.Context(), lab.ClientName, "tcp", seedNodePort.String())
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
