package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// BenchmarkBGPCrash takes away one of three nodes behind a pair of routers with BFD of 50 ms × 3,
// again and again, and reports for how long new connections were hit, a third of which go to that
// node, and when both routers' kernels sent nothing there any more. 50 of them take some five
// minutes: go test -run '^$' -bench BGPCrash -benchtime 50x -timeout 30m ./e2e
func BenchmarkBGPCrash(b *testing.B) {
	for _, kind := range []string{lab.FRR, lab.BIRD} {
		b.Run(kind, func(b *testing.B) {
			l := startBGP(b, lab.ToR{Kind: kind, Count: 2, ASN: 64501, NodeASN: 64500, BFD: 50 * time.Millisecond}, false,
				", bfdProfile: fast, enableGracefulRestart: true")
			podsOnMaster(b, l)
			nodes := workers(l)
			var hits, routes []time.Duration
			for i := 0; b.Loop(); i++ {
				node := nodes[i%len(nodes)]
				eventually(b, "BFD is up", func() error { return watched(b, l) })
				probe := l.StartProbe(b.Context(), lab.FarClientName, "tcp", bgpVIP, newEvery/2)
				time.Sleep(200 * time.Millisecond)
				began := time.Now()
				crash(b, l, node)
				for routed(b, l, host(bgpVIP.Addr()), without(nodes, []string{node})...) != nil {
					if time.Since(began) > patience {
						b.Fatalf("%s is still routed to", node)
					}
				}
				routes = append(routes, time.Since(began))
				time.Sleep(time.Second)
				hits = append(hits, probe.Stop().Hit)
				revive(b, l, node)
				wantRouted(b, l, bgpVIP.Addr(), nodes...)
			}
			for _, m := range []struct {
				unit string
				of   []time.Duration
			}{{"ms-hit", hits}, {"ms-routes", routes}} {
				slices.Sort(m.of)
				for _, q := range []struct {
					name string
					at   int
				}{{"-p50", 50}, {"-p99", 99}} {
					b.ReportMetric(float64(m.of[(len(m.of)-1)*q.at/100].Milliseconds()), m.unit+q.name)
				}
			}
		})
	}
}
