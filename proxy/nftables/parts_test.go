package nftables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// mixedService is a large Service whose endpoints have different ports, so that its ports share
// nothing.
func mixedService(ports, endpoints, version int) plan.Service {
	s := largeService(ports, endpoints, version)
	for i := range s.Ports {
		s.Ports[i] = numbered(s.Ports[i])
		backends := &s.Ports[i].Backends
		backends.Cluster = slices.Clone(backends.Cluster)
		b := &backends.Cluster[len(backends.Cluster)-1]
		b.Addr = netip.AddrPortFrom(b.Addr.Addr(), b.Addr.Port()+1)
	}
	return s
}

// Contract clause 11: a change of another Service waits for no more than one part of a large one.
func TestContract11OthersGoFirst(t *testing.T) { bothFamilies(t, othersGoFirst) }

func othersGoFirst(t *testing.T, family lb.Family) {
	synctest.Test(t, func(t *testing.T) {
		fake := newFakeKernel(family)
		a := newActor(dialect.Deps{}, map[lb.Family]kernel{family: fake})
		a.Configure(seedConfig)
		a.Set(allInFamily(family, clusterServices(100)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		synctest.Wait()
		// In the middle of each part of the large Service, another one changes.
		asked, waiting, waits, parts := 0, -1, []int{}, 0
		fake.refuse = func(c change) error {
			if len(c.add)+len(c.remove) > maxOperations+maxOperations/2 {
				t.Errorf("a transaction of %d elements", len(c.add)+len(c.remove))
			}
			if slices.ContainsFunc(c.add, func(e entry) bool { return e.to.addr[0] == 10 }) { // the other's endpoint
				waits, waiting = append(waits, waiting), -1
				return nil
			}
			if parts++; waiting >= 0 {
				waiting++
				return nil
			}
			asked, waiting = asked+1, 0
			s := inFamily(family, clusterService(7, 2, asked))
			a.Set(map[lb.Key]plan.Service{s.Key: s})
			return nil
		}
		s := inFamily(family, mixedService(20, 300, 1))
		a.Set(map[lb.Key]plan.Service{s.Key: s})
		synctest.Wait()
		if parts < 4 || len(waits) < parts-1 || slices.Max(waits) > 1 {
			t.Errorf("%d parts, the others waited for %v of them", parts, waits)
		}
		if o := a.Outcomes()[s.Key]; o.Err != nil || len(o.Applied.Ports) != 20 {
			t.Errorf("the large Service: error %v, %d ports", o.Err, len(o.Applied.Ports))
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Contract clause 11: of several large Services that change at once, another one waits for one, though each
// fits into a transaction; and what became of it is told before the next.
func TestContract11OthersWaitForOneLargeService(t *testing.T) {
	bothFamilies(t, othersWaitForOneLargeService)
}

func othersWaitForOneLargeService(t *testing.T, family lb.Family) {
	synctest.Test(t, func(t *testing.T) {
		fake := newFakeKernel(family)
		a := newActor(dialect.Deps{}, map[lb.Family]kernel{family: fake})
		a.Configure(seedConfig)
		large := func(version int) map[lb.Key]plan.Service {
			all := map[lb.Key]plan.Service{}
			for i := range 8 {
				s := largeService(2, 500, 0)
				s.Key.Name = fmt.Sprint("a-large-one-", i) // all of them come before the other
				backends := slices.Clone(s.Ports[0].Backends.Cluster)
				for j, b := range backends {
					at := netip.AddrFrom4([4]byte{172, byte(16 + version), byte(j >> 8), byte(j)})
					backends[j].Addr = netip.AddrPortFrom(at, b.Addr.Port())
				}
				for j := range s.Ports {
					s.Ports[j].Backends.Cluster = backends
					s.Ports[j].Frontends[0].Addr = netip.AddrFrom4([4]byte{10, 111, 1, byte(i)})
				}
				all[s.Key] = inFamily(family, s)
			}
			return all
		}
		a.Set(allInFamily(family, clusterServices(10)))
		a.Set(large(0))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		synctest.Wait()
		a.Outcomes()
		other := inFamily(family, clusterService(7, 2, 1))
		sent, written, told := 0, -1, -1
		fake.refuse = func(c change) error {
			if slices.ContainsFunc(c.add, func(e entry) bool { return e.to.addr[0] == 10 }) { // the other's endpoint
				written = sent
				return nil
			}
			if _, ok := a.Outcomes()[other.Key]; ok && told < 0 {
				told = sent
			}
			if sent++; sent == 2 {
				a.Set(map[lb.Key]plan.Service{other.Key: other})
			}
			return nil
		}
		a.Set(large(1))
		synctest.Wait()
		if written < 0 || written > 3 || told > written || sent != 8 {
			t.Errorf("written after %d of %d large ones, and told after %d; want after 2", written, sent, told)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Contract clause 5: while a change is written in parts, the rules deliver after each of them.
func TestContract5PartsDeliver(t *testing.T) {
	four := newFakeKernel(lb.IPv4)
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
	a.Configure(seedConfig)
	const ports = 3
	step := func(name string, limit int, s plan.Service) {
		a.table(lb.IPv4).limit = limit
		parts := 0
		check := func() {
			parts++
			w := walkerOver(t, a, four)
			for _, port := range []uint16{1000, 1000 + ports - 1} {
				shares, _ := w.fate(packet{src: netip.MustParseAddrPort("192.168.0.9:4000"),
					dst: netip.AddrPortFrom(addr("10.111.0.1"), port), in: "pod", protocol: tcp})
				if lost := shares["reject"] + shares["drop"] + shares["none"]; lost > 1e-6 {
					t.Errorf("%s: after part %d %.6f of connections to port %d are lost", name, parts, lost, port)
				}
			}
		}
		four.after = check
		a.settle(t, map[lb.Key]plan.Service{{Namespace: "default", Name: "large"}: s})
		if parts < 3 {
			t.Errorf("%s: only %d parts", name, parts)
		}
	}
	scheduled := func(s plan.Service, scheduler plan.Scheduler) plan.Service {
		s.Scheduler = scheduler
		return s
	}
	a.settle(t, map[lb.Key]plan.Service{{Namespace: "default", Name: "large"}: mixedService(ports, 7, 0)})
	step("more endpoints", 10, mixedService(ports, 20, 0))
	step("fewer endpoints", 10, mixedService(ports, 5, 0))
	step("Maglev", 100, scheduled(mixedService(ports, 5, 0), plan.Maglev))
	step("others", 50, scheduled(mixedService(ports, 7, 1), plan.Maglev))
	step("at random", 200, mixedService(ports, 7, 1))
	four.after = nil
	a.settle(t, map[lb.Key]plan.Service{{Namespace: "default", Name: "large"}: {}})
	if n := len(four.state.elements); n != 0 {
		t.Errorf("%d elements are left", n)
	}
}

// What a large Service wants changes while it is written in parts: nothing of what it no longer
// wants stays.
func TestPartsOfWhatIsNoLongerWanted(t *testing.T) {
	four := newFakeKernel(lb.IPv4)
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
	a.Configure(seedConfig)
	a.settle(t, clusterServices(10))
	before := fmt.Sprint(four.state.elements)
	s := mixedService(20, 300, 1)
	four.after = func() {
		four.after = nil
		a.Set(map[lb.Key]plan.Service{s.Key: {}})
	}
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	if after := fmt.Sprint(four.state.elements); after != before {
		t.Errorf("%d elements are left", len(four.state.elements))
	}
}

// walkerOver walks over what a fake kernel holds.
func walkerOver(t *testing.T, a *testActor, k *fakeKernel) *walker {
	w := newWalker(t, *a.table(k.family).rules, nil)
	for e, to := range k.state.elements {
		w.insert(entry{e, to})
	}
	return w
}

// Contract clause 6: whatever changes between the parts of large Services, of others or of their own,
// the kernel ends as after a fresh start, and refuses nothing on the way.
func TestContract6ChangesBetweenParts(t *testing.T) {
	t.Parallel()
	seeds.Run(t, seeds.Of(20, 400), nil, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 2))
		now := map[lb.Key]plan.Service{}
		kernels := fakeKernels()
		a := newActor(dialect.Deps{}, kernels)
		a.Configure(seedConfig)
		change := func() {
			s := randomService(r, r.IntN(6))
			if r.IntN(4) == 0 {
				s = plan.Service{Key: s.Key}
				delete(now, s.Key)
			} else {
				now[s.Key] = s
			}
			a.Set(map[lb.Key]plan.Service{s.Key: s})
		}
		left := 300
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			a.table(family).limit = 1 + r.IntN(12)
			kernels[family].(*fakeKernel).after = func() {
				if left--; left > 0 && r.IntN(4) == 0 {
					change()
				}
			}
		}
		for range 20 {
			change()
			if st, err := a.Apply(t.Context(), false); err != nil || st.Failures > 0 {
				t.Fatalf("%+v, %v", st, err)
			}
		}
		left = 0
		settled(t, a)
		a.trim(t)
		want := fakeActor(fakeKernels())
		want.Configure(seedConfig)
		want.Set(now)
		settled(t, want)
		same(t, want, a)
	})
}

// BenchmarkParts writes Services that need so many times maxOperations, without the kernel.
func BenchmarkParts(b *testing.B) {
	for _, endpoints := range []int{500, 2000, 6000} {
		b.Run(fmt.Sprint(20*endpoints/maxOperations, " parts"), func(b *testing.B) {
			four := newFakeKernel(lb.IPv4)
			a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: discarding{four}})
			a.Configure(seedConfig)
			s := mixedService(20, endpoints, 0)
			b.ReportAllocs()
			for b.Loop() {
				for _, s := range []plan.Service{s, {Key: s.Key}} {
					a.Set(map[lb.Key]plan.Service{s.Key: s})
					if _, err := a.Apply(b.Context(), false); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*40*endpoints), "ns/element")
		})
	}
}

// discarding is a kernel that takes all elements and keeps none.
type discarding struct{ *fakeKernel }

func (k discarding) commit(c change) error {
	if c.rules != nil {
		return k.fakeKernel.commit(c)
	}
	return nil
}
