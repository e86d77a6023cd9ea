package nftables

import (
	gocmp "cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// randomService returns a Service in some state. Some share frontends with others.
func randomService(r *rand.Rand, i int) plan.Service {
	key := lb.Key{Namespace: "test", Name: fmt.Sprint("service-", i)}
	svc := lb.Service{
		Key: key, UID: key.Name, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i + 1)})},
		Ports:      []lb.ServicePort{{Name: "a", Protocol: lb.TCP, Port: 80, NodePort: uint16(30000 + i)}},
	}
	pick := func(n int) bool { return r.IntN(n) == 0 }
	if pick(2) {
		svc.ClusterIPs = append(svc.ClusterIPs, netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i+1)))
	}
	if pick(2) {
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: "b", Protocol: lb.UDP, Port: 80,
			NodePort: uint16(30100 + r.IntN(4))})
	}
	if pick(3) {
		svc.ExternalIPs = append(svc.ExternalIPs, netip.AddrFrom4([4]byte{198, 51, 100, byte(r.IntN(4))}))
	}
	if pick(2) {
		svc.Ingress = append(svc.Ingress, lb.Ingress{Addr: netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})})
	}
	if pick(3) {
		svc.ExternalPolicy = lb.Local
	}
	if pick(5) {
		svc.InternalPolicy = lb.Local
	}
	if pick(4) {
		svc.SourceRanges = randomRanges(r)
	}
	var slices []lb.Slice
	for n, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		s := lb.Slice{Key: lb.Key{Namespace: "test", Name: fmt.Sprint(key.Name, n)}, Service: key, Family: family,
			Ports: []lb.SlicePort{
				{Name: "a", Protocol: lb.TCP, Port: 8080}, {Name: "b", Protocol: lb.UDP, Port: uint16(5000 + r.IntN(2))},
			}}
		first := []netip.Addr{addr("192.168.0.1"), addr("fd00:10::1")}[n]
		at := first
		many := r.IntN(7) // more than 6 make schedulers fill some 1,000 slots
		if pick(12) {
			many = 7 + r.IntN(5)
		}
		for range many {
			at = at.Next()
			place := []string{localNode, "there"}[r.IntN(2)]
			s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: at, Node: place, Ready: !pick(6), Serving: true,
				Terminating: pick(6)})
		}
		slices = append(slices, s)
	}
	out := plan.New(svc, slices, plan.Node{Name: localNode})
	if pick(2) {
		out.Sole = out.VIPs
	}
	if pick(4) {
		out.AffinityTimeout = time.Duration(1+r.IntN(3)) * time.Hour
	}
	if pick(25) {
		out.Scheduler = []plan.Scheduler{plan.RoundRobin, plan.SourceHash, plan.Maglev, plan.DestinationHash,
			plan.WeightedRoundRobin, plan.NeverQueue}[r.IntN(6)]
	}
	return out
}

func randomRanges(r *rand.Rand) []netip.Prefix {
	ranges := []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(r.IntN(4)), 0}), 24),
		netip.MustParsePrefix("192.0.0.0/16")}
	return ranges[:1+r.IntN(2)]
}

func randomConfig(r *rand.Rand) plan.Config {
	c := seedConfig
	c.DropInvalid = r.IntN(2) == 0
	c.NodePortAddresses = map[lb.Family][]netip.Addr{lb.IPv4: []netip.Addr{addr("172.31.0.1"),
		addr("172.31.0.4")}[:r.IntN(3)], lb.IPv6: {addr("fd31::1")}}
	return c
}

// story makes random changes, some of them several at once, some twice, and checks now and then
// that the result is that of a fresh start.
func story(t *testing.T, seed uint64, steps int, actor func() *testActor, fresh func() *testActor) {
	r := rand.New(rand.NewPCG(seed, 1))
	a := actor()
	now := map[lb.Key]plan.Service{}
	config := randomConfig(r)
	a.Configure(config)
	for i := range steps {
		changed := map[lb.Key]plan.Service{}
		for range 1 + r.IntN(3) {
			s := randomService(r, r.IntN(20))
			if key := s.Key; r.IntN(4) == 0 {
				delete(now, key)
				changed[key] = plan.Service{}
			} else {
				now[key], changed[key] = s, s
			}
		}
		if r.IntN(20) == 0 {
			config = randomConfig(r)
			a.Configure(config)
		}
		for range 1 + r.IntN(2) {
			a.Set(changed)
		}
		if r.IntN(4) > 0 {
			stats, err := a.Apply(t.Context(), r.IntN(30) == 0)
			if stats.Failures > 0 || stats.Repaired > 0 { // the kernel refuses only what is wrong
				t.Errorf("%+v, %v, and nobody else has changed anything", stats, err)
			}
		}
		if i%(steps/6) == 0 || i == steps-1 {
			settled(t, a)
			a.trim(t)
			want := fresh()
			want.Configure(config)
			want.Set(now)
			settled(t, want)
			same(t, want, a)
		}
		if t.Failed() {
			t.Fatalf("after step %d", i)
		}
		if r.IntN(100) == 0 {
			a = actor() // a restart
			a.Configure(config)
			a.Set(now)
		}
	}
}

// settled applies until there is nothing left to do.
func settled(t *testing.T, a *testActor) {
	t.Helper()
	for range 30 {
		if _, err := a.Apply(t.Context(), false); err == nil {
			return
		}
	}
	_, err := a.Apply(t.Context(), false)
	t.Fatalf("never comes to rest: %v", err)
}

// same compares what the kernels of two actors hold.
func same(t *testing.T, want, got *testActor) {
	t.Helper()
	for i, table := range want.tables {
		a, err := table.kernel.load()
		if err != nil {
			t.Fatal(err)
		}
		b, err := got.tables[i].kernel.load()
		if err != nil {
			t.Fatal(err)
		}
		if reflect.DeepEqual(a, b) {
			continue
		}
		a.elements, b.elements = anyPlace(a.elements), anyPlace(b.elements)
		if d := cmp.Diff(a, b, cmp.AllowUnexported(state{}, element{}, frontend{}, target{}),
			cmpopts.EquateEmpty()); d != "" {
			t.Errorf("%s is not as after a fresh start (-fresh +is):\n%.4000s", table.family, d)
		}
	}
}

// anyPlace returns elements with the backends of each group that are drawn at random in one order: which of
// them has which place depends on what was there before.
func anyPlace(elements map[element]target) map[element]target {
	type list struct {
		frontend
		set   setID
		class uint32
	}
	places, targets, ordered := map[list][]uint32{}, map[list][]target{}, maps.Clone(elements)
	for e, to := range elements {
		if e.set <= setMixedSCTP && e.number < methodNumbers {
			of := list{e.frontend, e.set, e.number / classFactor}
			places[of], targets[of] = append(places[of], e.number), append(targets[of], to)
		}
	}
	for of, numbers := range places {
		slices.Sort(numbers)
		slices.SortFunc(targets[of], func(a, b target) int {
			return gocmp.Or(compareAddresses(a.addr, b.addr), gocmp.Compare(a.port, b.port))
		})
		for i, number := range numbers {
			ordered[element{frontend: of.frontend, set: of.set, number: number}] = targets[of][i]
		}
	}
	return ordered
}

func fakeActor(kernels map[lb.Family]kernel) *testActor {
	return newActor(dialect.Deps{}, kernels)
}

func fakeKernels() map[lb.Family]kernel {
	return map[lb.Family]kernel{lb.IPv4: newFakeKernel(lb.IPv4), lb.IPv6: newFakeKernel(lb.IPv6)}
}

// Contract clause 6.
func TestContract6RandomStoriesEndAsAFreshStart(t *testing.T) {
	t.Parallel()
	// Those that find a start that removes elements of a set that has gone with its rules.
	found := []uint64{6, 9}
	seeds.Run(t, seeds.Of(4, 60), found, func(t *testing.T, seed uint64) {
		kernels := fakeKernels()
		story(t, seed, seeds.Of(150, 300), func() *testActor { return fakeActor(kernels) },
			func() *testActor { return fakeActor(fakeKernels()) })
	})
}

// Contract clause 6, with a real kernel.
func TestContract6RandomStoriesInTheKernel(t *testing.T) {
	seeds.Run(t, seeds.Of(1, 5), nil, func(t *testing.T, seed uint64) {
		ns, other := nstest.New(t), nstest.New(t)
		story(t, seed, seeds.Of(200, 1000), func() *testActor { return newTestActor(t, ns) }, func() *testActor {
			other.Run(t, "nft", "flush", "ruleset")
			return newTestActor(t, other)
		})
	})
}

// Contract clause 1: whatever fails on the way, what is said to be applied is in the kernel, and in
// the end all is as it should be.
func TestContract1RandomFailures(t *testing.T) {
	t.Parallel()
	// One that finds a change that counts a frontend twice which two Services have lost at once.
	found := []uint64{112}
	seeds.Run(t, seeds.Of(4, 60), found, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 2))
		four, six := newFakeKernel(lb.IPv4), newFakeKernel(lb.IPv6)
		a := fakeActor(map[lb.Family]kernel{lb.IPv4: four, lb.IPv6: six})
		config := randomConfig(r)
		a.Configure(config)
		now := map[lb.Key]plan.Service{}
		a.Set(now)
		outcomes := map[lb.Key]plan.Outcome{}
		for range seeds.Of(60, 200) {
			s := randomService(r, r.IntN(20))
			now[s.Key] = s
			a.Set(map[lb.Key]plan.Service{s.Key: s})
			for _, k := range []*fakeKernel{four, six} {
				k.refuse, k.loadErr, k.unanswered = nil, nil, nil
				switch r.IntN(8) {
				case 0:
					k.refuse = poisoned(uint16(30000 + r.IntN(20)))
				case 1:
					k.loadErr = errors.New("no listing")
				case 2:
					k.unanswered = []bool{r.IntN(2) == 0, r.IntN(2) == 0}
				case 3:
					k.wipe()
				case 4:
					k.refuse = func(change) error { return errPoison }
				}
			}
			_, err := a.Apply(t.Context(), r.IntN(3) == 0)
			maps.Copy(outcomes, a.Outcomes())
			if err == nil && r.IntN(4) == 0 {
				_, _ = a.Apply(t.Context(), true)
				maps.Copy(outcomes, a.Outcomes())
				if four.loadErr == nil && six.loadErr == nil {
					confirm(t, a, outcomes, config)
				}
			}
			if t.Failed() {
				t.FailNow()
			}
		}
		for _, k := range []*fakeKernel{four, six} {
			k.refuse, k.loadErr, k.unanswered = nil, nil, nil
		}
		a.tables[0].known, a.tables[1].known = false, false
		settled(t, a)
		a.trim(t)
		want := fakeActor(fakeKernels())
		want.Configure(config)
		want.Set(now)
		settled(t, want)
		same(t, want, a)
		maps.Copy(outcomes, a.Outcomes())
		confirm(t, a, outcomes, config)
	})
}

// confirm checks that the kernels hold what the outcomes say.
func confirm(t *testing.T, a *testActor, outcomes map[lb.Key]plan.Outcome, config plan.Config) {
	t.Helper()
	for _, table := range a.tables {
		st, err := table.kernel.load()
		if err != nil {
			continue
		}
		held := anyPlace(st.elements)
		for key, o := range outcomes {
			s := o.Applied.Only(table.family)
			if applied := table.applied[key]; applied != nil {
				s.Scheduler, s.AffinityTimeout = applied.input.Scheduler, applied.input.AffinityTimeout
			}
			rendered := map[element]target{}
			for _, p := range newRenderer(table.family, config).service(key, s).parts {
				for _, e := range p.entries {
					rendered[e.element] = e.to
				}
			}
			for e, want := range anyPlace(rendered) {
				if to, ok := held[e]; !ok || to != want {
					t.Fatalf("%s is said to be applied, but the kernel has %v, %v for %+v", key, to, ok, e)
				}
			}
		}
	}
}

// simpleService has a cluster IP and a node port, and so many backends.
func simpleService(i, backends int) plan.Service {
	key := lb.Key{Namespace: "test", Name: fmt.Sprint("service-", i)}
	svc := lb.Service{
		Key: key, UID: key.Name, Type: lb.NodePort, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})},
		Ports:      []lb.ServicePort{{Protocol: lb.TCP, Port: 80, NodePort: uint16(30000 + i)}},
	}
	s := lb.Slice{Key: key, Service: key, Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for j := range backends {
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{192, 168, byte(i), byte(j + 1)}),
			Ready: true})
	}
	return plan.New(svc, []lb.Slice{s}, plan.Node{Name: localNode})
}

// A frontend that two Services want is served for one of them, the same after each start, and the
// other's outcome says so.
func TestContestedFrontend(t *testing.T) {
	for _, order := range [][]int{{1, 2}, {2, 1}} {
		a := fakeActor(fakeKernels())
		a.Configure(WithAddresses(seedConfig, []netip.Addr{addr("172.31.0.1")}))
		services := map[int]plan.Service{1: simpleService(1, 1), 2: simpleService(2, 2)}
		services[2].Ports[0].Frontends[1].Port = 30001 // the other's node port
		for _, i := range order {
			a.Set(map[lb.Key]plan.Service{services[i].Key: services[i]})
			settled(t, a)
		}
		o := a.Outcomes()
		first, second := o[services[1].Key], o[services[2].Key]
		if first.Err != nil || len(first.Applied.Ports[0].Frontends) != 2 {
			t.Errorf("order %v: the one: %+v", order, first)
		}
		if second.Err == nil || len(second.Alone) == 0 || len(second.Applied.Ports[0].Frontends) != 1 {
			t.Errorf("order %v: the other: %+v", order, second)
		}
		at := frontend{addr: addressOf(addr("172.31.0.1")), port: 30001, protocol: tcp}
		var group uint32
		for _, e := range a.tables[0].have.parts[at] {
			group = max(group, e.to.group)
		}
		if got := a.tables[0].have.parts[frontend{group: group}]; len(got) != 1 {
			t.Errorf("order %v: the frontend leads to %v", order, got)
		}
		a.Set(map[lb.Key]plan.Service{services[1].Key: {}})
		settled(t, a)
		if second := a.Outcomes()[services[2].Key]; second.Err != nil || len(second.Applied.Ports[0].Frontends) != 2 {
			t.Errorf("order %v: the heir: %+v", order, second)
		}
	}
}

// Transactions are small, at a cold start too, so that none blocks the kernel for long.
func TestColdStartIsSplit(t *testing.T) {
	kernels := fakeKernels()
	a := fakeActor(kernels)
	a.Configure(seedConfig)
	all := map[lb.Key]plan.Service{}
	for i := range 5000 {
		s := simpleService(i, 2)
		all[s.Key] = s
	}
	a.Set(all)
	settled(t, a)
	four := kernels[lb.IPv4].(*fakeKernel)
	if four.largest > 2*maxOperations || four.commits > 20 {
		t.Errorf("%d transactions, the largest of %d elements", four.commits, four.largest)
	}
	// The same again in another process, and removal.
	before := four.commits
	b := fakeActor(kernels)
	b.Configure(seedConfig)
	b.Set(all)
	settled(t, b)
	if four.commits != before {
		t.Errorf("%d transactions for what is there already", four.commits-before)
	}
	c := fakeActor(kernels)
	c.Configure(seedConfig)
	c.Set(nil)
	settled(t, c)
	if len(four.state.elements) != 0 || four.largest > 2*maxOperations {
		t.Errorf("%d elements left, the largest transaction was of %d", len(four.state.elements), four.largest)
	}
}

// What a predecessor left for Services that are wanted stays until it can be replaced, even when
// the kernel refuses ours.
func TestContract6PredecessorsElementsStayWhileOursAreRefused(t *testing.T) {
	kernels := fakeKernels()
	a := fakeActor(kernels)
	a.Configure(seedConfig)
	s, other := simpleService(1, 2), simpleService(2, 2)
	a.Set(map[lb.Key]plan.Service{s.Key: s, other.Key: other})
	settled(t, a)
	four := kernels[lb.IPv4].(*fakeKernel)
	four.refuse = func(c change) error {
		if slices.ContainsFunc(c.add, func(e entry) bool { return e.set == setBackends }) {
			return errPoison
		}
		return nil
	}
	b := fakeActor(kernels)
	b.Configure(seedConfig)
	now := simpleService(1, 3)
	b.Set(map[lb.Key]plan.Service{now.Key: now})
	if _, err := b.Apply(t.Context(), false); err == nil {
		t.Fatal("no error")
	}
	at := frontend{addr: addressOf(addr("10.96.0.1")), port: 80, protocol: tcp}
	gone := frontend{addr: addressOf(addr("10.96.0.2")), port: 80, protocol: tcp}
	count := map[frontend]int{}
	for e := range four.state.elements {
		count[e.frontend]++
	}
	if count[at] != 2 || count[gone] != 0 { // its group and port
		t.Errorf("%d elements of the Service that is wanted, want 2; %d of the one that is not, want 0", count[at],
			count[gone])
	}
	if _, ok := four.state.elements[element{set: setClusterIPs, frontend: frontend{addr: at.addr}}]; !ok {
		t.Error("its cluster IP is gone")
	}
}
