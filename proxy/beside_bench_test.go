package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// BenchmarkBesideLarge measures, from the watch to the kernel's confirmation, how long a change of one
// of 5,000 plain Services takes beside large ones that change all the time: 200 ports with 500
// endpoints each and session affinity, of which one is replaced each time, or all. It needs a kernel, and
// nftables.
func BenchmarkBesideLarge(b *testing.B) {
	for _, test := range []struct{ large, replaced int }{{0, 0}, {1, 1}, {8, 1}, {1, 500}, {8, 500}} {
		b.Run(fmt.Sprintf("%d large, %d replaced", test.large, test.replaced), func(b *testing.B) {
			besideLarge(b, 5000, test.large, test.replaced)
		})
	}
}

func besideLarge(t *testing.B, plain, large, replaced int) {
	debug.SetGCPercent(gcPercent)
	defer runtime.KeepAlive(make([]byte, spare))
	b := newCrowded(t, plain, rulesIn(t, nstest.New(t), modeNftables, 0))
	size := shape{ports: 200, endpoints: 500}
	for i := range large {
		b.grow(i, size, 0)
	}
	b.run(t)
	for len(b.confirmed) > 0 {
		<-b.confirmed
	}
	var took []time.Duration
	largest := 0.0
	for i := 0; t.Loop(); i++ {
		for j := range large {
			b.grow(j, size, (i+1)*replaced)
		}
		time.Sleep(time.Duration(i%7) * time.Millisecond)
		started := time.Now()
		key := b.change(i*7919%plain, func(all []lb.Endpoint) { all[0].Ready = !all[0].Ready })
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

// resident returns how much memory the process occupies, in MiB.
func resident() float64 {
	statm, err := os.ReadFile("/proc/self/statm")
	var size, pages float64
	if _, scanErr := fmt.Sscan(string(statm), &size, &pages); err != nil || scanErr != nil {
		return 0
	}
	return pages * float64(os.Getpagesize()) / (1 << 20)
}
