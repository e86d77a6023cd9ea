package nftables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// TestContract11AFloodOfClientsKeepsToItsShare checks that the clients of one Service, however many
// finish a handshake, take no more of the memory for session affinity than the Service's share, and
// no other's place.
func TestContract11AFloodOfClientsKeepsToItsShare(t *testing.T) {
	t.Parallel()
	const flood = 1000
	w := cases.WorldOf(lb.IPv6)
	shop, config := three(w, plan.Random, time.Hour, "remote")
	other, _ := three(w, plan.Random, time.Hour, "local", "local2")
	other = other.Only(w.Family)
	other.Key = lb.Key{Namespace: "other", Name: "web"}
	other.Ports = slices.Clone(other.Ports)
	to := netip.MustParseAddr("2001:db8:7::7")
	for i := range other.Ports {
		other.Ports[i].Frontends = []plan.Frontend{{Kind: plan.LoadBalancer, Addr: to, Port: cases.ServicePort,
			Action: plan.ToCluster}}
	}
	r := newRenderer(w.Family, config)
	walk := newWalker(t, newRuleset(w.Family, config, needs{{setRemember, 3600}}), nil,
		r.service(shop.Key, shop.Only(w.Family)), r.service(other.Key, other))
	c := cases.Case{From: "outside", To: "vip"}
	at := func(service netip.Addr, client netip.Addr) packet {
		p := packetOf(w, c)
		p.src, p.dst = netip.AddrPortFrom(client, 40000), netip.AddrPortFrom(service, p.dst.Port())
		return p
	}
	end := func(s plan.Service) netip.AddrPort { return numbered(s.Ports[0]).Backends.Cluster[0].Addr }
	client := netip.MustParseAddr("2001:db8:8::1")
	if shares, _ := walk.fate(at(to, client)); len(shares) != 2 {
		t.Fatalf("a new client ends at %v, want one of two", shares)
	}
	walk.establish(at(to, client), end(other))
	if got := len(walk.sets[stickyMap]); got != 1 {
		t.Fatalf("%d clients are remembered, want one", got)
	}
	attacker := netip.MustParseAddr("2001:db8:9::")
	for range flood {
		attacker = attacker.Next()
		walk.establish(at(w.VIP, attacker), end(shop.Only(w.Family)))
	}
	if got := len(walk.sets[stickyMap]); got < flood*9/10 {
		t.Errorf("%d of %d clients are remembered", got, flood)
	}
	for key := range walk.sets[stickyMap] { // a group has no more places than there are such numbers
		if place := binary.NativeEndian.Uint32([]byte(key[4:])); len(key) != 8 || place/stickyPlaces != 1 {
			t.Fatalf("a client has the place %x, want one of %d", key, stickyPlaces)
		}
	}
	if shares, _ := walk.fate(at(to, client)); shares[end(other).String()] != 1 {
		t.Errorf("a client of another Service ends at %v, want %s", shares, end(other))
	}
	if stickyLimit < 8*stickyShare {
		t.Errorf("the map has room for %d Services", stickyLimit/stickyShare)
	}
}

// TestSchedulerIgnored checks that a Service whose scheduler's tables would be too large is told.
func TestSchedulerIgnored(t *testing.T) {
	service := func(scheduler plan.Scheduler, lists int) plan.Service {
		s := plan.Service{Key: lb.Key{Namespace: "shop", Name: "web"}, Scheduler: scheduler}
		first := netip.MustParseAddr("10.1.0.1")
		for i := range lists {
			second := first.Next()
			s.Ports = append(s.Ports, plan.Port{Family: lb.IPv4, Name: fmt.Sprint("p", i), Protocol: lb.TCP,
				Backends: lb.Usable{Cluster: []lb.Backend{
					{Addr: netip.AddrPortFrom(first, 80)}, {Addr: netip.AddrPortFrom(second, 80)}}},
				Frontends: []plan.Frontend{{Kind: plan.LoadBalancer, Addr: netip.MustParseAddr("192.0.2.1"), Port: uint16(i + 1)}}})
			first = second
		}
		return s
	}
	const most = plan.MaxSlots / 127
	for _, c := range []struct {
		scheduler plan.Scheduler
		lists     int
		want      bool
	}{
		{plan.Maglev, 1, false}, {plan.Maglev, most, false}, {plan.Maglev, most + 1, true}, {plan.SourceHash, most + 1, true},
		{plan.RoundRobin, most + 1, true}, {plan.Random, most + 1, false},
	} {
		if got := SchedulerIgnored(service(c.scheduler, c.lists), plan.Config{}); (got != "") != c.want {
			t.Errorf("%s with %d lists: %q", c.scheduler, c.lists, got)
		}
	}
}

// affineTo returns a Service with session affinity whose one port has these backends.
func affineTo(backends ...string) plan.Service {
	s := plan.Service{Key: lb.Key{Namespace: "shop", Name: "web"}, AffinityTimeout: 3 * time.Hour}
	port := plan.Port{Family: lb.IPv4, Name: "http", Protocol: lb.TCP, Frontends: []plan.Frontend{
		{Kind: plan.LoadBalancer, Addr: addr("192.0.2.1"), Port: 80, Action: plan.ToCluster}}}
	for _, b := range backends {
		port.Backends.Cluster = append(port.Backends.Cluster, lb.Backend{Addr: netip.MustParseAddrPort(b)})
	}
	s.Ports = []plan.Port{port}
	return s
}

// visit returns the first packet that a client sends to affineTo.
func visit(client int) packet {
	from := binary.BigEndian.AppendUint32(nil, 0x0b000000+uint32(client)*7919)
	source, _ := netip.AddrFromSlice(from)
	return packet{src: netip.AddrPortFrom(source, 40000), dst: netip.MustParseAddrPort("192.0.2.1:80"), in: "uplink",
		protocol: tcp}
}

// TestNewBackendsGetClients checks that backends that are new get their share of the clients that
// are new, however many others are remembered, and that these keep their backend.
func TestNewBackendsGetClients(t *testing.T) {
	t.Parallel()
	const fresh = 500
	for _, c := range []struct {
		known int
		least float64 // of what is fair
	}{{1000, 0.99}, {10_000, 0.96}, {seeds.Of(30_000, 100_000), seeds.Of(0.88, 0.65)}} {
		const first = "10.1.0.1:8080"
		old, grown := affineTo(first), affineTo(first, "10.1.0.2:8080", "10.1.0.3:8080")
		r := newRenderer(lb.IPv4, plan.Config{})
		before, after := r.service(old.Key, old), r.service(grown.Key, grown)
		walk := newWalker(t, newRuleset(lb.IPv4, plan.Config{}, neededBy(before)), nil, before)
		for i := range c.known {
			walk.establish(visit(i), netip.MustParseAddrPort(first))
		}
		now := newWalker(t, newRuleset(lb.IPv4, plan.Config{}, neededBy(after)), nil, after)
		now.sets[stickyMap] = walk.sets[stickyMap]
		got := 0.0
		for i := range fresh {
			if shares, _ := now.fate(visit(i)); shares[first] != 1 {
				t.Fatalf("of %d clients one ends at %v, want its backend", c.known, shares)
			}
			shares, _ := now.fate(visit(10_000_000 + i))
			got += 1 - shares[first]
		}
		fair := fresh * 2.0 / 3
		t.Logf("%d clients are remembered: of %d new ones %.0f reach new backends, %.0f is fair", c.known, fresh, got, fair)
		if got < c.least*fair {
			t.Errorf("%d clients are remembered: of %d new ones %.0f reach new backends, want %.0f", c.known, fresh, got,
				c.least*fair)
		}
	}
}

// manyLists returns a Service with session affinity and so many ports, each with backends of its
// own.
func manyLists(ports int) plan.Service {
	s := affineTo()
	s.Ports = nil
	first := addr("10.2.0.1")
	for i := range ports {
		s.Ports = append(s.Ports, plan.Port{Family: lb.IPv4, Name: fmt.Sprint("p", i), Protocol: lb.TCP,
			Backends: lb.Usable{Cluster: []lb.Backend{{Addr: netip.AddrPortFrom(first, 80)}}},
			Frontends: []plan.Frontend{
				{Kind: plan.LoadBalancer, Addr: addr("192.0.2.1"), Port: uint16(1000 + i), Action: plan.ToCluster}}})
		first = first.Next()
	}
	return s
}

// TestContract11ListsShareOneMemory checks that a Service has one share of the memory for session
// affinity, whatever the number of its lists of endpoints.
func TestContract11ListsShareOneMemory(t *testing.T) {
	t.Parallel()
	for _, lists := range []int{1, 2, 3, 40, 500, 5000} {
		s := manyLists(lists)
		out := newRenderer(lb.IPv4, plan.Config{}).service(s.Key, s)
		n, first := places(splitOf(out.memory))
		if total := int(n) * lists; total > stickyShare {
			t.Errorf("%d lists have %d places together, want at most %d", lists, total, stickyShare)
		}
		walk := newWalker(t, newRuleset(lb.IPv4, plan.Config{}, neededBy(out)), nil, out)
		p, end := visit(1), numbered(s.Ports[lists-1]).Backends.Cluster[0].Addr
		p.dst = netip.AddrPortFrom(p.dst.Addr(), uint16(1000+lists-1))
		walk.establish(p, end)
		for key := range walk.sets[stickyMap] {
			if place := binary.NativeEndian.Uint32([]byte(key[4:])); place < first || place >= first+n {
				t.Errorf("%d lists: a client has the place %d, want one of %d from %d on", lists, place, n, first)
			}
		}
		if len(walk.sets[stickyMap]) != 1 {
			t.Errorf("%d lists: %d clients are remembered, want one", lists, len(walk.sets[stickyMap]))
		}
	}
}

// TestAnotherTimeoutWritesWhatItNeeds checks that a timeout that no Service has had changes the
// chains and sets of session affinity and the Service's own elements, without reading the table, and
// that one that a Service has had lately changes the elements alone.
func TestAnotherTimeoutWritesWhatItNeeds(t *testing.T) {
	kernels := fakeKernels()
	k, a := kernels[lb.IPv4].(*fakeKernel), fakeActor(kernels)
	s := affineTo("10.1.0.1:8080", "10.1.0.2:8080")
	a.Configure(plan.Config{})
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	rewritten, writes := map[string]bool{}, 0
	k.refuse = func(c change) error {
		if c.rules != nil {
			writes++
			for _, want := range c.rules.chains {
				if !want.same(c.have.chains[want.name]) {
					rewritten[want.name] = true
				}
			}
		}
		return nil
	}
	loads, had := k.loads, map[time.Duration]bool{s.AffinityTimeout: true}
	for _, timeout := range []time.Duration{time.Minute, time.Hour, 0, time.Hour, 3 * time.Hour, time.Minute} {
		s.AffinityTimeout = timeout
		clear(rewritten)
		writes = 0
		st := a.settle(t, map[lb.Key]plan.Service{s.Key: s})
		if st.Changes > 4 || rewritten["services"] || rewritten["tcp-draw"] {
			t.Errorf("timeout %s: %d elements, chains %v", timeout, st.Changes, rewritten)
		}
		isNew := timeout > 0 && !had[timeout]
		if had[timeout] = true; rewritten[chainRemember] != isNew || (writes > 0) != isNew {
			t.Errorf("timeout %s: chains %v, rules were written %d times", timeout, rewritten, writes)
		}
		if k.loads != loads {
			t.Errorf("timeout %s: the table was read", timeout)
		}
		for e := range k.state.elements {
			if e.set == setRemember && secondsOf(e.number) != timeout {
				t.Errorf("timeout %s: element %+v", timeout, e)
			}
		}
	}
}

// TestContract11NeedsThatChangeAreKept checks that a Service whose timeout, source ranges and forwarding change all the
// time has the rules written once for each, and that the sets that it no longer needs are removed when a verification
// finds that no Service has needed them since the one before: known, and not foreign.
func TestContract11NeedsThatChangeAreKept(t *testing.T) {
	kernels := fakeKernels()
	k, a := kernels[lb.IPv4].(*fakeKernel), fakeActor(kernels)
	a.Configure(plan.Config{})
	writes := 0
	k.refuse = func(c change) error {
		if c.rules != nil {
			writes++
		}
		return nil
	}
	base := affineTo("10.1.0.1:8080", "10.1.0.2:8080")
	with := func(timeout time.Duration, direct bool, networks ...string) plan.Service {
		s := base
		s.AffinityTimeout, s.Ports = timeout, slices.Clone(s.Ports)
		p := &s.Ports[0]
		p.Frontends = slices.Clone(p.Frontends)
		if networks != nil {
			p.Frontends[0].Sources = &plan.Sources{}
		}
		for _, n := range networks {
			p.Frontends[0].Sources.Networks = append(p.Frontends[0].Sources.Networks, netip.MustParsePrefix(n))
		}
		if direct {
			s.Scheduler, s.Direct, p.External = plan.Maglev, true, lb.Cluster
		}
		return s
	}
	none, states := with(0, false), []plan.Service{
		with(10*time.Second, false), with(11*time.Second, false, "10.0.0.0/8"), with(0, true, "10.0.0.0/8", "10.1.0.0/16"),
		with(0, false),
	}
	set := func(s plan.Service) {
		t.Helper()
		a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	}
	verify := func(when string, sets int) {
		t.Helper()
		if st, err := a.Apply(t.Context(), true); err != nil || st.Repaired > 0 || st.Changes > 0 {
			t.Errorf("%s: %+v, %v", when, st, err)
		}
		if got := len(a.table(lb.IPv4).rules.needs); got != sets {
			t.Errorf("%s: %v are there, want %d", when, a.table(lb.IPv4).rules.needs, sets)
		}
		if right, _ := a.table(lb.IPv4).rules.compare(k.state); !right {
			t.Errorf("%s: the kernel has other rules than are known", when)
		}
	}
	for range 50 {
		for _, s := range states {
			set(s)
		}
	}
	if writes != len(states)-1 { // one for each that needs something
		t.Errorf("the rules were written %d times", writes)
	}
	writes = 0
	verify("in use lately", 5)
	set(states[0])
	set(none)
	if verify("one was in use since", 1); writes != 1 {
		t.Errorf("the rules were written %d times to remove four sets", writes)
	}
	if verify("none was in use since", 0); writes != 2 {
		t.Errorf("the rules were written %d times to remove five sets", writes)
	}
	if verify("nothing is left", 0); writes != 2 || len(a.table(lb.IPv4).recent) > 0 {
		t.Errorf("the rules were written %d times, recent are %v", writes, a.table(lb.IPv4).recent)
	}
	// Others remove one that is not needed: that is repaired, with all that was taken for known.
	set(states[0])
	set(none)
	k.state.chains, k.state.sets = maps.Clone(k.state.chains), maps.Clone(k.state.sets)
	delete(k.state.chains, chainRemember)
	if st, err := a.Apply(t.Context(), true); err != nil || st.Repaired != 1 {
		t.Errorf("a chain was gone: %+v, %v", st, err)
	}
	verify("after that", 0)
}

// A failure to remove what is not needed takes nothing from Services.
func TestASetThatCannotBeRemovedHarmsNoService(t *testing.T) {
	kernels := fakeKernels()
	k, a := kernels[lb.IPv4].(*fakeKernel), fakeActor(kernels)
	a.Configure(plan.Config{})
	s := affineTo("10.1.0.1:8080", "10.1.0.2:8080")
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	s.AffinityTimeout = 0
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	a.Outcomes()
	k.refuse = func(c change) error {
		if c.rules != nil {
			return unix.ENOMEM
		}
		return nil
	}
	for range 3 {
		_, _ = a.Apply(t.Context(), true)
	}
	if o := a.Outcomes(); len(o) > 0 || len(a.table(lb.IPv4).applied) != 1 {
		t.Errorf("outcomes %v", o)
	}
	k.refuse = nil
	if a.trim(t); len(a.table(lb.IPv4).rules.needs) > 0 {
		t.Errorf("%v are there", a.table(lb.IPv4).rules.needs)
	}
}

// A timeout's set that no Service needs has no groups: nobody is remembered by it. A client that connects while its
// Service has no session affinity is forgotten, and may get another backend once it has; one that does not connect comes
// back to its backend.
func TestClientsOfWhatIsNotNeeded(t *testing.T) {
	kernels := fakeKernels()
	k, a := kernels[lb.IPv4].(*fakeKernel), fakeActor(kernels)
	a.Configure(plan.Config{})
	s := affineTo("10.1.0.1:8080", "10.1.0.2:8080")
	clients := map[string]string{}
	step := func(timeout time.Duration) *walker {
		s.AffinityTimeout = timeout
		a.settle(t, map[lb.Key]plan.Service{s.Key: s})
		w := walkerOver(t, a, k)
		w.sets[stickyMap] = clients
		w.reset()
		return w
	}
	first := netip.MustParseAddrPort("10.1.0.1:8080")
	w := step(time.Hour)
	for client := range 2 {
		w.establish(visit(client), first)
	}
	if len(clients) != 2 {
		t.Fatalf("%d clients are remembered", len(clients))
	}
	w = step(0)
	if shares, _ := w.fate(visit(0)); len(shares) != 2 {
		t.Errorf("without affinity a client ends at %v", shares)
	}
	w.establish(visit(0), netip.MustParseAddrPort("10.1.0.2:8080"))
	w.establish(visit(2), first)
	if len(clients) != 1 {
		t.Errorf("%d clients are remembered, want the one that has not connected", len(clients))
	}
	w = step(time.Hour)
	for client, backends := range []int{2, 1, 2} {
		if shares, _ := w.fate(visit(client)); len(shares) != backends {
			t.Errorf("with affinity again client %d ends at %v", client, shares)
		}
	}
}

// TestContract11TimeoutsAreFew checks that whatever timeouts tenants set, the rules for them are few,
// and near what was asked for.
func TestContract11TimeoutsAreFew(t *testing.T) {
	memories := map[memory]bool{}
	for seconds := range day + 1 {
		asked := time.Duration(seconds) * time.Second
		for _, groups := range []int{1, 2, 3, 64, 65, 2048, 2049, 1 << 17} {
			m := memoryOf(asked, groups, plan.ManyPlaces)
			if few := memoryOf(asked, groups, plan.FewPlaces); few != 0 {
				memories[few] = true
			}
			if seconds == 0 {
				if m != 0 {
					t.Errorf("without a timeout: %x", m)
				}
				continue
			}
			memories[m] = true
			off, most := max(asked, secondsOf(m))-min(asked, secondsOf(m)), max(asked/12, time.Second/2)
			if groups > 2 {
				most = asked / 2
			}
			if off > most || secondsOf(m) < time.Second || secondsOf(m) > day*time.Second {
				t.Fatalf("%s for %d groups became %s", asked, groups, secondsOf(m))
			}
		}
	}
	if len(memories) > maxMemories {
		t.Errorf("%d memories, want %d at most", len(memories), maxMemories)
	}
	for _, seconds := range []int{1, 10, 20, 45, 60, 90, 100, 120, 300, 600, 1800, 3600, 7200, 10800, 86400} {
		if asked := time.Duration(seconds) * time.Second; secondsOf(memoryOf(asked, 2, plan.ManyPlaces)) != asked {
			t.Errorf("%s became %s", asked, secondsOf(memoryOf(asked, 2, plan.ManyPlaces)))
		}
	}
	if m := memoryOf(1000*time.Hour, 1, plan.ManyPlaces); secondsOf(m) != 24*time.Hour {
		t.Errorf("more than the API takes became %s", secondsOf(m))
	}
}

// TestMemoryNames checks that the name of a set says which memory it is for, and that no other name
// does.
func TestMemoryNames(t *testing.T) {
	for _, groups := range []int{0, 1, 2, 3, 16, 17, 5000, 1 << 17} {
		for _, timeout := range []time.Duration{time.Second, 3 * time.Hour, 24 * time.Hour} {
			m := memoryOf(timeout, groups, plan.ManyPlaces)
			if got, ok := memoryNamed(rememberSet(m)); !ok || got != m || secondsOf(m) != timeout {
				t.Errorf("%s for %d groups: %s stands for %x, %t, want %x", timeout, groups, rememberSet(m), got, ok, m)
			}
		}
	}
	for _, name := range []string{"remember-", "remember-0", "remember-07", "remember-5-", "remember-5-0", "remember-5-3",
		"remember-5-262144", "remember-5-524288", "remember-99999999", "remember-5-8192-1", "affinity", "affinity-90",
		stickyMap} {
		if m, ok := memoryNamed(name); ok {
			t.Errorf("%s stands for %x", name, m)
		}
	}
}
