package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// BenchmarkCrash takes away the node that answers, again and again, and reports the longest time without an answer of each crash.
// 50 of them take some ten minutes: go test -run '^$' -bench Crash -benchtime 50x -timeout 30m ./e2e
func BenchmarkCrash(b *testing.B) {
	l := labtest.Start(b, lab.SeedCluster(), lab.Options{Progress: func(string) {}})
	if err := l.ApplyYAML(b.Context(), poolAndAdvertisement); err != nil {
		b.Fatal(err)
	}
	// All pods are where the API server is, which does not crash: what is measured is how the address moves.
	for _, pod := range []string{"my-nginx-3", "my-nginx-4"} {
		if err := l.AddPod(b.Context(), podOn(l, "k8s-master-176", pod, pod[9])); err != nil {
			b.Fatal(err)
		}
	}
	for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
		if err := l.RemovePod(b.Context(), pod); err != nil {
			b.Fatal(err)
		}
	}
	if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
		b.Fatal(err)
	}
	var gaps []time.Duration
	for b.Loop() {
		was := answerer(b, l, seedVIP.Addr())
		time.Sleep(time.Second)
		probe := l.StartProbe(b.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
		time.Sleep(200 * time.Millisecond)
		crash(b, l, was)
		time.Sleep(2 * time.Second)
		report := probe.Stop()
		gaps = append(gaps, report.Gap)
		wantAnswererAmong(b, l, seedVIP.Addr(), otherThan(l, was)...)
		revive(b, l, was)
	}
	slices.Sort(gaps)
	quantile := func(q int) float64 { return float64(gaps[(len(gaps)-1)*q/100].Milliseconds()) }
	b.ReportMetric(quantile(50), "ms-gap-p50")
	b.ReportMetric(quantile(99), "ms-gap-p99")
	b.ReportMetric(quantile(100), "ms-gap-max")
}
