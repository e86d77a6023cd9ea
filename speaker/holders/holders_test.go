package holders

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
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
	if !maps.EqualFunc(a.has, b.has, holder.ranksAs) ||
		!maps.EqualFunc(a.services, b.services, slices.Equal) || !maps.Equal(a.surplus, b.surplus) {
		t.Fatalf("%s: %v %v, want %v %v", what, a.has, a.services, b.has, b.services)
	}
}

// assigned is the condition that confirms some VIPs.
func assigned(vips ...netip.Addr) lb.Condition {
	var items []string
	for _, vip := range vips {
		items = append(items, vip.String()+lb.FromPool+"lan")
	}
	return lb.Condition{Type: lb.ConditionAssigned, Status: true, Message: strings.Join(items, ", ")}
}

// TestStory has Services come, move, share addresses and go, and the controller confirm some of them, at random. What is known afterwards is
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
				changes[key(n)] = Service{vips, assigned(vips[:r.IntN(len(vips)+1)]...), time.Unix(int64(n/2), 0)}
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
		got, without := s.Step(map[lb.Key]Service{key(n): {VIPs: vips, Created: time.Unix(age, 0)}})
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
		vip := netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
		changes[key(n)] = Service{[]netip.Addr{vip}, assigned(vip), time.Unix(int64(n%1000), 0)}
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
	set := func(n int, condition lb.Condition) {
		s.Step(map[lb.Key]Service{key(n): {[]netip.Addr{vip(1)}, condition, time.Unix(int64(n), 0)}})
	}
	sharing := func(n int, first lb.Key) lb.Condition {
		c := assigned(vip(1))
		c.Message += lb.FormatSharing(fmt.Sprintf(`"k" on %d/TCP`, n), map[netip.Addr]lb.Key{vip(1): first})
		return c
	}
	set(0, assigned(vip(1)))
	for n := 1; n < sharers; n++ {
		set(n, sharing(n, key(0)))
	}
	want := func(what string, first lb.Key) {
		t.Helper()
		for i, joined := range s.Joined(vip(1)) {
			if key := s.Of(vip(1))[i]; joined != (key != first) {
				t.Errorf("%s: %s joined: %v", what, key, joined)
			}
		}
	}
	want("all", key(0))
	if allocations := testing.AllocsPerRun(5, func() { s.Joined(vip(1)) }); allocations > sharers/2 {
		t.Errorf("%.0f allocations to ask again", allocations)
	}
	again := sharing(2, key(0))
	read := testing.AllocsPerRun(5, func() { lb.ReadAssigned(again) })
	if allocations := testing.AllocsPerRun(5, func() { set(2, again) }); allocations > read+10 {
		t.Errorf("%.0f allocations for a Service with the same condition, %.0f to read that", allocations, read)
	}
	set(0, lb.Condition{Type: lb.ConditionAssigned, Reason: lb.ReasonDuplicate})
	set(1, assigned(vip(1)))
	for n := 2; n < sharers; n++ {
		set(n, sharing(n, key(1)))
	}
	want("another is the first", key(1))
}

// A tenant who may write the status of Services fills 2,048 of them, older than all others, with addresses that no pool
// has. Others keep theirs, the youngest too, and one that nobody has confirmed yet is announced while there is room.
func TestContract11MadeUpAddressesComeLast(t *testing.T) {
	var s State
	old, now := time.Unix(1e9, 0), time.Unix(2e9, 0)
	changes := map[lb.Key]Service{}
	addr := netip.MustParseAddr("198.18.0.0")
	for n := range plan.MaxVIPs / lb.MaxAddresses {
		var vips []netip.Addr
		for range lb.MaxAddresses {
			vips, addr = append(vips, addr), addr.Next()
		}
		changes[key(n)] = Service{vips, lb.Condition{}, old}
	}
	if _, without := s.Step(changes); len(without) > 0 || s.Count() != plan.MaxVIPs {
		t.Fatalf("%d of %d are held, %d Services lack some", s.Count(), plan.MaxVIPs, len(without))
	}
	shop := func(name string) lb.Key { return lb.Key{Namespace: "shop", Name: name} }
	s.Step(map[lb.Key]Service{shop("unconfirmed"): {[]netip.Addr{vip(1)}, lb.Condition{}, now}})
	if s.Held(vip(1)) {
		t.Error("the youngest that is not confirmed is held without room")
	}
	touched, without := s.Step(map[lb.Key]Service{shop("web"): {[]netip.Addr{vip(2)}, assigned(vip(2)), now}})
	if !s.Held(vip(2)) || len(without) > 0 || len(touched) != 2 || s.Beyond() != 2 {
		t.Errorf("confirmed and held: %v, without %v; %d touched, %d beyond", s.Held(vip(2)), without, len(touched),
			s.Beyond())
	}
	// A made-up one that shows it too, and says that others hold it, changes nothing.
	liar := changes[key(0)]
	liar.VIPs = append(slices.Clone(liar.VIPs[1:]), vip(2))
	liar.Assigned = lb.Condition{Type: lb.ConditionAssigned, Reason: lb.ReasonDuplicate,
		Message: vip(2).String() + lb.HeldByAnother + "shop/web"}
	s.Step(map[lb.Key]Service{key(0): liar})
	if !s.Held(vip(2)) || s.rank(vip(2), s.Of(vip(2))).key != shop("web") {
		t.Error("it ranks by another Service that shows it")
	}
	s.Step(map[lb.Key]Service{key(0): {}, shop("web"): {}})
	if !s.Held(vip(1)) || s.Beyond() > 0 {
		t.Errorf("with room again: held %v, %d beyond", s.Held(vip(1)), s.Beyond())
	}
	s.Step(map[lb.Key]Service{key(0): changes[key(0)], shop("unconfirmed"): {[]netip.Addr{vip(1)}, assigned(vip(1)), now}})
	if !s.Held(vip(1)) || s.Beyond() != 1 {
		t.Errorf("once it is confirmed: held %v, %d beyond", s.Held(vip(1)), s.Beyond())
	}
}
