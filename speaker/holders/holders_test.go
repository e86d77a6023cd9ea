package holders

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

func vip(n int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}) }

func key(n int) lb.Key { return lb.Key{Namespace: "default", Name: fmt.Sprint("s", n)} }

// wantSame fails the test unless both know the same.
func wantSame(t *testing.T, what string, a, b State) {
	t.Helper()
	if !maps.EqualFunc(a.has, b.has, Service.equal) ||
		!maps.EqualFunc(a.services, b.services, slices.Equal) || !maps.Equal(a.surplus, b.surplus) {
		t.Fatalf("%s: %v %v, want %v %v", what, a.has, a.services, b.has, b.services)
	}
}

// TestStory has Services come, move, share addresses and go, at random. What is known afterwards is
// what the last word on each Service says, in whatever order, however often and in however many
// steps it was said.
func TestStory(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		limit := int(seed % 6) // 0: as many as there are
		one, twice := State{Limit: limit}, State{Limit: limit}
		last := map[lb.Key]Service{}
		for range 40 {
			changes := map[lb.Key]Service{}
			for range 1 + r.IntN(3) {
				var vips []netip.Addr
				for range r.IntN(3) {
					if v := vip(r.IntN(5)); !slices.Contains(vips, v) {
						vips = append(vips, v)
					}
				}
				n := r.IntN(6)
				changes[key(n)] = Service{vips, time.Unix(int64(n/2), 0)}
			}
			want := map[netip.Addr]bool{}
			var gone []lb.Key
			before := maps.Clone(one.surplus)
			touched, without := one.Step(changes)
			for k, s := range changes {
				for _, v := range slices.Concat(last[k].VIPs, s.VIPs) {
					want[v] = true
				}
				if len(s.VIPs) == 0 || slices.ContainsFunc(s.VIPs, func(v netip.Addr) bool { return one.surplus[v] }) {
					gone = append(gone, k)
				}
			}
			for n := range 5 {
				if v := vip(n); before[v] != one.surplus[v] {
					want[v] = true
				}
			}
			slices.SortFunc(gone, lb.Key.Compare)
			slices.SortFunc(without, lb.Key.Compare)
			if !maps.Equal(touched, want) || !slices.Equal(gone, without) {
				t.Fatalf("seed %d: touched %v and left %v, want %v and %v", seed, touched, without, want, gone)
			}
			twice.Step(changes)
			twice.Step(changes)
			maps.Copy(last, changes)
		}
		wantSame(t, fmt.Sprintf("seed %d: said twice", seed), twice, one)

		squashed, reversed := State{Limit: limit}, State{Limit: limit}
		squashed.Step(last)
		wantSame(t, fmt.Sprintf("seed %d: in one step", seed), squashed, one)
		for _, k := range slices.Backward(slices.SortedFunc(maps.Keys(last), lb.Key.Compare)) {
			reversed.Step(map[lb.Key]Service{k: last[k]})
		}
		wantSame(t, fmt.Sprintf("seed %d: reversed", seed), reversed, one)
		for v, services := range one.services {
			if !slices.IsSortedFunc(services, lb.Key.Compare) || one.Held(v) == one.surplus[v] {
				t.Fatalf("seed %d: %v on %s", seed, services, v)
			}
		}

		if count := len(one.All()); limit > 0 && count != min(limit, len(one.services)) {
			t.Fatalf("seed %d: %d of %d VIPs are held, of at most %d", seed, count, len(one.services), limit)
		}

		for k := range last {
			last[k] = Service{}
		}
		one.Step(last)
		if len(one.All())+len(one.Services()) > 0 {
			t.Fatalf("seed %d: something is left of what is gone: %v %v", seed, one.has, one.services)
		}
	}
}

// TestTheYoungestAreSurplus has more VIPs than the limit: the oldest Services keep theirs, whoever
// comes, and a Service is told of as soon as that changes for it.
func TestTheYoungestAreSurplus(t *testing.T) {
	s := State{Limit: 2}
	step := func(what string, n int, age int64, vips []netip.Addr, surplus map[int][]netip.Addr, touched ...netip.Addr) {
		t.Helper()
		got, without := s.Step(map[lb.Key]Service{key(n): {vips, time.Unix(age, 0)}})
		if sorted := slices.SortedFunc(maps.Keys(got), netip.Addr.Compare); !slices.Equal(sorted, touched) {
			t.Errorf("%s: touched %v, want %v", what, sorted, touched)
		}
		if want := len(vips) == 0 || len(surplus[n]) > 0; slices.Contains(without, key(n)) != want {
			t.Errorf("%s: without its VIPs are %v", what, without)
		}
		total := 0
		for n := range 5 {
			if got := s.Surplus(key(n)); !slices.Equal(got, surplus[n]) {
				t.Errorf("%s: surplus of s%d is %v, want %v", what, n, got, surplus[n])
			}
			total += len(surplus[n])
		}
		if s.Beyond() != total {
			t.Errorf("%s: %d are surplus, want %d", what, s.Beyond(), total)
		}
		if len(s.All()) > 2 {
			t.Errorf("%s: %v are held", what, s.All())
		}
	}
	none := map[int][]netip.Addr{}
	step("one", 1, 10, []netip.Addr{vip(1)}, none, vip(1))
	step("two", 2, 20, []netip.Addr{vip(2)}, none, vip(2))
	step("one too many", 3, 30, []netip.Addr{vip(3)}, map[int][]netip.Addr{3: {vip(3)}}, vip(3))
	step("the same again", 3, 30, []netip.Addr{vip(3)}, map[int][]netip.Addr{3: {vip(3)}}, vip(3))
	step("an address that another shares", 4, 40, []netip.Addr{vip(1), vip(4)},
		map[int][]netip.Addr{3: {vip(3)}, 4: {vip(4)}}, vip(1), vip(4))
	if s.Held(vip(4)) || s.Of(vip(4)) != nil || !slices.Equal(s.VIPs(key(4)), []netip.Addr{vip(1)}) {
		t.Errorf("of s4 are held: %v", s.VIPs(key(4)))
	}
	step("an older one gets an address", 0, 5, []netip.Addr{vip(0)},
		map[int][]netip.Addr{2: {vip(2)}, 3: {vip(3)}, 4: {vip(4)}}, vip(0), vip(2))
	step("it goes", 0, 5, nil, map[int][]netip.Addr{3: {vip(3)}, 4: {vip(4)}}, vip(0), vip(2))
	step("an older one goes", 2, 20, nil, map[int][]netip.Addr{4: {vip(4)}}, vip(2), vip(3))
	step("enough go", 1, 10, nil, map[int][]netip.Addr{4: {vip(4)}}, vip(1))
}

// BenchmarkBeyondTheLimit is what each change of an address costs then.
func BenchmarkBeyondTheLimit(b *testing.B) {
	var s State
	changes := map[lb.Key]Service{}
	for n := range plan.MaxVIPs + 1000 {
		changes[key(n)] = Service{[]netip.Addr{netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})},
			time.Unix(int64(n%1000), 0)}
	}
	s.Step(changes)
	one := changes[key(7)]
	for b.Loop() {
		one.Created = one.Created.Add(time.Second)
		s.Step(map[lb.Key]Service{key(7): one})
	}
}

// A speaker asks who joined whom at each change of one of the Services that share a VIP, such as of its
// endpoints, which a tenant may have flap. That reads no condition again: 1,000 Services with 32 shared VIPs took
// each speaker 6 s each time.
func TestContract11ConditionsAreReadOnce(t *testing.T) {
	const sharers = 50
	var s State
	conditions := map[lb.Key][]lb.Condition{}
	for n := range sharers {
		s.Step(map[lb.Key]Service{key(n): {[]netip.Addr{vip(1)}, time.Unix(int64(n), 0)}})
		message := vip(1).String() + " from pool lan"
		if n > 0 {
			message += lb.FormatSharing(fmt.Sprintf(`"k" on %d/TCP`, n), map[netip.Addr]lb.Key{vip(1): key(0)})
		}
		conditions[key(n)] = []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Message: message}}
	}
	ask := func() []bool { return s.Joined(vip(1), func(key lb.Key) []lb.Condition { return conditions[key] }) }
	want := func(what string, first lb.Key) {
		t.Helper()
		for i, joined := range ask() {
			if key := s.Of(vip(1))[i]; joined != (key != first) {
				t.Errorf("%s: %s joined: %v", what, key, joined)
			}
		}
	}
	want("all", key(0))
	if allocations := testing.AllocsPerRun(5, func() { ask() }); allocations > sharers/2 {
		t.Errorf("%.0f allocations to ask again", allocations)
	}
	conditions[key(1)], conditions[key(0)] = conditions[key(0)],
		[]lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonDuplicate}}
	for n := range sharers {
		if n > 1 {
			message := vip(1).String() + " from pool lan" + lb.FormatSharing(`"k"`, map[netip.Addr]lb.Key{vip(1): key(1)})
			conditions[key(n)] = []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Message: message}}
		}
	}
	want("another is the first", key(1))
	for n := range sharers {
		s.Step(map[lb.Key]Service{key(n): {}})
	}
	if len(s.assigned) > 0 {
		t.Errorf("%d conditions of Services that are gone are kept", len(s.assigned))
	}
}
