package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/feed"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// confirming is a dialect that confirms at once.
type confirming struct{ outcomes map[lb.Key]plan.Outcome }

func (c *confirming) Configure(plan.Config) {}

func (c *confirming) Begin(services map[lb.Key]plan.Service) { c.Update(services) }

func (c *confirming) Update(services map[lb.Key]plan.Service) {
	for key, s := range services {
		c.outcomes[key] = plan.Outcome{Applied: s}
	}
}

func (c *confirming) Outcomes() (map[lb.Key]plan.Outcome, bool) {
	o := c.outcomes
	c.outcomes = map[lb.Key]plan.Outcome{}
	return o, true
}

// BenchmarkStep is an endpoint that comes or goes among many Services, from the watch to what is
// told of it, without the kernel.
func BenchmarkStep(b *testing.B) {
	for _, n := range []int{1000, 10_000, 30_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p, slices := loaded(n)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				key := benchKey(i * 7919 % n)
				of, _ := slices.Get(key)
				changed := of[0]
				changed.Endpoints = append([]lb.Endpoint(nil), changed.Endpoints...)
				changed.Endpoints[0].Ready = !changed.Endpoints[0].Ready
				slices.Set(key, []lb.Slice{changed})
				p.mark(key)
				if _, err := p.step(b.Context()); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
	}
}

func benchKey(i int) lb.Key { return lb.Key{Namespace: "bench", Name: fmt.Sprintf("svc-%05d", i)} }

// loaded returns a proxy with n Services of policy Local, each with a VIP, a health port and two
// endpoints.
func loaded(n int) (*proxy, *kubetest.Table[lb.Key, []lb.Slice]) {
	services, slices, nodes := kubetest.NewTable[lb.Key, lb.Service](), kubetest.NewTable[lb.Key, []lb.Slice](),
		kubetest.NewTable[string, lb.Node]()
	networks := kubetest.NewTable[string, []netip.Prefix]()
	log := slog.New(slog.DiscardHandler)
	p := newProxy("here", settings{drain: 5 * time.Second, masqueradeBit: 14}, []lb.Family{lb.IPv4}, log, time.Now)
	p.from = sources{services: services, slices: slices, nodes: nodes,
		interfaces: func() ([]lb.Interface, bool) { return nil, true },
		update:     func() (lb.FeedUpdate, bool) { return lb.FeedUpdate{}, false }, networks: networks,
		pools: kubetest.NewTable[string, []lb.Range](), routers: kubetest.NewTable[string, lb.Router]()}
	p.to = sinks{
		rules: &confirming{outcomes: map[lb.Key]plan.Outcome{}}, flows: &fakeFlows{applied: map[lb.Key]plan.Service{}},
		health: health.New(health.Deps{Log: log, Now: time.Now}),
		feed:   feed.New(log, "", func() {}, func() time.Duration { return 0 }), rescue: &fakeRescue{},
		warn: func(lb.Service, lb.Reason, string) {}, latency: func(time.Duration) {}, programmed: func(time.Duration) {},
	}
	for i := range n {
		key, low := benchKey(i), [2]byte{byte(i >> 8), byte(i)}
		services.Set(key, lb.Service{
			Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Local, InternalPolicy: lb.Cluster,
			HealthCheckNodePort: uint16(i + 1),
			ClusterIPs:          []netip.Addr{netip.AddrFrom4([4]byte{10, 96, low[0], low[1]})},
			Ports:               []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
			Ingress:             []lb.Ingress{{Addr: netip.AddrFrom4([4]byte{172, 20, low[0], low[1]})}},
		})
		slices.Set(key, []lb.Slice{{
			Service: key, Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}},
			Endpoints: []lb.Endpoint{
				{Addr: netip.AddrFrom4([4]byte{10, 200, low[0], low[1]}), Node: "here", Ready: true, Serving: true},
				{Addr: netip.AddrFrom4([4]byte{10, 201, low[0], low[1]}), Node: "there", Ready: true, Serving: true},
			},
		}})
	}
	for range 2 {
		if _, err := p.step(context.Background()); err != nil {
			panic(err)
		}
	}
	return p, slices
}
