package plan

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A book that follows changes one by one says what a plan of everything says.
func TestABookFollowsChanges(t *testing.T) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newBGPWorld(withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = []int{32, 30, 31}[seed%3] }))
		gold := bgpAd("gold", func(a *lb.BGPAdvertisement) {
			a.ServiceSelectors, a.AggregationLength, a.Prepend = selector("app=s1"), 30, 2
		})
		w.bgp.Advertisements["gold"] = gold
		known := map[netip.Addr]BGPInput{}
		input := func(vip netip.Addr) (BGPInput, bool) { in, ok := known[vip]; return in, ok }
		all := func() (list []BGPInput) {
			for _, in := range known {
				list = append(list, in)
			}
			return list
		}
		book := &BGPBook{}
		book.PlanAll(w.facts, w.bgp, all(), always)
		for step := range 60 {
			dirty := map[netip.Addr]bool{}
			for range 1 + r.IntN(3) {
				vip := netip.AddrFrom4([4]byte{192, 0, 2, byte(r.IntN(14))})
				dirty[vip] = true
				in := heldVIP(vip.String(), fmt.Sprint("s", r.IntN(3)), lb.Cluster, 0)
				switch r.IntN(4) {
				case 0:
					delete(known, vip)
					continue
				case 1:
					in.Holders[0].Delivery.Policy, in.Holders[0].Delivery.LocalServing = lb.Local, r.IntN(2)
					in.Announced, in.Converged, in.Elsewhere = true, r.IntN(2) == 0, r.IntN(2) == 0
				}
				known[vip] = in
			}
			w.bgp.BFDDown = map[string]bool{"tor-1": r.IntN(8) == 0}
			before := book.Sessions()
			planned, changed := book.Plan(w.facts, w.bgp, dirty, input, always)
			want := decideBGP(w.facts, w.bgp, all())
			for name, s := range want.Sessions {
				if !sameSession(book.Sessions()[name], s) {
					t.Fatalf("seed %d step %d: %s hears %v, want %v", seed, step, name, book.Sessions()[name].Routes, s.Routes)
				}
			}
			for vip := range known {
				got, all := book.VIP(vip), want.VIPs[vip]
				if !reflect.DeepEqual(got, all) {
					t.Fatalf("seed %d step %d: %s is %+v, want %+v", seed, step, vip, got, all)
				}
			}
			if len(book.VIPs()) != len(known) || !reflect.DeepEqual(book.Peers(), want.Peers) {
				t.Fatalf("seed %d step %d: %d VIPs, want %d", seed, step, len(book.VIPs()), len(known))
			}
			if same := reflect.ValueOf(before).Pointer() == reflect.ValueOf(book.Sessions()).Pointer(); same == changed {
				t.Fatalf("seed %d step %d: changed is %v and the map is the same: %v", seed, step, changed, same)
			}
			for vip := range dirty {
				if !planned[vip] {
					t.Fatalf("seed %d step %d: %s was not planned", seed, step, vip)
				}
			}
			for p, inside := range book.inside {
				for vip := range inside {
					if !p.Contains(vip) || len(book.VIP(vip).Prefixes) == 0 {
						t.Fatalf("seed %d step %d: %s is in %s", seed, step, vip, p)
					}
				}
			}
			if _, again := book.Plan(w.facts, w.bgp, dirty, input, always); again {
				t.Fatalf("seed %d step %d: the same plan changes something", seed, step)
			}
		}
	}
}

func always(netip.Prefix) bool { return true }

// BenchmarkBookOneChange replans one VIP among 5,000.
func BenchmarkBookOneChange(b *testing.B) {
	w := manyVIPs(5000)
	known := map[netip.Addr]BGPInput{}
	for _, in := range w.vips {
		known[in.VIP] = in
	}
	book := &BGPBook{}
	book.PlanAll(w.facts, w.bgp, w.vips, always)
	one := w.vips[77]
	gone := one
	gone.Holders = []Holder{{Service: one.Holders[0].Service}}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		known[one.VIP] = []BGPInput{gone, one}[i%2]
		if _, changed := book.Plan(w.facts, w.bgp, map[netip.Addr]bool{one.VIP: true},
			func(vip netip.Addr) (BGPInput, bool) { in, ok := known[vip]; return in, ok }, always); !changed {
			b.Fatal("no change")
		}
	}
}
