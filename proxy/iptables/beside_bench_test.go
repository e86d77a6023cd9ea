package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// BenchmarkBesideLarge measures how long a change of one of 1,000 plain Services takes beside large ones:
// while these stay as they are (rest), and while one endpoint of each is replaced all the time.
func BenchmarkBesideLarge(b *testing.B) {
	for _, size := range []struct{ large, ports, endpoints int }{
		{0, 0, 0}, {1, 10, 64}, {1, 160, 64}, {4, 160, 64}, {1, 20, 500},
	} {
		b.Run(fmt.Sprintf("%d of %d ports, %d endpoints", size.large, size.ports, size.endpoints), func(b *testing.B) {
			besideLarge(b, size.large, size.ports, size.endpoints)
		})
	}
}

func besideLarge(b *testing.B, count, ports, endpoints int) {
	const plain = 1000
	changed := make(chan struct{}, 1)
	var longest atomic.Int64 // of a round
	a := actorWith(dialect.Deps{
		Observe: func(s dialect.Sync) { longest.Store(max(longest.Load(), int64(s.Duration))) },
		Changed: func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		},
	}, map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, "nft")}})
	a.families[0].batch = 500
	a.Configure(seedConfig)
	all := many(plain, 2)
	others := func(version int) map[lb.Key]plan.Service {
		set := map[lb.Key]plan.Service{}
		for i := range count {
			s := largeNumber(i, ports, endpoints, version)
			set[s.Key] = s
		}
		return set
	}
	maps.Copy(all, others(0))
	a.Set(all)
	started := time.Now()
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	turn := 0
	change := func() time.Duration {
		turn++
		s := simple(turn*7919%plain, 2+(1+turn/plain)%2)
		from := time.Now()
		a.Set(plans(s))
		for {
			<-changed
			if o, ok := a.Outcomes()[s.Key]; ok && o.Err == nil && len(o.Applied.Ports) > 0 &&
				slices.Equal(o.Applied.Ports[0].Backends.Cluster, s.Ports[0].Backends.Cluster) {
				return time.Since(from)
			}
		}
	}
	known := map[lb.Key]plan.Outcome{}
	unwritten := func(key lb.Key) bool { return len(known[key].Applied.Ports) < ports }
	for slices.ContainsFunc(slices.Collect(maps.Keys(others(0))), unwritten) || len(known) < len(all) {
		<-changed
		maps.Copy(known, a.Outcomes())
	}
	b.ReportMetric(time.Since(started).Seconds(), "start-s")
	var rest, beside []time.Duration
	for range 10 {
		rest = append(rest, change())
	}
	longest.Store(0)
	for i := 0; b.Loop(); i++ {
		a.Set(others(i + 1))
		time.Sleep(time.Duration(i%7) * 5 * time.Millisecond)
		beside = append(beside, change())
	}
	for name, took := range map[string][]time.Duration{"rest": rest, "beside": beside} {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, name+"-p50-ms")
		b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, name+"-max-ms")
	}
	b.ReportMetric(float64(longest.Load())/1e6, "round-max-ms")
}
