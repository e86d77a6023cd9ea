package main

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// shape is how large a Service is.
type shape struct {
	ports, endpoints, externals, vips, ranges int
	// apart gives each port endpoints with two numbers of its own, so that ports share nothing.
	apart bool
	// weight is that of each endpoint, if they are chosen by a table.
	weight uint8
}

func (s shape) service(key lb.Key, version int) (lb.Service, []lb.Slice) {
	addr := func(a byte, i int) netip.Addr {
		return netip.AddrFrom4([4]byte{a, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	svc := lb.Service{
		Key: key, UID: key.Name, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{addr(9, 1)}, AffinityTimeout: time.Hour,
	}
	slice := lb.Slice{Key: key, Service: key, Family: lb.IPv4}
	for i := range s.ports {
		name := fmt.Sprint("p", i)
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: name, Protocol: lb.UDP, Port: uint16(1 + i)})
		slice.Ports = append(slice.Ports, lb.SlicePort{Name: name, Protocol: lb.UDP, Port: uint16(1 + i)})
	}
	for i := range s.externals {
		svc.ExternalIPs = append(svc.ExternalIPs, addr(12, i))
	}
	for i := range s.vips {
		svc.Ingress = append(svc.Ingress, lb.Ingress{Addr: addr(13, i)})
	}
	for i := range s.ranges {
		svc.SourceRanges = append(svc.SourceRanges, netip.PrefixFrom(addr(14, i+version), 32))
	}
	if slice.Weight = s.weight; s.weight > 0 {
		svc.Scheduler, svc.AffinityTimeout = string(plan.Maglev), 0
	}
	var all []lb.Slice
	each := 1000
	if s.apart {
		each = min(each, (s.endpoints+1)/2)
	}
	for i := range s.endpoints {
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: addr(15, i+version), Node: "there", Ready: true, Serving: true})
		if len(slice.Endpoints) == each || i == s.endpoints-1 {
			part := slice
			if s.apart && len(all)%2 == 1 {
				part.Ports = slices.Clone(part.Ports)
				for j := range part.Ports {
					part.Ports[j].Port++
				}
			}
			all, slice.Endpoints = append(all, part), nil
		}
	}
	return svc, all
}

// BenchmarkLargeService measures for how long the planner is busy with one Service of many, as all
// others wait for that, when it changes, and when it stays as it is.
func BenchmarkLargeService(b *testing.B) {
	for _, s := range []shape{
		{ports: 1, endpoints: 2},
		{ports: 1, endpoints: 2, weight: 100},
		{ports: 1, endpoints: 65_000},
		{ports: 4, endpoints: 65_000},
		{ports: 200, endpoints: 500},
		{ports: 200, endpoints: 500, apart: true},
		{ports: 2_000, endpoints: 100},
		{ports: 10_000, endpoints: 1},
		{ports: 20_000, endpoints: 500},
		{ports: 1_000, endpoints: 1, externals: 3_000},
		{ports: 1, endpoints: 1, externals: 60_000},
		{ports: 1_000, endpoints: 1, vips: 3_000},
		{ports: 1, endpoints: 1, vips: 20_000},
		{ports: 1, endpoints: 1, vips: 1, ranges: 10_000},
		{ports: 1, endpoints: 1, vips: 1, ranges: 60_000},
		{ports: 1_000, endpoints: 1, vips: 10, ranges: 10_000},
	} {
		b.Run(fmt.Sprintf("%+v", s), func(b *testing.B) {
			p, all := loaded(1000)
			services := p.from.services.(*kubetest.Table[lb.Key, lb.Service])
			key := lb.Key{Namespace: "bench", Name: "large"}
			var longest, total, same time.Duration
			for i := 0; b.Loop(); i++ {
				svc, endpoints := s.service(key, i)
				services.Set(key, svc)
				all.Set(key, endpoints)
				p.mark(key)
				for range 3 {
					started := time.Now()
					if _, err := p.step(b.Context()); err != nil {
						b.Fatal(err)
					}
					took := time.Since(started)
					longest, total = max(longest, took), total+took
				}
				p.mark(key)
				started := time.Now()
				if _, err := p.step(b.Context()); err != nil {
					b.Fatal(err)
				}
				same += time.Since(started)
			}
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(longest.Microseconds())/1000, "longest-ms")
			b.ReportMetric(float64(total.Microseconds())/1000/float64(b.N), "change-ms")
			b.ReportMetric(float64(same.Microseconds())/1000/float64(b.N), "same-ms")
			b.ReportMetric(float64(m.HeapAlloc>>20), "MiB")
		})
	}
}
