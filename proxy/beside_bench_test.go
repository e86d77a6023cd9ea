package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
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

func besideLarge(b *testing.B, plain, large, replaced int) {
	debug.SetGCPercent(gcPercent)
	defer runtime.KeepAlive(make([]byte, spare))
	p, slicesOf := loaded(plain)
	services := p.from.services.(*kubetest.Table[lb.Key, lb.Service])
	confirmed := make(chan lb.Key, 1<<16)
	p = reborn(b, p, confirmed)
	endpoints := func(i, version int) {
		s := shape{ports: 200, endpoints: 500}
		key := lb.Key{Namespace: "bench", Name: fmt.Sprint("large-", i)}
		svc, all := s.service(key, version*replaced)
		for j := range svc.Ports {
			svc.Ports[j].Protocol, all[0].Ports[j].Protocol = lb.TCP, lb.TCP
		}
		svc.ClusterIPs[0] = netip.AddrFrom4([4]byte{9, 0, byte(i), 1})
		services.Set(key, svc)
		slicesOf.Set(key, all)
		p.markEndpoints(key)
	}
	for i := range large {
		endpoints(i, 0)
	}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error)
	go func() { done <- p.runner.Run(ctx) }()
	p.markAll(time.Now())
	p.runner.Poke()
	<-p.settled
	for len(confirmed) > 0 {
		<-confirmed
	}
	var took []time.Duration
	largest := 0.0
	for i := 0; b.Loop(); i++ {
		for j := range large {
			endpoints(j, i+1)
		}
		time.Sleep(time.Duration(i%7) * time.Millisecond)
		key := benchKey(i * 7919 % plain)
		of, _ := slicesOf.Get(key)
		changed := of[0]
		changed.Endpoints = slices.Clone(changed.Endpoints)
		changed.Endpoints[0].Ready = !changed.Endpoints[0].Ready
		started := time.Now()
		slicesOf.Set(key, []lb.Slice{changed})
		p.markEndpoints(key)
		for <-confirmed != key {
		}
		took = append(took, time.Since(started))
		time.Sleep(100 * time.Millisecond)
		largest = max(largest, resident())
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
	b.ReportMetric(largest, "MiB-resident")
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

// reborn returns a proxy with the same sources whose rules are in a kernel of their own, and which
// tells of what the kernel has confirmed.
func reborn(b *testing.B, before *proxy, confirmed chan<- lb.Key) *proxy {
	p := newProxy(before.self, before.settings, before.families, before.log, time.Now)
	p.from, p.to = before.from, before.to
	var netlink *nftables.Netlink
	nstest.New(b).Do(b, func() (err error) {
		netlink, err = nftables.Dial()
		return err
	})
	rules := dialect.New(dialect.Deps{Log: p.log, Changed: p.runner.PokeNow, Rules: nftables.Rules(netlink, nil)})
	p.to.rules, p.to.flows = rules, telling{confirmed}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error)
	go func() { done <- rules.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		<-done
		netlink.Close()
	})
	return p
}

// telling tells of the Services that the kernel has confirmed.
type telling struct{ confirmed chan<- lb.Key }

func (t telling) Begin(map[lb.Key]plan.Service) {}

func (t telling) Update(applied map[lb.Key]plan.Service) {
	for key := range applied {
		t.confirmed <- key
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
