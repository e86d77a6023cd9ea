package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"context"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// largeService has a cluster IP with so many ports, and as many endpoints. Each version has another
// first endpoint.
func largeService(ports, endpoints, version int) plan.Service {
	key := lb.Key{Namespace: "default", Name: "large"}
	svc := lb.Service{
		Key: key, Type: lb.ClusterIP, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{addr("10.111.0.1")},
	}
	s := lb.Slice{Key: key, Service: key, Family: lb.IPv4}
	for i := range ports {
		name := fmt.Sprint("p", i)
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: name, Protocol: lb.TCP, Port: uint16(1000 + i)})
		s.Ports = append(s.Ports, lb.SlicePort{Name: name, Protocol: lb.TCP, Port: uint16(2000 + i)})
	}
	for i := range endpoints {
		if i == 0 {
			i = 5000 + version%1000
		}
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}),
			Ready: true, Serving: true})
	}
	return plan.New(svc, []lb.Slice{s}, plan.Node{Name: localNode})
}

// BenchmarkOneLargeService measures what a large Service with session affinity that changes all the
// time costs the others.
func BenchmarkOneLargeService(b *testing.B) {
	for _, size := range []struct{ ports, endpoints int }{{0, 0}, {160, 64}, {200, 500}} {
		for _, scheduler := range []plan.Scheduler{"affinity", plan.Maglev, "mixed"} {
			b.Run(fmt.Sprintf("%d ports, %d endpoints, %s", size.ports, size.endpoints, scheduler), func(b *testing.B) {
				benchLarge(b, size.ports, size.endpoints, scheduler)
			})
		}
	}
}

func benchLarge(b *testing.B, ports, endpoints int, scheduler plan.Scheduler) {
	const plain = 5000
	large := func(version int) plan.Service {
		if scheduler == "mixed" {
			return mixedService(ports, endpoints, version)
		}
		s := largeService(ports, endpoints, version)
		if s.Scheduler = scheduler; scheduler == "affinity" {
			s.Scheduler, s.Affinity, s.AffinityTimeout = plan.Random, true, 3*time.Hour
		}
		return s
	}
	n := dial(b, nstest.New(b))
	changed := make(chan struct{}, 1)
	var last dialect.Sync
	largest := 0
	a := newActor(dialect.Deps{
		Changed: func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		},
		Observe: func(s dialect.Sync) { last = s; largest = max(largest, s.Changes) },
	}, map[lb.Family]kernel{lb.IPv4: netlinkKernel{family: lb.IPv4, socket: n.commands}})
	a.Configure(seedConfig)
	all := clusterServices(plain)
	if ports > 0 {
		all[large(0).Key] = large(0)
	}
	started := time.Now()
	a.Set(all)
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	for a.Outcomes(); !a.Tried && time.Since(started) < 20*time.Second; a.Outcomes() {
		select {
		case <-changed:
		case <-time.After(time.Second):
		}
	}
	b.ReportMetric(float64(time.Since(started).Milliseconds()), "start-ms")
	time.Sleep(time.Second)
	var took []time.Duration
	i := 0
	for b.Loop() {
		i++
		if ports > 0 {
			s := large(i)
			a.Set(map[lb.Key]plan.Service{s.Key: s})
			time.Sleep(time.Duration(i%7) * time.Millisecond)
		}
		s := clusterService(i*7919%plain, 2, i)
		from := time.Now()
		a.Set(map[lb.Key]plan.Service{s.Key: s})
		for confirmed := false; !confirmed && time.Since(from) < 30*time.Second; {
			<-changed
			o, ok := a.Outcomes()[s.Key]
			confirmed = ok && o.Err == nil && slices.EqualFunc(o.Applied.Ports, s.Ports,
				func(x, y plan.Port) bool { return slices.Equal(x.Backends.Cluster, y.Backends.Cluster) })
		}
		took = append(took, time.Since(from))
		time.Sleep(20 * time.Millisecond)
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
	b.ReportMetric(residentMiB(), "MiB-resident")
	if last.Err != nil {
		b.Logf("last round: %.200v", last.Err)
	}
}

// BenchmarkContested has a Service ask for the frontends that another one has, as for a moment when these
// change hands.
func BenchmarkContested(b *testing.B) {
	for _, addresses := range []int{125, 1000, 2000} {
		b.Run(fmt.Sprint("frontends=", 8*addresses), func(b *testing.B) {
			asking := func(name string, created int64) plan.Service {
				s := plan.Service{Key: lb.Key{Namespace: "default", Name: name}, Age: plan.Age{Created: created, UID: name}}
				for port := range uint16(8) {
					p := plan.Port{Family: lb.IPv4, Protocol: lb.TCP, Name: fmt.Sprint(port), Number: 8080}
					p.Backends.Cluster = []lb.Backend{{Addr: netip.AddrPortFrom(addr("172.16.0.1"), 0), Ready: true}}
					for i := range addresses {
						p.Frontends = append(p.Frontends, plan.Frontend{Kind: plan.ExternalIP, Port: port + 1,
							Addr: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), Action: plan.ToCluster})
					}
					s.Ports = append(s.Ports, p)
				}
				return s
			}
			first, second := asking("first", 1), asking("second", 2)
			c := newClaims(lb.IPv4, func(lb.Key) {})
			c.set(first.Key, first)
			for b.Loop() {
				c.set(second.Key, second)
				c.set(second.Key, plan.Service{Key: second.Key})
			}
		})
	}
}
