package holders

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func vip(n int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}) }

func key(n int) lb.Key { return lb.Key{Namespace: "default", Name: fmt.Sprint("s", n)} }

// wantSame fails the test unless both know the same.
func wantSame(t *testing.T, what string, a, b State) {
	t.Helper()
	if !maps.EqualFunc(a.vips, b.vips, slices.Equal) || !maps.EqualFunc(a.services, b.services, slices.Equal) {
		t.Fatalf("%s: %v %v, want %v %v", what, a.vips, a.services, b.vips, b.services)
	}
}

// TestStory has Services come, move, share addresses and go, at random. What is known afterwards is
// what the last word on each Service says, in whatever order, however often and in however many
// steps it was said.
func TestStory(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		var one, twice State
		last := map[lb.Key][]netip.Addr{}
		for range 40 {
			changes := map[lb.Key][]netip.Addr{}
			for range 1 + r.IntN(3) {
				var vips []netip.Addr
				for range r.IntN(3) {
					if v := vip(r.IntN(5)); !slices.Contains(vips, v) {
						vips = append(vips, v)
					}
				}
				changes[key(r.IntN(6))] = vips
			}
			want := map[netip.Addr]bool{}
			var gone []lb.Key
			for k, vips := range changes {
				for _, v := range slices.Concat(last[k], vips) {
					want[v] = true
				}
				if len(vips) == 0 {
					gone = append(gone, k)
				}
			}
			touched, without := one.Step(changes)
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

		var squashed, reversed State
		squashed.Step(last)
		wantSame(t, fmt.Sprintf("seed %d: in one step", seed), squashed, one)
		for _, k := range slices.Backward(slices.SortedFunc(maps.Keys(last), lb.Key.Compare)) {
			reversed.Step(map[lb.Key][]netip.Addr{k: last[k]})
		}
		wantSame(t, fmt.Sprintf("seed %d: reversed", seed), reversed, one)
		for v, services := range one.services {
			if !slices.IsSortedFunc(services, lb.Key.Compare) || !one.Held(v) {
				t.Fatalf("seed %d: %v on %s", seed, services, v)
			}
		}

		for k := range last {
			last[k] = nil
		}
		one.Step(last)
		if len(one.All())+len(one.Services()) > 0 {
			t.Fatalf("seed %d: something is left of what is gone: %v %v", seed, one.vips, one.services)
		}
	}
}
