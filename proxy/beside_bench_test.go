package main

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// BenchmarkBesideLarge measures, from the watch to the kernel's confirmation, how long a change of one
// of 5,000 plain Services takes beside large ones that change all the time: 200 ports with 500
// endpoints each and session affinity, of which one is replaced each time, or all, or one port gets another number.
// It needs a kernel, and nftables.
func BenchmarkBesideLarge(b *testing.B) {
	for _, test := range []struct {
		large, replaced int
		port            bool
	}{{large: 0}, {1, 1, false}, {8, 1, false}, {1, 500, false}, {8, 500, false}, {16, 0, true}, {200, 0, true},
		{200, 1, false}, {200, 500, false}} {
		b.Run(fmt.Sprintf("%d large, %d replaced, a port %v", test.large, test.replaced, test.port), func(b *testing.B) {
			besideLarge(b, test.large, test.replaced, test.port)
		})
	}
}

// bounded has the Services of a namespace have a bound, as with --namespace-limit's default.
func bounded(s *settings) {
	s.needs, s.limit = nftables.Needs, 16*nftables.MaxElements
}

// plainServices is how many a change is measured among.
const plainServices = 5000

func besideLarge(t *testing.B, large, replaced int, port bool) {
	debug.SetGCPercent(gcPercent)
	defer runtime.KeepAlive(make([]byte, spare))
	b := newCrowded(t, lb.IPv4, plainServices, rulesIn(t, nstest.New(t), modeNftables, 0), bounded)
	size := shape{ports: 200, endpoints: 500}
	for i := range large {
		b.grow(i, size, 0)
	}
	b.run(t)
	b.measure(t, func(i int) {
		for j := range large {
			if port {
				b.renumber(j, uint16(20_000+i%10_000))
			} else {
				b.grow(j, size, (i+1)*replaced)
			}
		}
		time.Sleep(time.Duration(i%7) * time.Millisecond)
	})
}

// measure reports how long changes of plain Services take, each of them after others have changed, and the memory.
func (b *crowded) measure(t *testing.B, others func(i int)) {
	for len(b.confirmed) > 0 {
		<-b.confirmed
	}
	var took []time.Duration
	largest := resident()
	for i := 0; t.Loop(); i++ {
		others(i)
		started := time.Now()
		key := b.change(i*7919%plainServices, func(all []lb.Endpoint) { all[0].Ready = !all[0].Ready })
		for <-b.confirmed != key {
		}
		took = append(took, time.Since(started))
		time.Sleep(100 * time.Millisecond)
		largest = max(largest, resident())
	}
	slices.Sort(took)
	t.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	t.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
	t.ReportMetric(largest, "MiB-resident")
}

// renumber gives the last port of a large Service another number.
func (b *crowded) renumber(i int, port uint16) {
	svc, _ := b.services.Get(largeKey(i))
	svc.Ports = slices.Clone(svc.Ports)
	svc.Ports[len(svc.Ports)-1].Port = port
	b.services.Set(svc.Key, svc)
	b.mark(svc.Key)
}

// BenchmarkBesideTables is the same beside Services of two endpoints whose weights take tables of 8,191 slots: of all
// of them one endpoint goes each time, or comes back.
func BenchmarkBesideTables(t *testing.B) {
	const large = 250
	debug.SetGCPercent(gcPercent)
	defer runtime.KeepAlive(make([]byte, spare))
	b := newCrowded(t, lb.IPv4, plainServices, rulesIn(t, nstest.New(t), modeNftables, 0), bounded)
	flip := func(i int) {
		for j := range large {
			b.grow(j, shape{ports: 1, endpoints: 2 - i%2, weight: 100}, 0)
		}
	}
	flip(0)
	b.run(t)
	b.measure(t, func(i int) { flip(i + 1) })
}

// BenchmarkFullNamespace measures what a proxy occupies beside 5,000 plain Services, of which the large ones fill a
// namespace up to its bound, and how long a change of one of the plain ones takes then. It needs a kernel, and nftables.
// As what a process occupies does not shrink at once, each shape is to be run by itself.
func BenchmarkFullNamespace(b *testing.B) {
	for name, s := range map[string]shape{
		"small":                    {ports: 1, endpoints: 2, vips: 1},
		"200 ports":                {ports: 200, endpoints: 500},
		"200 ports, nothing alike": {ports: 200, endpoints: 500, apart: true},
		"external IPs":             {ports: 1, endpoints: 2, externals: 13_000},
		"source ranges":            {ports: 1, endpoints: 2, vips: 1, ranges: 10_000},
	} {
		b.Run(name, func(b *testing.B) { fullNamespace(b, s) })
	}
}

func fullNamespace(t *testing.B, s shape) {
	debug.SetGCPercent(gcPercent)
	defer runtime.KeepAlive(make([]byte, spare))
	b := newCrowded(t, lb.IPv4, plainServices, rulesIn(t, nstest.New(t), modeNftables, 0), bounded)
	n, began := b.fill(s), time.Now()
	b.run(t)
	start := time.Since(began)
	b.measure(t, func(int) {})
	t.ReportMetric(start.Seconds(), "start-s")
	t.ReportMetric(float64(n), "Services")
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	t.ReportMetric(float64(m.HeapAlloc>>20), "MiB-in-use")
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.unconfirmed) > 0 {
		t.Errorf("%d Services are not written", len(b.unconfirmed))
	}
}

// fill adds large Services in a namespace of their own until it has no room for another one, and returns how many.
func (b *crowded) fill(s shape) (n int) {
	for left := b.settings.limit; ; n++ {
		svc, all := b.large(n, s, n*s.endpoints)
		svc.Key.Namespace = "full"
		for i := range svc.ExternalIPs { // others than other Services have
			svc.ExternalIPs[i] = netip.AddrFrom4([4]byte{12, byte(n), byte(i >> 8), byte(i)})
		}
		for i := range svc.Ingress {
			svc.Ingress[i].Addr = netip.AddrFrom4([4]byte{byte(13 + i), byte(n >> 16), byte(n >> 8), byte(n)})
		}
		if left -= b.settings.needs(plan.New(svc, all, plan.Node{Name: b.self})); left < 0 {
			return n
		}
		b.services.Set(svc.Key, svc)
		b.slices.Set(svc.Key, all)
	}
}

// resident returns how much memory the process occupies, in MiB.
func resident() float64 {
	statm, err := os.ReadFile("/proc/self/statm")
	var size, pages float64
	if _, scanErr := fmt.Sscan(string(statm), &size, &pages); err != nil || scanErr != nil {
		return 0
	}
	return pages * float64(os.Getpagesize()) / (1 << 20)
}
