package nftables

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// clusterService is the i-th of many Services with a cluster IP and two backends; version changes
// one of them.
func clusterService(i, backends, version int) plan.Service {
	key := clusterServiceKey(i)
	svc := lb.Service{
		Key: key, Type: lb.ClusterIP, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)})},
		Ports:      []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
	}
	s := lb.Slice{Key: key, Service: key, Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for j := range backends {
		at := netip.AddrFrom4([4]byte{10, byte(j), byte(i >> 8), byte(i)})
		if j == 0 && version > 0 {
			at = netip.AddrFrom4([4]byte{10, byte(200 + version%47), byte(i >> 8), byte(i)})
		}
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: at, Ready: true, Serving: true})
	}
	return plan.New(svc, []lb.Slice{s}, plan.Node{Name: localNode})
}

func clusterServiceKey(i int) lb.Key {
	return lb.Key{Namespace: "default", Name: fmt.Sprint("service-", i)}
}

func BenchmarkRender(b *testing.B) {
	r := newRenderer(lb.IPv4, seedConfig)
	for name, s := range map[string]plan.Service{"2 backends": clusterService(1, 2, 0),
		"100 backends": clusterService(1, 100, 0)} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.service(s.Key, s)
			}
		})
	}
	b.Run("maglev", func(b *testing.B) {
		s := clusterService(1, 2, 0)
		s.Scheduler = plan.Maglev
		b.ReportAllocs()
		for b.Loop() {
			r.service(s.Key, s)
		}
	})
}

// BenchmarkNeeds is what it takes to count what 5,000 Services of a start need, and to render them, which the kernel's
// writer does.
func BenchmarkNeeds(b *testing.B) {
	all := clusterServices(5000)
	b.Run("count", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			for _, s := range all {
				Needs(s)
			}
		}
	})
	r := newRenderer(lb.IPv4, seedConfig)
	b.Run("render", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			for key, s := range all {
				r.service(key, s)
			}
		}
	})
}

var sizes = []int{1000, 10000, 30000}

// One Service of many changes one of its backends: what it takes to find out what to write.
func BenchmarkDiff(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			a := benchActor(b, size, fakeKernels())
			t := a.tables[0]
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				i++
				s := clusterService(i%size, 2, i)
				t.set(s.Key, s)
				d := t.newDiff()
				d.service(s.Key, t.applied[s.Key], t.want[s.Key], &t.claims)
				if d.change().empty() {
					b.Fatal("nothing to do")
				}
			}
		})
	}
}

// One Service of many changes one of its backends, until the kernel has confirmed it.
func BenchmarkApply(b *testing.B) {
	for _, change := range []string{"replace", "add and remove"} {
		for _, size := range sizes {
			b.Run(fmt.Sprintf("%s/%d", change, size), func(b *testing.B) {
				ns := nstest.New(b)
				n := dial(b, ns)
				a := benchActor(b, size, map[lb.Family]kernel{lb.IPv4: netlinkKernel{family: lb.IPv4, socket: n.commands}})
				var took []time.Duration
				i := 0
				b.ReportAllocs()
				for b.Loop() {
					i++
					s := clusterService(i*7919%size, 2, i)
					if change != "replace" {
						s = clusterService((i-1)/2*7919%size, 2+i%2, 0)
					}
					started := time.Now()
					a.Set(map[lb.Key]plan.Service{s.Key: s})
					if st, err := a.Apply(b.Context(), false); err != nil || st.Transactions != 1 {
						b.Fatalf("%+v, %v", st, err)
					}
					a.Outcomes()
					took = append(took, time.Since(started))
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
				b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
			})
		}
	}
}

// BenchmarkTimeouts is what it takes when one of 5,000 Services gets another timeout of session affinity: one of two by
// turns, one and none, and one that no Service has had so far.
func BenchmarkTimeouts(b *testing.B) {
	for _, change := range []string{"10 or 11 s", "off or on", "ever another"} {
		b.Run(change, func(b *testing.B) {
			n := dial(b, nstest.New(b))
			a := benchActor(b, 5000, map[lb.Family]kernel{lb.IPv4: netlinkKernel{family: lb.IPv4, socket: n.commands}})
			seconds := map[string][]int{"10 or 11 s": {10, 11}, "off or on": {0, 10}, "ever another": nil}[change]
			for at := 1; change == "ever another" && at <= day; at++ {
				seconds = append(seconds, int(rounded(uint32(at))))
			}
			seconds = slices.Compact(seconds)
			var took []time.Duration
			for i := 0; b.Loop(); i++ {
				if i%len(seconds) == 0 && change == "ever another" {
					for range 2 { // until none is left
						if _, err := a.Apply(b.Context(), true); err != nil {
							b.Fatal(err)
						}
					}
				}
				s := clusterService(7, 2, 0)
				s.Affinity, s.AffinityTimeout = true, time.Duration(seconds[i%len(seconds)])*time.Second
				started := time.Now()
				a.Set(map[lb.Key]plan.Service{s.Key: s})
				if _, err := a.Apply(b.Context(), false); err != nil {
					b.Fatal(err)
				}
				a.Outcomes()
				took = append(took, time.Since(started))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
		})
	}
}

func benchActor(b *testing.B, size int, kernels map[lb.Family]kernel) *testActor {
	a := newActor(dialect.Deps{}, kernels)
	a.Configure(seedConfig)
	a.Set(clusterServices(size))
	if _, err := a.Apply(b.Context(), false); err != nil {
		b.Fatal(err)
	}
	a.Outcomes()
	return a
}

func clusterServices(size int) map[lb.Key]plan.Service {
	all := make(map[lb.Key]plan.Service, size)
	for i := range size {
		s := clusterService(i, 2, 0)
		all[s.Key] = s
	}
	return all
}

// Everything at once into an empty kernel, and over one that has it already.
func BenchmarkColdStart(b *testing.B) {
	for _, size := range []int{5000, 10000} {
		all := clusterServices(size)
		start := func(b *testing.B, ns *nstest.NS) {
			n := dial(b, ns)
			a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: netlinkKernel{family: lb.IPv4, socket: n.commands}})
			a.Configure(seedConfig)
			a.Set(all)
			if _, err := a.Apply(b.Context(), false); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				ns := nstest.New(b)
				b.StartTimer()
				start(b, ns)
			}
		})
		b.Run(fmt.Sprint(size, "/again"), func(b *testing.B) {
			ns := nstest.New(b)
			start(b, ns)
			b.ReportAllocs()
			for b.Loop() {
				start(b, ns)
			}
			b.ReportMetric(residentMiB(), "MiB-resident")
		})
	}
}

// residentMiB is what the process occupies after a collection.
func residentMiB() float64 {
	runtime.GC()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		var kib float64
		if n, _ := fmt.Sscanf(line, "VmRSS: %f kB", &kib); n == 1 {
			return kib / 1024
		}
	}
	return 0
}
