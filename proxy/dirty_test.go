package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// crowd gives a Service so many endpoints that it is large, other ones for each version, and notes it.
func (b *bench) crowd(name string, version byte) {
	s := lb.Slice{Service: key(name), Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for i := range 5000 {
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Node: "there", Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 100 + version, byte(i >> 8), byte(i)})})
	}
	b.slices.Set(key(name), []lb.Slice{s})
	b.markEndpoints(key(name))
}

// weighed gives a Service two endpoints of weights that take a table of the largest size.
func (b *bench) weighed(name string, version byte) {
	s := lb.Slice{Service: key(name), Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}, Weight: 100}
	for i := range byte(2) {
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Node: "there", Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 100 + version, 0, i})})
	}
	b.slices.Set(key(name), []lb.Slice{s})
	b.markEndpoints(key(name))
}

// told runs a step and returns what the writer was told of.
func (b *bench) told() []string {
	b.order = nil
	b.run()
	var told []string
	for _, what := range b.order {
		if strings.HasPrefix(what, "rules ") {
			told = append(told, what)
		}
	}
	slices.Sort(told)
	return told
}

// Contract clause 11: no Service waits for the plans of several large ones, and none of those for
// ever.
func TestContract11LargeServicesComeOneAtATime(t *testing.T) {
	b := newBench(t)
	b.put("small", "172.20.0.1", "10.200.1.1")
	for i, name := range []string{"huge-1", "huge-2", "huge-3"} {
		b.put(name, netip.AddrFrom4([4]byte{172, 20, 0, byte(2 + i)}).String(), "10.200.1.9")
		b.crowd(name, 0)
	}
	b.synced()
	steps := [][]string{b.told()}
	b.rules.confirm()
	steps = append(steps, b.told())
	for i, name := range []string{"huge-3", "huge-1", "huge-2"} { // who has waited longest comes first
		b.clock = b.clock.Add(1)
		b.crowd(name, byte(1+i))
	}
	for i := range 7 { // the small one changes all the time
		b.put("small", "172.20.0.1", netip.AddrFrom4([4]byte{10, 200, 2, byte(1 + i)}).String())
		steps = append(steps, b.told())
	}
	small, both := []string{"rules small"}, func(huge string) []string { return []string{"rules " + huge, "rules small"} }
	want := [][]string{
		{"rules huge-1", "rules huge-2", "rules huge-3", "rules small"}, nil,
		small, both("huge-3"), small, both("huge-1"), small, both("huge-2"), small,
	}
	if diff := cmp.Diff(want, steps); diff != "" {
		t.Errorf("what the writer was told, by step (-want +got):\n%s", diff)
	}
}

// change changes what a Service asks for, and notes it.
func (b *bench) change(name string, how func(*lb.Service)) {
	svc, _ := b.services.Get(key(name))
	how(&svc)
	b.services.Set(key(name), svc)
	b.mark(key(name))
}

// withPorts gives a Service so many ports.
func withPorts(n int) func(*lb.Service) {
	return func(s *lb.Service) {
		s.Ports = nil
		for i := range n {
			s.Ports = append(s.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.TCP, Port: uint16(1 + i)})
		}
	}
}

// withRanges gives a Service so many source ranges.
func withRanges(n int) func(*lb.Service) {
	return func(s *lb.Service) {
		s.SourceRanges = nil
		for i := range n {
			s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)}), 32))
		}
	}
}

// Contract clause 11: whatever a tenant changes of many large Services, another Service's change is in the next write,
// which has one of theirs at most, and all of theirs arrive.
func TestContract11ChangesOfLargeServicesComeOneAtATime(t *testing.T) {
	const many = 16
	nothing, crowded := func(*lb.Service) {}, (*bench).crowd
	affinity := func(s *lb.Service) { s.AffinityTimeout = time.Hour }
	for _, c := range []struct {
		what          string
		large, change func(*lb.Service)
		crowd         func(b *bench, name string, version byte)
	}{
		{"affinity, with many endpoints", nothing, affinity, crowded},
		{"another port, with many endpoints", nothing, func(s *lb.Service) { s.Ports[0].Port = 81 }, crowded},
		{"an annotation, with many endpoints", nothing, func(s *lb.Service) { s.Failover = lb.FailoverPassthrough },
			crowded},
		{"a scheduler, with few endpoints and large tables", nothing, func(s *lb.Service) { s.Scheduler = "mh" },
			(*bench).weighed},
		{"affinity, with many ports", withPorts(1000), affinity, nil},
		{"many ports come", nothing, withPorts(1000), nil},
		{"many ports go", withPorts(1000), withPorts(1), nil},
		{"many source ranges come", nothing, withRanges(5000), nil},
		{"a Service with many ports goes", withPorts(1000), nil, nil},
	} {
		t.Run(c.what, func(t *testing.T) {
			b := newBench(t)
			b.put("small", "172.20.0.1", "10.200.1.1")
			names := make([]string, many)
			for i := range names {
				names[i] = fmt.Sprint("huge-", i)
				b.put(names[i], netip.AddrFrom4([4]byte{172, 20, 1, byte(i)}).String(), "10.200.1.9")
				b.change(names[i], c.large)
				if c.crowd != nil {
					c.crowd(b, names[i], 0)
				}
			}
			b.synced()
			b.confirmed()
			for _, name := range names {
				if c.change == nil {
					b.delete(name)
				} else {
					b.change(name, c.change)
				}
			}
			arrived := map[string]bool{}
			for step := range 2 * many {
				told := b.told()
				if small := slices.Index(told, "rules small"); small >= 0 {
					told = slices.Delete(told, small, small+1)
				} else if step > 0 {
					t.Errorf("step %d: the small one's change is not written, but %q", step, told)
				}
				if len(told) > 1 {
					t.Errorf("step %d: %d large ones are written together", step, len(told))
				}
				for _, what := range told {
					arrived[what] = true
				}
				b.put("small", "172.20.0.1", netip.AddrFrom4([4]byte{10, 200, 2, byte(1 + step)}).String())
			}
			if len(arrived) != many {
				t.Errorf("%d of %d large ones were written", len(arrived), many)
			}
		})
	}
}

// Contract clause 11: the large Services of one namespace, all of which change all the time, do not keep that of
// another one from its turn.
func TestContract11NamespacesOfLargeServicesTakeTurns(t *testing.T) {
	b := newBench(t)
	other := lb.Key{Namespace: "other", Name: "other"}
	var names []string
	for i := range 16 {
		names = append(names, fmt.Sprint("huge-", i))
		b.put(names[i], netip.AddrFrom4([4]byte{172, 20, 0, byte(1 + i)}).String(), "10.200.1.9")
		b.change(names[i], withPorts(1000))
	}
	svc, _ := b.services.Get(key(names[0]))
	svc.Key, svc.UID, svc.Ingress, svc.ClusterIPs = other, "other", nil, []netip.Addr{clusterIP("other")}
	b.services.Set(other, svc)
	b.synced()
	b.confirmed()
	changes := 0
	touch := func(s *lb.Service) { // each time something else
		changes++
		s.AffinityTimeout = time.Duration(changes) * time.Second
	}
	for range 4 {
		for _, name := range names {
			b.change(name, touch)
		}
		touch(&svc)
		b.services.Set(other, svc)
		b.mark(other)
		if both := append(b.told(), b.told()...); !slices.Contains(both, "rules other") || len(both) != 2 {
			t.Errorf("in two steps %q are written", both)
		}
	}
}

// Contract clause 11: a Service that is deleted waits for no large one. Its addresses may soon be another tenant's.
func TestContract11DeletedServicesWaitForNobody(t *testing.T) {
	b := newBench(t)
	for i := range 4 {
		b.put(fmt.Sprint("huge-", i), netip.AddrFrom4([4]byte{172, 20, 0, byte(1 + i)}).String(), "10.200.1.9")
		b.crowd(fmt.Sprint("huge-", i), 0)
	}
	b.synced()
	b.confirmed()
	for i := range 3 {
		b.crowd(fmt.Sprint("huge-", i), 1)
	}
	b.clock = b.clock.Add(time.Second)
	b.services.Delete(key("huge-3")) // its slices go later
	b.mark(key("huge-3"))
	if told := b.told(); !slices.Contains(told, "rules huge-3") {
		t.Errorf("the writer was told of %q", told)
	}
}

// Nobody is told that another Service has a frontend which that one gives up in the same moment: neither while it waits
// for its plan, nor after.
func TestContract10NobodyIsToldOfWhatIsBeingGivenUp(t *testing.T) {
	b := newBench(t)
	b.put("huge", "172.20.0.1", "10.200.1.9")
	b.crowd("huge", 0)
	b.put("small", "172.20.0.2", "10.200.1.1")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.change("huge", func(s *lb.Service) { s.Ingress[0].Addr = netip.MustParseAddr("172.20.0.3") })
	b.put("small", "172.20.0.1", "10.200.1.1")
	b.run()
	b.expectFrontends("huge", "172.20.0.1")
	b.run()
	b.expectFrontends("huge", "172.20.0.3")
	b.expectFrontends("small", "172.20.0.1 172.20.0.2?")
	if len(b.warnings) > 0 {
		t.Errorf("warned: %q", b.warnings)
	}
	b.put("third", "172.20.0.1", "10.200.1.3")
	b.change("huge", func(s *lb.Service) { s.AffinityTimeout = time.Hour })
	b.run()
	b.run()
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "third FrontendInUse here: ") {
		t.Errorf("warned: %q", b.warnings)
	}
}

// Of many Services that ask for a frontend one has it. That it changes hands costs those that lose and get it,
// however many others are refused it: they are told for whose sake one at a time, and let the others go first.
func TestContract11AContestCostsTheWinners(t *testing.T) {
	b := newBench(t)
	b.tellFrontends = 1
	b.put("small", "172.20.0.1", "10.200.1.1")
	for i := range 6 {
		b.list(fmt.Sprint("x", i), b.clock.Add(time.Duration(i)*time.Minute), 80, "198.51.100.7")
	}
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.list("x0", b.clock, 81, "198.51.100.7")
	want := [][]string{{"rules x0", "rules x1"}}
	steps := [][]string{b.told()}
	for i := range 8 {
		b.put("small", "172.20.0.1", netip.AddrFrom4([4]byte{10, 200, 2, byte(1 + i)}).String())
		steps, want = append(steps, b.told()), append(want, []string{"rules small"})
		if i%2 == 1 { // two wait for one step of the other's each
			want[i+1] = []string{"rules small", fmt.Sprint("rules x", 2+i/2)}
		}
	}
	if diff := cmp.Diff(want, steps); diff != "" {
		t.Errorf("what the writer was told, by step (-want +got):\n%s", diff)
	}
	for i := 2; i < 6; i++ {
		said := fmt.Sprint("x", i, " FrontendInUse here: spec.externalIPs: 198.51.100.7:80/tcp is in use by Service default/x")
		if !slices.Contains(b.warnings, said+"0") || !slices.Contains(b.warnings, said+"1") {
			t.Errorf("x%d was told %q", i, b.warnings)
		}
	}
}

// However many Services are refused a frontend, all are soon told who has it now, and large Services whose endpoints
// change all the time do not keep that from them.
func TestContract11AllWhoLoseAContestAreToldSoon(t *testing.T) {
	const losers = 300
	b := newBench(t)
	huge := []string{"huge-1", "huge-2", "huge-3"}
	for i, name := range huge {
		b.put(name, netip.AddrFrom4([4]byte{172, 20, 0, byte(2 + i)}).String(), "10.200.1.9")
		b.crowd(name, 0)
	}
	for i := range 2 + losers {
		b.list(fmt.Sprint("x", i), b.clock.Add(time.Duration(i)*time.Minute), 80, "198.51.100.7")
	}
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.warnings = nil
	b.list("x0", b.clock, 81, "198.51.100.7")
	told, steps := map[string]bool{}, 0
	for ; len(told) < losers && steps < 20; steps++ {
		for _, name := range huge {
			b.crowd(name, byte(1+steps%2))
		}
		b.told()
		for _, said := range b.warnings {
			if name, toWhom, _ := strings.Cut(said, " "); strings.HasSuffix(toWhom, "in use by Service default/x1") {
				told[name] = true
			}
		}
	}
	if steps > 4 {
		t.Errorf("after %d steps, %d of %d know who has it now", steps, len(told), losers)
	}
}

// slowSlices have endpoints that take a while to plan.
type slowSlices struct {
	table[lb.Key, []lb.Slice]
	takes time.Duration
}

func (s slowSlices) Get(key lb.Key) ([]lb.Slice, bool) {
	time.Sleep(s.takes)
	return s.table.Get(key)
}

// A first step with many large Services is no planner that hangs: the speaker would hear nothing more, and withdraw
// all VIPs.
func TestContract11ManyLargePlansAreNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		for i := range 10 {
			b.put(fmt.Sprint("huge-", i), netip.AddrFrom4([4]byte{172, 20, 0, byte(1 + i)}).String(), "10.200.1.9")
		}
		b.synced()
		const takes = 10 * time.Second
		b.from.slices = slowSlices{b.slices, takes}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.runner.Run(ctx) }()
		b.markFacts()
		seconds, longest := 0, time.Duration(0)
		for time.Sleep(time.Second); b.runner.Busy() > 0; time.Sleep(time.Second) {
			seconds, longest = seconds+1, max(longest, b.runner.Busy())
		}
		if seconds < 90 || longest > 2*takes {
			t.Errorf("in %d s, the planner was at one thing for %v, and each Service takes %v", seconds, longest, takes)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// To wait to be told who has a frontend is not to wait for the kernel: a change counts from when it came.
func TestAChangeIsAsOldAsItIs(t *testing.T) {
	early, late := time.Unix(100, 0), time.Unix(200, 0)
	told, real := (*proxy).markTold, (*proxy).markThose
	for _, c := range []struct {
		what        string
		first, then func(*proxy, []lb.Key, time.Time)
		changed     time.Time // zero for one that is only to be told
	}{
		{"a change while it waits to be told", told, real, late},
		{"to be told while a change waits", real, told, early},
		{"two changes", real, real, early},
		{"to be told twice", told, told, time.Time{}},
	} {
		b := newBench(t)
		c.first(b.proxy, []lb.Key{key("web")}, early)
		c.then(b.proxy, []lb.Key{key("web")}, late)
		got, tell := b.dirty[key("web")], b.tell[key("web")]
		if !got.Equal(c.changed) || !tell.IsZero() != c.changed.IsZero() || !tell.IsZero() && !tell.Equal(early) {
			t.Errorf("%s: since %v, to be told since %v", c.what, got, tell)
		}
	}
}
