package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// rangedService is a Service with source ranges, all of which each version replaces.
func rangedService(ports, ranges, version int) plan.Service {
	key := lb.Key{Namespace: "bench", Name: "ranged"}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{addr("10.112.0.1")}, Ingress: []lb.Ingress{{Addr: addr("172.22.0.1")}},
	}
	s := lb.Slice{Key: key, Service: key, Family: lb.IPv4, Endpoints: []lb.Endpoint{{Addr: addr("172.16.0.1"),
		Ready: true, Serving: true}}}
	for i := range ports {
		name := fmt.Sprint("p", i)
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: name, Protocol: lb.TCP, Port: uint16(1000 + i)})
		s.Ports = append(s.Ports, lb.SlicePort{Name: name, Protocol: lb.TCP, Port: 8080})
	}
	for i := range ranges {
		i += version % 2 * ranges
		svc.SourceRanges = append(svc.SourceRanges,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 12), byte(i >> 4), byte(i << 4)}), 28))
	}
	return plan.New(svc, []lb.Slice{s}, plan.Node{Name: "here"})
}

// Contract clause 11: what source ranges cost grows with the ranges and with the ports, not with
// both at once, also where a Service is written port by port.
func TestContract11PortsShareSourceRanges(t *testing.T) {
	const ports, ranges = 30, 1000
	kernel := newFakeKernel()
	watched := &spy{Kernel: kernel}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: watched}, seedConfig)
	a.families[0].batch = 500
	for version := range 3 {
		watched.writes = nil
		a.Set(plans(rangedService(ports, ranges, version)))
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
		if n := len(watched.writes); n > 3 {
			t.Errorf("version %d took %d calls", version, n)
		}
		rules := 0
		for _, chain := range a.families[0].have.nat {
			rules += len(chain)
		}
		if most := ranges + ports*20 + 200; rules > most {
			t.Errorf("version %d has %d rules, more than %d", version, rules, most)
		}
	}
}

// BenchmarkSourceRanges replaces all source ranges of a Service.
func BenchmarkSourceRanges(b *testing.B) {
	for _, kind := range []string{"nft", "legacy"} {
		for _, size := range []struct{ ports, ranges int }{{2, 1000}, {100, 1000}, {2, 10_000}} {
			b.Run(fmt.Sprintf("%s/%d ports, %d ranges", kind, size.ports, size.ranges), func(b *testing.B) {
				a := newActor(map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, kind)}}, seedConfig)
				if kind == "nft" {
					a.families[0].batch = 500
				}
				a.Set(many(100, 2))
				for i := 0; b.Loop(); i++ {
					a.Set(plans(rangedService(size.ports, size.ranges, i)))
					if err := settle(a, false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// Contract clause 11: VIPs that linger, with sources that the Service had before, cost no list for
// each of them.
func TestContract11ListsOfSourcesAreMergedOnce(t *testing.T) {
	list := func(network string) *plan.Sources {
		return &plan.Sources{Networks: []netip.Prefix{netip.MustParsePrefix(network)}}
	}
	before, now := list("192.0.2.0/24"), list("10.0.0.0/8")
	var ports []plan.Port
	for i := range 3 {
		p := plan.Port{Family: lb.IPv4, Name: fmt.Sprint(i), Protocol: lb.TCP}
		for _, sources := range []*plan.Sources{now, before, now, before, nil} {
			p.Frontends = append(p.Frontends, plan.Frontend{Kind: plan.LoadBalancer, Addr: addr("172.20.0.1"), Port: 80,
				Action: plan.ToCluster, Sources: sources})
		}
		ports = append(ports, p)
	}
	var c contribution
	first := c.sourcesOf(ports[0])
	if !slices.Equal(first.Networks, append(slices.Clone(now.Networks), before.Networks...)) {
		t.Errorf("networks %v", first.Networks)
	}
	for _, p := range ports {
		if c.sourcesOf(p) != first {
			t.Error("a port has a list of its own")
		}
	}
	ports[0].Frontends = ports[0].Frontends[:1]
	if c.sourcesOf(ports[0]) != now {
		t.Error("the only list was copied")
	}
}
