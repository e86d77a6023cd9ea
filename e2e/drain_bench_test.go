package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// BenchmarkDrain excludes the node that answers from load balancers, again and again, and reports how many of 200
// connections that stand break in each drain, how many new ones fail of those that a client opens every 10 ms, the
// longest time without an answer, and when another node's announcement reached a client:
// go test -run '^$' -bench Drain -benchtime 10x -timeout 30m ./e2e
func BenchmarkDrain(b *testing.B) {
	l := labtest.Start(b, clusterOf(3), lab.Options{Progress: func(string) {}})
	if err := l.ApplyYAML(b.Context(), poolAndAdvertisement); err != nil {
		b.Fatal(err)
	}
	spreadPods(b, l)
	drains(b, l)
}

// drains measures whoever serves in a lab.
func drains(b *testing.B, l *lab.Lab) {
	if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
		b.Fatal(err)
	}
	const flows = 200
	broken, failed, turns := 0, 0, 0
	var gaps, moved []time.Duration
	for b.Loop() {
		turns++
		inTurn(b, func(t testing.TB) {
			was := seen(b, l)
			standing := openFlowsFrom(t, l, lab.ClientName, flows, seedVIP)
			own := nodeMAC(t, l, was)
			announced := sniff(b, l, lab.ClientName, patience, func(frame []byte) bool {
				mac, addr, ok := arpOf(frame)
				return ok && addr == seedVIP.Addr() && !slices.Equal(mac, own)
			})
			probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, 10*time.Millisecond)
			time.Sleep(200 * time.Millisecond)
			began := time.Now()
			patchNode(t, l, was, fmt.Sprintf(excludePatch, `""`))
			at := <-announced
			if at.IsZero() {
				t.Fatal("no other node announces the address")
			}
			moved = append(moved, at.Sub(began))
			time.Sleep(2 * time.Second)
			broken += len(use(standing))
			report := probe.Stop()
			failed, gaps = failed+report.Failed(), append(gaps, report.Gap)
			patchNode(t, l, was, fmt.Sprintf(excludePatch, "null"))
			time.Sleep(5 * time.Second) // whoever is to answer does
		})
	}
	reportGaps(b, gaps)
	slices.Sort(moved)
	b.ReportMetric(milliseconds(moved[(len(moved)-1)/2]), "ms-moved-p50")
	b.ReportMetric(100*float64(broken)/float64(turns*flows), "%flows-broken")
	b.ReportMetric(float64(failed)/float64(turns), "new-failed/drain")
	b.ReportMetric(load(b), "load")
}

// excludePatch is the patch of a node whose label is set or, with null, not.
const excludePatch = `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`
