package e2e

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// TestFaultCrashWithEndpoints takes away the node that answers, together with the pods on it: once
// another node answers, no connection is sent to the dead pods, long before the API server knows
// that they are gone; and they are back when the node is.
func TestFaultCrashWithEndpoints(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	spreadPods(t, l)
	all := []string{"dead-0", "dead-1", "dead-2"}
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, all...)
	for range 3 {
		was := answerer(t, l, seedVIP.Addr())
		first := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
		time.Sleep(300 * time.Millisecond)
		crash(t, l, was)
		heir := wantAnswererAmong(t, l, seedVIP.Addr(), otherThan(l, was)...)
		eventually(t, heir+" sends no connection to the dead pod", func() error {
			if s := l.Spread(t.Context(), lab.ClientName, "tcp", seedVIP, 30); len(s.Failures) > 0 {
				return s.Failures[0]
			}
			return nil
		})
		report := first.Stop()
		t.Logf("%s crashed with its pod: %s", was, report)
		if report.Gap > crashBound {
			t.Errorf("no node took over for %v", report.Gap)
		}
		after := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
		time.Sleep(2 * time.Second)
		report = after.Stop()
		t.Logf("after %s has taken over: %s", heir, report)
		if report.Failed() > 0 || report.Answered == 0 {
			t.Errorf("connections went to the pod of a dead node: %s", report)
		}
		revive(t, l, was)
		wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, all...)
	}
}

// spreadPods replaces the pods of the seed cluster by one on each worker.
func spreadPods(t testing.TB, l *lab.Lab) {
	t.Helper()
	for i, node := range workers(l) {
		if err := l.AddPod(t.Context(), podOn(l, node, "dead-"+string('0'+byte(i)), 90)); err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
		if err := l.RemovePod(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFaultHungProxy freezes the proxy of the node that answers, which keeps its socket open: what
// is in the kernel goes on, what is announced as well until the hold is over, and then another node
// takes over.
func TestFaultHungProxy(t *testing.T) {
	t.Parallel()
	l := labWith(t, lab.Options{Args: map[string][]string{"speaker": {"--hold=3s"}}})
	seedService(t, l)
	was := answerer(t, l, seedVIP.Addr())
	proxy := l.Agent("proxy", was)
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
	if err := proxy.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = proxy.Signal(syscall.SIGCONT) }()
	began := time.Now()
	heir := wantAnswererAmong(t, l, seedVIP.Addr(), otherThan(l, was)...)
	took := time.Since(began)
	report := probe.Stop()
	t.Logf("%s took over after %v: %s", heir, took.Round(100*time.Millisecond), report)
	if took < 3*time.Second {
		t.Errorf("the hold of 3s was not kept: another node answers after %v", took)
	}
	if lost := report.Failed() - report.Failures["connection reset by peer"]; lost > 0 || report.Answered == 0 {
		t.Errorf("connections were met by silence: %s", report)
	}
}

// BenchmarkCrashWithEndpoints takes away the node that answers, and one of three pods with it,
// again and again. It reports the longest time without an answer of each crash, and how many
// connections failed later than a second after it. 50 of them take some 10 minutes: go test -run
// '^$' -bench CrashWithEndpoints -benchtime 50x -timeout 30m ./e2e
func BenchmarkCrashWithEndpoints(b *testing.B) {
	l := labtest.Start(b, lab.SeedCluster(), lab.Options{Progress: func(string) {}})
	if err := l.ApplyYAML(b.Context(), poolAndAdvertisement); err != nil {
		b.Fatal(err)
	}
	if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
		b.Fatal(err)
	}
	spreadPods(b, l)
	var gaps []time.Duration
	late := 0
	for b.Loop() {
		was := answerer(b, l, seedVIP.Addr())
		time.Sleep(time.Second)
		probe := l.StartProbe(b.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
		time.Sleep(200 * time.Millisecond)
		crash(b, l, was)
		time.Sleep(1500 * time.Millisecond)
		gaps = append(gaps, probe.Stop().Gap)
		probe = l.StartProbe(b.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
		time.Sleep(time.Second)
		late += probe.Stop().Failed()
		wantAnswererAmong(b, l, seedVIP.Addr(), otherThan(l, was)...)
		revive(b, l, was)
	}
	slices.Sort(gaps)
	quantile := func(q int) float64 { return float64(gaps[(len(gaps)-1)*q/100].Milliseconds()) }
	b.ReportMetric(quantile(50), "ms-gap-p50")
	b.ReportMetric(quantile(99), "ms-gap-p99")
	b.ReportMetric(quantile(100), "ms-gap-max")
	b.ReportMetric(float64(late), "failed-later")
}
