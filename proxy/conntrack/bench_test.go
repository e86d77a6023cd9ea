package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// BenchmarkUpdate measures what it takes to note that one endpoint of a Service is gone, while all
// others wait for the planner that says so.
func BenchmarkUpdate(b *testing.B) {
	for _, s := range []struct{ ports, frontends, endpoints int }{{1, 4, 100}, {1, 4, 10_000}, {4, 64, 2_000}} {
		b.Run(fmt.Sprintf("%+v", s), func(b *testing.B) {
			services := [2]plan.Service{wide(s.ports, s.frontends, s.endpoints, 0), wide(s.ports, s.frontends, s.endpoints, 1)}
			a := newActor(&fake{})
			a.Begin(map[lb.Key]plan.Service{services[0].Key: services[0]})
			for i := 1; b.Loop(); i++ {
				a.Update(map[lb.Key]plan.Service{services[0].Key: services[i%2]})
			}
		})
	}
}

// wide returns a Service with so many UDP ports, of which each has as many frontends and endpoints.
func wide(ports, frontends, endpoints, without int) plan.Service {
	s := plan.Service{Key: lb.Key{Namespace: "default", Name: "wide"}}
	for n := range ports {
		p := plan.Port{Family: lb.IPv4, Protocol: lb.UDP, Name: fmt.Sprint(n)}
		for i := range frontends {
			at := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
			p.Frontends = append(p.Frontends, plan.Frontend{Kind: plan.ExternalIP, Addr: at, Port: uint16(n + 1)})
		}
		for i := without; i < endpoints; i++ {
			at := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
			p.Serving = append(p.Serving, netip.AddrPortFrom(at, 53))
		}
		s.Ports = append(s.Ports, p)
	}
	return s
}

// BenchmarkEvents measures what the thread that reads events costs for each connection that opens and
// ends: of a Service whose connections are counted, and of others.
func BenchmarkEvents(b *testing.B) {
	for name, port := range map[string]uint16{"counted": 80, "not counted": 79} {
		b.Run(name, func(b *testing.B) {
			w := newWatched(b, "172.31.0.1", "172.31.0.2", 24)
			if err := w.watch.Filter(nil, []uint16{port, 81}); err != nil {
				b.Fatal(err)
			}
			var events, lost atomic.Int64
			var cost time.Duration
			ctx, cancel := context.WithCancel(b.Context())
			done := make(chan error)
			go func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				before := threadTime()
				err := w.watch.Each(ctx, func(plan.Tracked) { events.Add(1) }, func() { lost.Add(1) })
				cost = threadTime() - before
				done <- err
			}()
			for b.Loop() {
				w.connect(80).Close()
			}
			w.connect(81).Close() // is heard last
			for deadline := time.Now().Add(10 * time.Second); events.Load() == 0 && time.Now().Before(deadline); {
				time.Sleep(time.Millisecond)
			}
			cancel()
			if err := <-done; err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(events.Load())/float64(b.N), "events/op")
			b.ReportMetric(float64(cost.Nanoseconds())/1000/float64(b.N), "reader-µs/op")
			b.ReportMetric(float64(lost.Load()), "overruns")
		})
	}
}

// threadTime returns how much of the processor the calling thread has had.
func threadTime() time.Duration {
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
