package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// wide returns a Service with one port, and with external IPs, endpoints, and session affinity or not.
func wide(n, externals, endpoints int, affinity time.Duration) plan.Service {
	key := lb.Key{Namespace: "wide", Name: fmt.Sprint("wide-", n)}
	svc := lb.Service{
		Key: key, Type: lb.ClusterIP, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster, AffinityTimeout: affinity,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 112, 0, byte(1 + n)})},
		Ports:      []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
	}
	for i := range externals {
		svc.ExternalIPs = append(svc.ExternalIPs, netip.AddrFrom4([4]byte{172, byte(64 + n), byte(i >> 8), byte(i)}))
	}
	s := lb.Slice{Key: key, Service: key, Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for i := range endpoints {
		at := netip.AddrFrom4([4]byte{172, byte(16 + n%16), byte(i >> 8), byte(i)})
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: at, Node: "here", Ready: true, Serving: true})
	}
	return plan.New(svc, []lb.Slice{s}, plan.Node{Name: "here"})
}

// BenchmarkBesideMany measures the change of one endpoint of a plain Service beside large ones.
func BenchmarkBesideMany(b *testing.B) {
	for _, size := range []struct {
		services, externals, endpoints int
		affinity                       time.Duration
	}{{0, 0, 0, 0}, {1, 100, 10_000, 0}, {4, 100, 10_000, 0}, {1, 0, 10_000, time.Hour}, {1, 16_000, 1, 0},
		{4, 16_000, 1, 0}} {
		for _, kind := range []string{"nft", "legacy"} {
			b.Run(fmt.Sprintf("%s, %d of %d external IPs, %d endpoints, affinity %v", kind, size.services, size.externals,
				size.endpoints, size.affinity), func(b *testing.B) {
				a := newActor(map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, kind)}}, seedConfig)
				if kind == "nft" {
					a.families[0].batch = 500
				}
				a.families[0].once = 1 << 30
				all, rules := many(100, 2), 0
				for i := range size.services {
					s := wide(i, size.externals, size.endpoints, size.affinity)
					rules += a.families[0].count(s)
					maps.Copy(all, plans(s))
				}
				a.Set(all)
				began := time.Now()
				if err := settle(a, false); err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(time.Since(began).Seconds(), "s/start")
				b.ReportMetric(float64(rules), "rules")
				before := spentBy()
				for i := 0; b.Loop(); i++ {
					a.Set(plans(simple(7, 2+(i+1)%2)))
					if err := settle(a, false); err != nil {
						b.Fatal(err)
					}
				}
				after, n := spentBy(), float64(b.N)
				b.ReportMetric((after.restore-before.restore)/n, "restore-ms")
				b.ReportMetric((after.kernel-before.kernel)/n, "kernel-ms")
			})
		}
	}
}
