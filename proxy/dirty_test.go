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

// Where frontends change hands, all who are concerned are planned at once: nobody is refused what
// another gives up in the same moment.
func TestContract1LargeServicesGiveUpAtOnce(t *testing.T) {
	b := newBench(t)
	b.put("huge", "172.20.0.1", "10.200.1.9")
	b.crowd("huge", 0)
	b.put("small", "172.20.0.2", "10.200.1.1")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.put("huge", "172.20.0.3")
	b.crowd("huge", 1)
	b.put("small", "172.20.0.1", "10.200.1.1")
	b.run()
	if len(b.warnings) > 0 {
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
	told, real := (*proxy).markTold, (*proxy).markEndpointsOf
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
		if !got.since.Equal(c.changed) || got.endpoints == c.changed.IsZero() || !tell.IsZero() != c.changed.IsZero() ||
			!tell.IsZero() && !tell.Equal(early) {
			t.Errorf("%s: %+v, to be told since %v", c.what, got, tell)
		}
	}
}
