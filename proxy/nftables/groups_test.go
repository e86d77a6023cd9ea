package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// count returns how many elements a Service brings.
func count(s *service) int {
	n := len(s.shared)
	for _, p := range s.parts {
		n += len(p.entries)
	}
	return n
}

// Contract clause 11: what a Service costs grows with its endpoints and with its frontends, not
// with both at once.
func TestContract11TablesAreShared(t *testing.T) { bothFamilies(t, tablesAreShared) }

func tablesAreShared(t *testing.T, family lb.Family) {
	r := newRenderer(family, seedConfig)
	for _, test := range []struct {
		ports, endpoints, most int
		scheduler              plan.Scheduler
		timeout                time.Duration
	}{
		{200, 500, 500 + 200*2 + 10, plan.Random, 0},
		{200, 500, 2*500 + 200*2 + 10, plan.Random, time.Hour},
		{200, 500, 8191 + 200*2 + 10, plan.Maglev, 0},
		{200, 50, 1021 + 200*2 + 10, plan.SourceHash, 0},
		{1, 5, 127 + 2 + 10, plan.RoundRobin, 0},
	} {
		s := inFamily(family, largeService(test.ports, test.endpoints, 0))
		s.Scheduler, s.AffinityTimeout = test.scheduler, test.timeout
		if n := count(r.service(s.Key, s)); n > test.most {
			t.Errorf("%+v: %d elements", test, n)
		}
	}
	s := inFamily(family, mixedService(200, 500, 0)) // nothing to share
	if n := count(r.service(s.Key, s)); n > 200*500+200*5 {
		t.Errorf("%d elements where the endpoints of each port listen at different numbers", n)
	}
	for name, of := range map[string]struct {
		ports, endpoints int
		scheduler        plan.Scheduler
		timeout          time.Duration
		scheduled, told  bool
	}{
		"large tables":                     {8, 500, plan.Maglev, 0, true, false},
		"smaller tables":                   {60, 500, plan.Maglev, 0, true, false},
		"the smallest tables":              {200, 100, plan.Maglev, 0, true, false},
		"fewer slots than backends":        {200, 500, plan.Maglev, 0, false, true},
		"the same, in turn":                {100, 130, plan.RoundRobin, 0, false, true},
		"remembered":                       {100, 130, plan.Random, time.Hour, false, false},
		"too many to be remembered":        {300, 120, plan.Random, time.Hour, true, true},
		"fewer slots, by the client":       {100, 400, plan.Random, time.Hour, false, true},
		"more lists than there are tables": {600, 2, plan.Maglev, 0, false, true},
	} {
		s := inFamily(family, mixedService(of.ports, of.endpoints, 0))
		s.Scheduler, s.AffinityTimeout = of.scheduler, of.timeout
		out := r.service(s.Key, s)
		slots, reached := 0, map[target]bool{}
		for _, p := range out.parts {
			for _, e := range p.entries {
				if !e.set.isMixed() {
					continue
				}
				if reached[e.to] = true; e.number >= methodNumbers {
					slots++
				}
			}
		}
		if slots > 0 != of.scheduled || slots > plan.MaxSlots || out.refusal != nil {
			t.Errorf("%s: %d slots, refused %v", name, slots, out.refusal)
		}
		if said := SchedulerIgnored(s, plan.Config{}); said != "" != of.told {
			t.Errorf("%s: it says %q", name, said)
		}
		for _, p := range s.Ports {
			for _, b := range p.Backends.Cluster {
				if !reached[target{addr: addressOf(b.Addr.Addr()), port: b.Addr.Port()}] {
					t.Fatalf("%s: nothing leads to %s", name, b.Addr)
				}
			}
		}
	}
}

// What is counted for the bound of a namespace is at least what is written, and not much more.
func TestNeedsAreWhatIsWritten(t *testing.T) {
	for _, s := range []plan.Service{largeService(1, 2, 0), largeService(10, 200, 0), largeService(100, 3, 0)} {
		written := 0
		for _, p := range (renderer{family: lb.IPv4}).service(s.Key, s).parts {
			written += len(p.entries)
		}
		if n := Needs(s); n < written || n > 12*written {
			t.Errorf("%d ports: %d elements are written, %d counted", len(s.Ports), written, n)
		}
	}
	if n := Needs(plan.Service{}); n != 0 {
		t.Errorf("%d elements are counted of nothing", n)
	}
}

// Contract clauses 10 and 11: a Service that is too large says so, keeps what it has, and concerns
// no other. It is not tried in the kernel.
func TestContract11TooLarge(t *testing.T) {
	kernels := fakeKernels()
	a := fakeActor(kernels)
	a.Configure(seedConfig)
	all := clusterServices(3)
	before := mixedService(2, 20, 0)
	all[before.Key] = before
	a.Set(all)
	settled(t, a)
	a.Outcomes()
	four := kernels[lb.IPv4].(*fakeKernel)
	held, commits := len(four.state.elements), four.commits
	s := mixedService(1000, 131, 0) // what the planner takes, and the kernel does not
	for range 3 {
		a.Set(map[lb.Key]plan.Service{s.Key: s})
		if _, err := a.Apply(t.Context(), false); !errors.As(err, new(plan.TooLarge)) {
			t.Errorf("error %v", err)
		}
	}
	o := a.Outcomes()[s.Key]
	if !strings.Contains(fmt.Sprint(o.Err), "131072") || len(o.Alone) != 1 || len(o.Applied.Ports) != 2 {
		t.Errorf("error %v, alone in %v, %d ports applied", o.Err, o.Alone, len(o.Applied.Ports))
	}
	if len(four.state.elements) != held || four.commits != commits {
		t.Errorf("%d elements, before %d; %d transactions", len(four.state.elements), held, four.commits-commits)
	}
	a.Set(map[lb.Key]plan.Service{s.Key: before, clusterService(1, 2, 0).Key: clusterService(1, 3, 0)})
	settled(t, a)
	for key, o := range a.Outcomes() {
		if o.Err != nil {
			t.Errorf("%s: %v", key, o.Err)
		}
	}
}

// Groups keep their numbers over restarts and changes of their lists, and no two have the same.
func TestNumbersOfGroups(t *testing.T) {
	numbers := map[uint32]string{}
	r := newRenderer(lb.IPv4, seedConfig)
	for i := range 100 {
		for version := range 2 {
			s := clusterService(i, 2+version, version)
			for _, p := range r.service(s.Key, s).parts {
				if other, ok := numbers[p.group]; p.group != 0 && ok && other != s.Key.Name {
					t.Errorf("%s and %s have number %d", s.Key.Name, other, p.group)
				} else if p.group != 0 {
					numbers[p.group] = s.Key.Name
				}
			}
		}
	}
	if len(numbers) != 100 {
		t.Errorf("%d numbers for 100 Services, want 100", len(numbers))
	}
	key := lb.Key{Namespace: "a", Name: "b"}
	first := r.number(key, "", "x", map[uint32]bool{})
	r.taken = func(id uint32) bool { return id == first }
	if second := r.number(key, "", "x", map[uint32]bool{}); second == first {
		t.Error("a number that another Service has")
	}
}

// Whatever numbers a predecessor gave: no frontend leads to another Service's backends, not even
// until it is its turn.
func TestNumbersOfAPredecessor(t *testing.T) {
	four := newFakeKernel(lb.IPv4)
	start := func() *testActor {
		a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
		a.Configure(seedConfig)
		return a
	}
	a := start()
	one, two := clusterService(1, 2, 0), clusterService(2, 2, 0)
	a.Set(map[lb.Key]plan.Service{one.Key: one, two.Key: two})
	settled(t, a)
	at := func(s plan.Service) element {
		return element{set: setGroups, frontend: frontend{addr: addressOf(s.Ports[0].Frontends[0].Addr), port: 80,
			protocol: tcp}}
	}
	want := four.state.elements[at(two)]
	four.state.elements[at(two)] = four.state.elements[at(one)]
	refused := 0
	four.refuse = func(c change) error {
		for _, e := range c.add {
			if _, misled := four.state.elements[at(two)]; misled && e.set == setBackends {
				refused++
			}
		}
		return nil
	}
	b := start()
	b.Set(map[lb.Key]plan.Service{one.Key: clusterService(1, 3, 0), two.Key: two})
	settled(t, b)
	if refused > 0 || four.state.elements[at(two)] != want {
		t.Errorf("%d backends were added while a frontend led there; it leads to %v, want %v", refused,
			four.state.elements[at(two)], want)
	}
}

// sameNumber returns two Services whose first groups have the same number, whoever comes first: of the names that
// tenants may choose there are always such. uid says which UID the API server gives one by its name.
func sameNumber(t *testing.T, uid func(name string) string) (one, two plan.Service) {
	t.Helper()
	r, seen := newRenderer(lb.IPv4, seedConfig), map[uint32]int{}
	for i := range 1 << 22 {
		key := clusterServiceKey(i)
		id := r.number(key, uid(key.Name), "cluster /TCP", map[uint32]bool{})
		if first, found := seen[id]; found {
			one, two = clusterService(first, 2, 0), clusterService(i, 2, 0)
			one.UID, two.UID = uid(one.Key.Name), uid(two.Key.Name)
			return one, two
		}
		seen[id] = i
	}
	t.Fatal("no two have the same number")
	return one, two
}

// numberOf returns the number of the only group of a Service.
func numberOf(t *testing.T, s plan.Service) uint32 {
	t.Helper()
	for _, p := range newRenderer(lb.IPv4, seedConfig).service(s.Key, s).parts {
		if p.group != 0 {
			return p.group
		}
	}
	t.Fatalf("%s has no group", s.Key)
	return 0
}

// Contract clause 11: names are what tenants choose, and they do not choose by them whose number their groups have.
func TestContract11NamesAloneGiveNoNumber(t *testing.T) {
	one, two := sameNumber(t, func(string) string { return "" })
	if numberOf(t, one) != numberOf(t, two) {
		t.Fatalf("%s and %s have different numbers without UIDs", one.Key, two.Key)
	}
	one.UID, two.UID = "a", "b"
	if numberOf(t, one) == numberOf(t, two) {
		t.Errorf("%s and %s have the same number", one.Key, two.Key)
	}
}

// Where two groups have one hash, it is the same one after each start that has the next number: nothing changes, and
// nothing is refused.
func TestOneHashOfTwo(t *testing.T) {
	one, two := sameNumber(t, func(name string) string { return "uid of " + name })
	for _, order := range [][2]plan.Service{{one, two}, {two, one}} {
		order[0].Created, order[1].Created = 1, 2
		four := newFakeKernel(lb.IPv4)
		for start := range 16 {
			a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
			a.Configure(seedConfig)
			a.Set(map[lb.Key]plan.Service{order[0].Key: order[0], order[1].Key: order[1]})
			if st := a.settle(t, nil); start > 0 && st.Changes > 0 {
				t.Errorf("%s is older: start %d changes %d elements", order[0].Key, start, st.Changes)
			}
		}
		var led []uint32
		for _, s := range order {
			led = append(led, four.state.elements[element{set: setGroups, frontend: frontend{
				addr: addressOf(s.Ports[0].Frontends[0].Addr), port: 80, protocol: tcp}}].group)
		}
		if want := numberOf(t, order[0]); led[0] != want || led[1] == want || led[1] == 0 {
			t.Errorf("they lead to %v, want the older one to %d, and the other elsewhere", led, want)
		}
	}
}

// Contract clause 11: openings of connections that nobody goes on with are not remembered.
func TestContract11OpeningsAreNotRemembered(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := cases.WorldOf(family)
			s := cases.NewSite(t, w)
			a := newTestActor(t, s.Node)
			service, config := three(w, plan.Random, time.Hour, "local", "remote")
			a.Configure(config)
			a.settle(t, map[lb.Key]plan.Service{service.Key: service})
			outside := s.At["outside"]
			outside.Run(t, "nft", "add table inet half")
			outside.Run(t, "nft", "add chain inet half in { type filter hook input priority 0 ; }")
			outside.Run(t, "nft", "add rule inet half in tcp flags & (syn | ack) == syn | ack counter drop")
			vip := netip.AddrPortFrom(w.VIP, cases.ServicePort)
			if err := s.Reach(t, "outside", vip, cases.Short); err == nil {
				t.Fatal("connected without an answer")
			}
			if out := outside.Run(t, "nft", "list", "table", "inet", "half"); strings.Contains(out, "packets 0") {
				t.Fatalf("no backend has answered: %s", out)
			}
			if known := a.clients(t, family); len(known) > 0 {
				t.Errorf("remembered are %v", known)
			}
			outside.Run(t, "nft", "delete table inet half")
			if err := s.Reach(t, "outside", vip, cases.Long); err != nil {
				t.Fatal(err)
			}
			if known := a.clients(t, family); len(known) != 1 {
				t.Errorf("after a handshake %v are remembered", known)
			}
		})
	}
}

// Contract clause 11: beside a Service with session affinity, 200 frontends and 500 endpoints, a
// change of each of 5,000 others is one transaction of what changes; and so is its own.
func TestContract11AChangeBesideALargeService(t *testing.T) {
	bothFamilies(t, aChangeBesideALargeService)
}

func aChangeBesideALargeService(t *testing.T, family lb.Family) {
	fake := newFakeKernel(family)
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{family: fake})
	a.Configure(seedConfig)
	large := func(version int) plan.Service {
		s := inFamily(family, largeService(200, 500, version))
		s.Affinity, s.AffinityTimeout = true, 3*time.Hour
		return s
	}
	all := allInFamily(family, clusterServices(5000))
	all[large(0).Key] = large(0)
	a.Set(all)
	settled(t, a)
	if len(fake.state.elements) < 5000*4+200+500 {
		t.Fatalf("only %d elements are written", len(fake.state.elements))
	}
	if fake.largest > maxOperations+maxOperations/2 {
		t.Errorf("a transaction of %d elements", fake.largest)
	}
	for i, s := range []plan.Service{inFamily(family, clusterService(7, 2, 1)), large(1),
		inFamily(family, clusterService(4000, 2, 2)), large(2)} {
		fake.largest = 0
		st := a.settle(t, map[lb.Key]plan.Service{s.Key: s})
		// A backend goes and one comes, with affinity or at another place.
		if most := 4; st.Transactions != 1 || fake.largest > most {
			t.Errorf("change %d: %d transactions, the largest of %d elements, want one of %d", i, st.Transactions,
				fake.largest, most)
		}
	}
}

// Contract clause 11: an endpoint that comes or goes changes its own elements, wherever its address stands
// among the others, and a restart finds them right.
func TestContract11OneEndpointIsFewElements(t *testing.T) { bothFamilies(t, oneEndpointIsFewElements) }

func oneEndpointIsFewElements(t *testing.T, family lb.Family) {
	kernels := fakeKernels()
	fake := kernels[family].(*fakeKernel)
	start := func() *testActor {
		a := fakeActor(kernels)
		a.Configure(seedConfig)
		return a
	}
	a := start()
	s := inFamily(family, largeService(3, 400, 0))
	s.AffinityTimeout = time.Hour
	all := s.Ports[0].Backends.Cluster
	set := func(backends []lb.Backend) int {
		t.Helper()
		changed := 0
		fake.refuse = func(c change) error {
			changed += len(c.add) + len(c.remove)
			return nil
		}
		now := s
		now.Ports = slices.Clone(s.Ports)
		for i := range now.Ports {
			now.Ports[i].Backends.Cluster = backends
		}
		a.Set(map[lb.Key]plan.Service{s.Key: now})
		settled(t, a)
		drawn := map[address]bool{}
		for e, to := range fake.state.elements {
			if e.set == setBackends {
				drawn[to.addr] = true
			}
		}
		if len(drawn) != len(backends) {
			t.Errorf("%d backends are drawn, want %d", len(drawn), len(backends))
		}
		return changed
	}
	set(all)
	for _, step := range []struct {
		name     string
		backends []lb.Backend
		most     int
	}{
		{"the first goes", all[1:], 5},
		{"a restart", all[1:], 0},
		{"it comes back", all, 3},
		{"two in the middle go", slices.Concat(all[:100], all[102:]), 10},
		{"one comes and one goes", slices.Concat(all[1:100], all[101:]), 6},
		{"another restart", slices.Concat(all[1:100], all[101:]), 0},
	} {
		if step.most == 0 {
			a = start()
		}
		if n := set(step.backends); n > step.most {
			t.Errorf("%s: %d elements change, want at most %d", step.name, n, step.most)
		}
	}
}

// TestContract11RememberingRefusesNoService checks that a Service that has room only without a memory of the clients of
// ports whose endpoints differ is served without it, and that this is said.
func TestContract11RememberingRefusesNoService(t *testing.T) {
	t.Parallel()
	s := mixedService(400, 80, 0)
	s.AffinityTimeout = time.Hour
	for i := range s.Ports {
		first := s.Ports[i].Frontends[0]
		for n := range byte(9) {
			first.Addr = netip.AddrFrom4([4]byte{192, 0, 2, n})
			s.Ports[i].Frontends = append(s.Ports[i].Frontends, first)
		}
	}
	if out := newRenderer(lb.IPv4, plan.Config{}).service(s.Key, s); out.refusal != nil {
		t.Errorf("refused: %v", out.refusal)
	}
	if said := SchedulerIgnored(s, plan.Config{}); said == "" {
		t.Error("it says nothing")
	}
	for i := range s.Ports { // node ports need room at each address of the node
		port := s.Ports[i].Frontends[:1]
		s.Ports[i].Frontends = append(port, plan.Frontend{Kind: plan.NodePort, Port: uint16(30000 + i)})
	}
	config := plan.Config{NodePortAddresses: map[lb.Family][]netip.Addr{lb.IPv4: {addr("172.31.0.1")}}}
	if said := SchedulerIgnored(s, config); said != "" {
		t.Errorf("at one address of the node it says %q", said)
	}
	for n := range byte(9) {
		config.NodePortAddresses[lb.IPv4] = append(config.NodePortAddresses[lb.IPv4], netip.AddrFrom4([4]byte{10, 9, 0, n}))
	}
	if said := SchedulerIgnored(s, config); said == "" {
		t.Error("it says nothing at ten addresses of the node")
	}
}
