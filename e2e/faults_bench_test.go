package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// clusterOf is the seed cluster with more workers, n in all.
func clusterOf(n int) lab.Cluster {
	c := lab.SeedCluster()
	for i := len(c.Nodes) - 1; i < n; i++ {
		c.Nodes = append(c.Nodes, lab.Node{
			Name:       fmt.Sprintf("k8s-worker-%d", 200+i),
			Addr:       netip.AddrFrom4([4]byte{172, 26, 236, byte(200 + i)}),
			PodNetwork: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(200 + i), 0}), 24),
		})
	}
	return c
}

// BenchmarkCrash takes away the node that answers, again and again, and reports the longest time
// without an answer of each crash. Each worker has a pod of the Service, so that each crash takes
// one of them along. 50 of them take some ten minutes: go test -run '^$' -bench Crash -benchtime
// 50x -timeout 60m ./e2e
func BenchmarkCrash(b *testing.B) {
	for _, c := range []struct {
		name         string
		workers      int
		end, recover func(testing.TB, *lab.Lab, string)
	}{
		{"crash/workers=3", 3, crash, revive},
		{"crash/workers=9", 9, crash, revive},
		{"freeze/workers=3", 3, freeze, thaw},
	} {
		b.Run(c.name, func(b *testing.B) {
			l := labtest.Start(b, clusterOf(c.workers), lab.Options{Progress: func(string) {}})
			if err := l.ApplyYAML(b.Context(), poolAndAdvertisement); err != nil {
				b.Fatal(err)
			}
			spreadPods(b, l)
			if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
				b.Fatal(err)
			}
			var gaps []time.Duration
			for b.Loop() {
				was := answerer(b, l, seedVIP.Addr())
				waitWatched(b, l)
				time.Sleep(time.Second)
				probe := l.StartProbe(b.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
				time.Sleep(200 * time.Millisecond)
				c.end(b, l, was)
				time.Sleep(2 * time.Second)
				gaps = append(gaps, probe.Stop().Gap)
				c.recover(b, l, was)
			}
			reportGaps(b, gaps)
		})
	}
}

// waitWatched waits until each speaker hears its neighbors over BFD, as it does a second or two after
// they have met.
func waitWatched(t testing.TB, l *lab.Lab) {
	t.Helper()
	eventually(t, "all speakers hear their neighbors", func() error {
		for _, a := range l.Agents("speaker") {
			watched, up := metric(t, a, "landfall_speaker_neighbors"), metric(t, a, "landfall_speaker_neighbors_up")
			if watched == 0 || up < watched {
				return fmt.Errorf("%s hears %v of %v", a.Node, up, watched)
			}
		}
		return nil
	})
}

func reportGaps(b *testing.B, gaps []time.Duration) {
	slices.Sort(gaps)
	quantile := func(q int) float64 { return float64(gaps[(len(gaps)-1)*q/100].Milliseconds()) }
	b.ReportMetric(quantile(50), "ms-gap-p50")
	b.ReportMetric(quantile(99), "ms-gap-p99")
	b.ReportMetric(quantile(100), "ms-gap-max")
}

// busyLoops is how many programs fight for the processors while false alarms are counted.
const busyLoops = 8

// BenchmarkFalseAlarms counts, over ten seconds each, how often a speaker takes another for gone
// while busy loops of the same priority run beside them. Six minutes of it: go test -run '^$'
// -bench FalseAlarms -benchtime 36x -timeout 30m ./e2e
func BenchmarkFalseAlarms(b *testing.B) {
	l := labtest.Start(b, clusterOf(9), lab.Options{Progress: func(string) {}})
	if err := l.ApplyYAML(b.Context(), poolAndAdvertisement); err != nil {
		b.Fatal(err)
	}
	if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
		b.Fatal(err)
	}
	answerer(b, l, seedVIP.Addr())
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	for range busyLoops {
		loop := exec.CommandContext(ctx, "sh", "-c", "while :; do :; done")
		if err := loop.Start(); err != nil {
			b.Fatal(err)
		}
		defer func() { _ = loop.Wait() }() // killed
	}
	defer cancel()
	time.Sleep(5 * time.Second)
	said := func(text string) (n int) {
		for _, a := range l.Agents("speaker") {
			n += strings.Count(a.Log(), text)
		}
		return n
	}
	moved := func() (n float64) {
		for _, a := range l.Agents("speaker") {
			n += metric(b, a, "landfall_speaker_owner_changes_total")
		}
		return n
	}
	const slow, gone = `msg="speaker is lost, its node answers"`, `msg="node is dead"` // no metric counts these
	const cutOff = `msg="this node may have been cut off`
	slowBefore, goneBefore, movedBefore, cutOffBefore := said(slow), said(gone), moved(), said(cutOff)
	began := time.Now()
	for b.Loop() {
		time.Sleep(10 * time.Second)
	}
	hours := time.Since(began).Hours()
	b.ReportMetric(float64(said(slow)-slowBefore)/hours, "slow/h")
	b.ReportMetric(float64(said(gone)-goneBefore)/hours, "alarms/h")
	b.ReportMetric((moved()-movedBefore)/hours, "owner-changes/h")
	b.ReportMetric(float64(said(cutOff)-cutOffBefore)/hours, "cut-off/h")
}
