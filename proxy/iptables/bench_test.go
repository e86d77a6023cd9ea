package iptables

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// many returns n Services with a VIP and the given number of endpoints each.
func many(n, endpointsEach int) map[lb.Key]plan.Service {
	all := map[lb.Key]plan.Service{}
	for i := range n {
		s := simple(i, endpointsEach)
		all[s.Key] = s
	}
	return all
}

func simple(i, endpointsEach int) plan.Service {
	key := lb.Key{Namespace: "bench", Name: fmt.Sprintf("svc-%05d", i)}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
		Ingress:    []lb.Ingress{{Addr: netip.AddrFrom4([4]byte{172, 20, byte(i >> 8), byte(i)})}},
		Ports:      []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
	}
	on := map[string][]string{}
	for e := range endpointsEach {
		on["there"] = append(on["there"], netip.AddrFrom4([4]byte{192, byte(128 + e), byte(i >> 8), byte(i)}).String())
	}
	return plan.New(svc, endpoints(key, "", lb.TCP, 8080, on), plan.Node{Name: "here"})
}

// BenchmarkChange is one endpoint that comes or goes among many Services, to the kernel's confirmation.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			a := newActor(map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, "nft")}}, seedConfig)
			a.Set(many(n, 4))
			if err := settle(a, false); err != nil {
				b.Fatal(err)
			}
			i := 0
			for b.Loop() {
				a.Set(plans(simple(n/2, 4+i%2)))
				i++
				if err := settle(a, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkVerify compares many Services' rules with the kernel's.
func BenchmarkVerify(b *testing.B) {
	a := newActor(map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, "nft")}}, seedConfig)
	a.Set(many(1000, 4))
	if err := settle(a, false); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := settle(a, true); err != nil {
			b.Fatal(err)
		}
	}
}
