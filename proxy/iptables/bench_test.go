package iptables

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
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

// deaf is a kernel that takes everything, and keeps what it was last told.
type deaf struct{ last string }

func (*deaf) Save(_ context.Context, read func(io.Reader) error) error {
	return read(strings.NewReader(""))
}

func (k *deaf) Restore(_ context.Context, input string) error {
	k.last = input
	return nil
}

// changer returns an actor that holds n Services, and a function that changes the endpoints of one
// of them.
func changer(tb testing.TB, kernel Kernel, n int) (change func()) {
	a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
	a.families[0].batch = 500
	a.Set(many(n, 2))
	i := 0
	settled := func() {
		if err := settle(a, false); err != nil {
			tb.Fatal(err)
		}
	}
	settled()
	return func() {
		i++
		a.Set(plans(simple(n/2, 2+i%2)))
		settled()
	}
}

// A change costs what it changes: with thirty times as many Services, it takes as many steps and is
// told in the same lines.
func TestAChangeCostsTheSameAmongManyServices(t *testing.T) {
	cost := func(n int) (float64, int) {
		k := &deaf{}
		change := changer(t, k, n)
		allocations := testing.AllocsPerRun(20, change)
		return allocations, strings.Count(k.last, "\n")
	}
	fewAllocations, fewLines := cost(300)
	manyAllocations, manyLines := cost(9000)
	if manyAllocations > 1.2*fewAllocations || manyLines != fewLines {
		t.Errorf("among 9,000 Services %.0f allocations, %d lines; among 300, %.0f and %d", manyAllocations, manyLines,
			fewAllocations, fewLines)
	}
}

// BenchmarkPlan is one endpoint that comes or goes among many Services, without the kernel.
func BenchmarkPlan(b *testing.B) {
	for _, n := range []int{100, 1000, 5000, 30000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			change := changer(b, &deaf{}, n)
			b.ReportAllocs()
			for b.Loop() {
				change()
			}
		})
	}
}

// BenchmarkChange is the same to the kernel's confirmation.
func BenchmarkChange(b *testing.B) {
	for _, kind := range []string{"nft", "legacy"} {
		for _, n := range []int{100, 1000, 5000, 10000} {
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) {
				change := changer(b, nsKernel{b, nstest.New(b), variant(lb.IPv4, kind)}, n)
				for b.Loop() {
					change()
				}
			})
		}
	}
}

// BenchmarkNew is a Service that comes or goes among many.
func BenchmarkNew(b *testing.B) {
	for _, n := range []int{1000, 5000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			a := newActor(map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, "nft")}}, seedConfig)
			a.families[0].batch = 500
			a.Set(many(n, 2))
			if err := settle(a, false); err != nil {
				b.Fatal(err)
			}
			s := simple(n, 2)
			for i := 0; b.Loop(); i++ {
				a.Set(map[lb.Key]plan.Service{s.Key: []plan.Service{s, {Key: s.Key}}[i%2]})
				if err := settle(a, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkStart writes all rules to an empty kernel.
func BenchmarkStart(b *testing.B) {
	for _, kind := range []string{"nft", "legacy"} {
		for _, n := range []int{1000, 5000, 10000} {
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) {
				all := many(n, 2)
				for b.Loop() {
					b.StopTimer()
					a := newActor(map[lb.Family]Kernel{lb.IPv4: nsKernel{b, nstest.New(b), variant(lb.IPv4, kind)}}, seedConfig)
					if kind == "nft" {
						a.families[0].batch = 500
					}
					a.Set(all)
					b.StartTimer()
					if err := settle(a, false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
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
