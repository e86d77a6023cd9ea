package path

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// sharing returns an actor that is not run, and the targets of so many Services that share so many pods.
func sharing(services, pods int) (*Actor, map[lb.Key][]plan.Target) {
	a, all := New(Deps{Changed: func() {}}), map[lb.Key][]plan.Target{}
	for i := range services {
		of := make([]plan.Target, pods)
		for j := range of {
			of[j] = plan.Target{Addr: netip.AddrFrom4([4]byte{10, 1, byte(j >> 8), byte(j)}), Pod: true}
		}
		all[lb.Key{Namespace: "default", Name: fmt.Sprint("s", i)}] = of
	}
	a.inbox.Begin(nil)
	replace(a, all, 0)
	return a, all
}

// replace has all Services get another pod in place of one.
func replace(a *Actor, all map[lb.Key][]plan.Target, to byte) {
	changes := map[lb.Key][]plan.Target{}
	for key, targets := range all {
		changes[key] = slices.Clone(targets)
		changes[key][0].Addr = netip.AddrFrom4([4]byte{10, 2, 0, to})
	}
	a.inbox.Update(changes)
	a.track(map[plan.Target]bool{})
}

// Contract clause 11: what it costs to follow the pods of Services grows with these, and not with the square of how
// many share a pod.
func TestContract11ServicesThatSharePods(t *testing.T) {
	a, all := sharing(100_000, 2)
	for i := range 5 {
		replace(a, all, byte(i+1))
	}
	if len(a.entries) != 2 || len(a.of) != 100_000 {
		t.Errorf("%d targets of %d Services", len(a.entries), len(a.of))
	}
	for key := range all {
		all[key] = nil
	}
	a.inbox.Update(all)
	a.track(map[plan.Target]bool{})
	if len(a.entries)+len(a.of) > 0 {
		t.Errorf("%d targets of %d Services are left", len(a.entries), len(a.of))
	}
}

// The Services that are told of a target are those that have it, whatever came before.
func TestTheServicesOfATargetAreTold(t *testing.T) {
	run(t, func(r *rig) {
		name := func(s string) lb.Key { return lb.Key{Namespace: "default", Name: s} }
		for _, addr := range []string{"10.1.0.1", "10.1.0.2"} {
			r.ways[addr] = own
		}
		one, two := targets("10.1.0.1"), targets("10.1.0.2")
		r.Begin(map[lb.Key][]plan.Target{name("a"): slices.Concat(one, two), name("b"): one, name("c"): one})
		r.wait()
		flip := links.Way{Kind: lb.RouteNone}
		expect := func(what string, want ...string) {
			t.Helper()
			r.set(func() {
				r.ways["10.1.0.1"], flip = flip, r.ways["10.1.0.1"]
			})
			r.messages <- []links.RouteChange{{Prefix: netip.MustParsePrefix("10.1.0.0/24")}}
			told := r.wait().Services
			if len(told) == 0 { // it is held for a while before it counts as reached again
				time.Sleep(time.Minute)
				told = r.wait().Services
			}
			var got []string
			for key := range told {
				got = append(got, key.Name)
			}
			if slices.Sort(got); !slices.Equal(got, want) {
				t.Errorf("%s: told %q, want %q", what, got, want)
			}
		}
		expect("at first", "a", "b", "c")
		expect("again", "a", "b", "c")
		r.Update(map[lb.Key][]plan.Target{name("a"): two, name("c"): slices.Concat(one, two)})
		r.wait()
		expect("one has it no more", "b", "c")
		expect("one has it no more, again", "b", "c")
		r.Update(map[lb.Key][]plan.Target{name("b"): nil, name("a"): slices.Concat(two, one)})
		r.wait()
		expect("one is gone, one has it again", "a", "c")
	})
}

// BenchmarkSharedPods replaces one pod of Services that share theirs.
func BenchmarkSharedPods(b *testing.B) {
	for _, services := range []int{1000, 3000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			a, all := sharing(services, 100)
			for i := 0; b.Loop(); i++ {
				replace(a, all, byte(i+1))
			}
		})
	}
}
