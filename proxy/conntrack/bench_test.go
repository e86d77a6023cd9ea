package conntrack

import (
	"fmt"
	"net/netip"
	"testing"

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
