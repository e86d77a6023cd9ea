package main

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// BenchmarkScale is what one proxy of a large cluster takes, from the watch to the kernel's
// confirmation: 10,000 Services with 100,000 endpoints on 1,000 nodes. It needs a kernel, and nftables.
// A node that crashes takes an endpoint of each of 100 Services along.
func BenchmarkScale(b *testing.B) {
	const services, each, nodes = 10_000, 10, 1000
	debug.SetGCPercent(gcPercent)
	defer runtime.KeepAlive(make([]byte, spare))
	for b.Loop() {
		p, slicesOf := loaded(services)
		for i := range services {
			slicesOf.Set(benchKey(i), []lb.Slice{spread(i, each, nodes)})
		}
		confirmed := make(chan lb.Key, 2*services)
		p = reborn(b, p, rulesIn(b, nstest.New(b), modeNftables, 0), confirmed)
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan error)
		go func() { done <- p.runner.Run(ctx) }()

		measure := func(what string, change func() (keys int)) {
			for len(confirmed) > 0 {
				<-confirmed
			}
			began, cpu := time.Now(), processorTime()
			for left := change(); left > 0; left-- {
				<-confirmed
			}
			took := time.Since(began)
			time.Sleep(time.Second) // what comes after the confirmation costs too
			b.ReportMetric(float64(took.Microseconds())/1000, what+"-ms")
			b.ReportMetric(float64((processorTime()-cpu).Microseconds())/1000, what+"-cpu-ms")
		}
		measure("start", func() int {
			p.markAll(time.Now())
			p.runner.Poke()
			<-p.settled
			return 0
		})
		b.ReportMetric(resident(), "MiB-resident")
		measure("endpoint", func() int { return unready(p, slicesOf, 0, func(at int) bool { return at == 0 }) })
		measure("crash", func() (keys int) {
			for i := range services {
				keys += unready(p, slicesOf, i, func(at int) bool { return (i*each+at)%nodes == 500 })
			}
			return keys
		})
		measure("same", func() int { // as after a list
			p.markAll(time.Now())
			p.runner.Poke()
			return 0
		})
		cancel()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
}

// spread returns the slice of a Service whose endpoints are on nodes one after the other.
func spread(i, endpoints, nodes int) lb.Slice {
	s := lb.Slice{Service: benchKey(i), Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for at := range endpoints {
		n := i*endpoints + at
		s.Endpoints = append(s.Endpoints, lb.Endpoint{
			Addr: netip.AddrFrom4([4]byte{11, byte(n >> 16), byte(n >> 8), byte(n)}),
			Node: fmt.Sprint("node-", n%nodes), Ready: true, Serving: true,
		})
	}
	return s
}

// unready makes those endpoints of a Service unready, and returns 1 if there are any.
func unready(p *proxy, slicesOf *kubetest.Table[lb.Key, []lb.Slice], i int, which func(at int) bool) int {
	of, _ := slicesOf.Get(benchKey(i))
	changed, found := of[0], 0
	changed.Endpoints = slices.Clone(changed.Endpoints)
	for at := range changed.Endpoints {
		if which(at) {
			changed.Endpoints[at].Ready, changed.Endpoints[at].Serving, found = false, false, 1
		}
	}
	if found > 0 {
		slicesOf.Set(benchKey(i), []lb.Slice{changed})
		p.markEndpoints(benchKey(i))
	}
	return found
}

func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
