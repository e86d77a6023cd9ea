package e2e

import (
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

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

// BenchmarkCrash takes away the node that answers, again and again, over ARP and over NDP, and reports the
// longest time without an answer of each crash. Each worker has a pod of the Service, so that each crash
// takes one of them along. 50 of each take some 35 minutes: go test -run '^$' -bench Crash -benchtime
// 50x -timeout 60m ./e2e
func BenchmarkCrash(b *testing.B) {
	for _, c := range []struct {
		name         string
		workers      int
		vip          netip.AddrPort
		end, recover func(testing.TB, *lab.Lab, string)
	}{
		{"crash/workers=3", 3, seedVIP, crash, revive},
		{"crash/workers=9", 9, seedVIP, crash, revive},
		{"freeze/workers=3", 3, seedVIP, freeze, thaw},
		{"crash-ndp/workers=3", 3, seedVIP6, crash, revive},
		{"freeze-ndp/workers=3", 3, seedVIP6, freeze, thaw},
	} {
		b.Run(c.name, func(b *testing.B) {
			cluster, pool, service := clusterOf(c.workers), poolAndAdvertisement, lab.SeedService()
			if c.vip.Addr().Is6() {
				cluster.DualStack, pool = true, dualStackPool
				service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
			}
			l := labtest.Start(b, cluster, lab.Options{Progress: func(string) {}})
			if err := l.ApplyYAML(b.Context(), pool); err != nil {
				b.Fatal(err)
			}
			spreadPods(b, l)
			if err := l.AddService(b.Context(), service); err != nil {
				b.Fatal(err)
			}
			var gaps []time.Duration
			for b.Loop() {
				was := answerer(b, l, c.vip.Addr())
				waitWatched(b, l)
				time.Sleep(time.Second)
				probe := l.StartProbe(b.Context(), lab.ClientName, "tcp", c.vip, newEvery)
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

// busyPerProcessor is how many programs fight for each processor while false alarms are counted: with
// two processors the load is 10.
const busyPerProcessor = 5

// BenchmarkFalseAlarms counts, over ten seconds each, how often a speaker takes another for gone while
// busy loops of the same priority run beside them, and fails if an address moves for that. An hour of it:
// go test -run '^$' -bench FalseAlarms -benchtime 360x -timeout 90m ./e2e
func BenchmarkFalseAlarms(b *testing.B) {
	l := labtest.Start(b, clusterOf(9), lab.Options{Progress: func(string) {}})
	if err := l.ApplyYAML(b.Context(), poolAndAdvertisement); err != nil {
		b.Fatal(err)
	}
	if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
		b.Fatal(err)
	}
	answerer(b, l, seedVIP.Addr())
	keepBusy(b, busyPerProcessor*runtime.NumCPU())
	waitTogether(b, l)
	waitWatched(b, l)
	before, began := countAlarms(b, l), time.Now()
	loads := 0.0
	for b.Loop() {
		time.Sleep(10 * time.Second)
		loads += load(b)
	}
	counted := countAlarms(b, l).since(before)
	took, average := time.Since(began), loads/float64(b.N)
	text := fmt.Sprintf("%v with an average load of %.1f: %s", took.Round(time.Second), average, counted)
	if counted.moves > 0 { // then go test prints no figures
		b.Errorf("an address moved, and no node was gone: %s", text)
	} else {
		b.Log(text)
	}
	b.ReportMetric(took.Minutes(), "minutes")
	b.ReportMetric(average, "load")
	b.ReportMetric(counted.moves, "moves")
	b.ReportMetric(counted.paths, "paths-lost")
	b.ReportMetric(counted.dead, "alarms")
	b.ReportMetric(counted.slow, "slow")
	b.ReportMetric(counted.cutOff, "cut-off")
}

// keepBusy runs busy loops until the benchmark ends, and waits until the load average of a minute shows them.
func keepBusy(b *testing.B, loops int) {
	b.Helper()
	for range loops {
		loop := exec.CommandContext(b.Context(), "sh", "-c", "while :; do :; done")
		if err := loop.Start(); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = loop.Wait() }) // killed, as the context has ended
	}
	err := within(5*time.Minute, func() error {
		if average := load(b); average < 0.9*float64(loops) {
			return fmt.Errorf("it is %.1f", average)
		}
		return nil
	})
	if err != nil {
		b.Fatalf("the load does not rise to %d: %v", loops, err)
	}
}

// alarms are how often speakers found something wrong with another, of all speakers together.
type alarms struct {
	moves  float64 // changes of an address's owner, as the speaker saw them that saw most
	paths  float64 // BFD lost the path to a neighbor
	slow   float64 // gossip lost a speaker whose node answered
	dead   float64 // a node was taken for dead
	cutOff float64 // a node took itself for cut off

	movesOf map[string]float64 // by node
}

// countAlarms counts from the start of the speakers on.
func countAlarms(b *testing.B, l *lab.Lab) alarms {
	b.Helper()
	counted := alarms{movesOf: map[string]float64{}}
	for _, a := range l.Agents("speaker") {
		counted.movesOf[a.Node] = metric(b, a, "landfall_speaker_owner_changes_total")
		for line := range strings.Lines(a.Log()) { // no metric counts these
			switch {
			case strings.Contains(line, `msg="BFD session changed"`) && strings.Contains(line, "from=Up to=Down"):
				counted.paths++
			case strings.Contains(line, `msg="speaker is lost, its node answers"`):
				counted.slow++
			case strings.Contains(line, `msg="node is dead"`):
				counted.dead++
			case strings.Contains(line, `msg="this node may have been cut off`):
				counted.cutOff++
			}
		}
	}
	return counted
}

func (a alarms) since(before alarms) alarms {
	for node, moves := range a.movesOf {
		a.moves = max(a.moves, moves-before.movesOf[node])
	}
	a.paths -= before.paths
	a.slow -= before.slow
	a.dead -= before.dead
	a.cutOff -= before.cutOff
	return a
}

func (a alarms) String() string {
	return fmt.Sprintf("owners changed: %.0f, nodes taken for dead: %.0f, paths lost by BFD: %.0f, "+
		"speakers lost by gossip whose node answered: %.0f, nodes that took themselves for cut off: %.0f",
		a.moves, a.dead, a.paths, a.slow, a.cutOff)
}
