package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// pick is IPVS' choice written down as the kernel has it (net/netfilter/ipvs/ip_vs_lc.c, _wlc.c, _sed.c
// and _nq.c of Linux 6.18), for connections that are all active.
func pick(s Scheduler, backends []Burden) int {
	least := -1
	overhead := func(i int) int {
		if s == ShortestExpectedDelay || s == NeverQueue {
			return int(backends[i].Open) + 1
		}
		return int(backends[i].Open)
	}
	for i, b := range backends {
		if s == NeverQueue && b.Open == 0 {
			return i
		}
		switch {
		case least < 0:
			least = i
		case s == LeastConnections:
			if overhead(i) < overhead(least) {
				least = i
			}
		case overhead(least)*int(b.Weight) > overhead(i)*int(backends[least].Weight):
			least = i
		}
	}
	return least
}

var countingSchedulers = []Scheduler{LeastConnections, WeightedLeastConnections, ShortestExpectedDelay, NeverQueue}

// One connection after the other, Next gives each backend what IPVS would.
func TestNextIsIPVSChoice(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, s := range countingSchedulers {
		for range 500 {
			backends := make([]Burden, 1+r.IntN(9))
			for i := range backends {
				backends[i] = Burden{Open: uint32(r.IntN(8) * r.IntN(8)), Weight: uint8(1 + r.IntN(5))}
			}
			n := r.IntN(60)
			got, want := s.Next(backends, n), make([]uint32, len(backends))
			after := slices.Clone(backends)
			for range n {
				i := pick(s, after)
				want[i]++
				after[i].Open++
			}
			if !slices.Equal(got, want) {
				t.Fatalf("%s: %d connections over %v: %v, want %v", s, n, backends, got, want)
			}
		}
	}
}

// What IPVS' own documentation and its sources say of each, by hand.
func TestLighter(t *testing.T) {
	for _, tt := range []struct {
		scheduler Scheduler
		backends  []Burden
		want      []uint32 // of the next so many connections
	}{
		{LeastConnections, []Burden{{5, 1}, {0, 1}, {3, 1}}, []uint32{0, 4, 1}},
		{LeastConnections, []Burden{{0, 9}, {0, 1}}, []uint32{2, 2}},
		{LeastConnections, []Burden{{0, 0}, {0, 0}}, []uint32{2, 1}},
		{WeightedLeastConnections, []Burden{{0, 3}, {0, 1}}, []uint32{6, 2}},
		{WeightedLeastConnections, []Burden{{2, 2}, {0, 1}}, []uint32{0, 1}},
		{WeightedLeastConnections, []Burden{{0, 1}, {0, 100}}, []uint32{1, 0}}, // the first without any
		{ShortestExpectedDelay, []Burden{{0, 1}, {0, 100}}, []uint32{0, 1}},
		{ShortestExpectedDelay, []Burden{{0, 1}, {98, 100}, {5, 1}}, []uint32{0, 1, 0}},
		{NeverQueue, []Burden{{0, 1}, {98, 100}}, []uint32{1, 1}},
		{NeverQueue, []Burden{{7, 1}, {7, 2}, {7, 4}}, []uint32{0, 0, 4}},
	} {
		n := 0
		for _, w := range tt.want {
			n += int(w)
		}
		if got := tt.scheduler.Next(tt.backends, n); !slices.Equal(got, tt.want) {
			t.Errorf("%s: of %d over %v: %v, want %v", tt.scheduler, n, tt.backends, got, tt.want)
		}
	}
}

func BenchmarkNext(b *testing.B) {
	for _, n := range []int{3, 100, 8192} {
		b.Run(fmt.Sprintf("%d backends", n), func(b *testing.B) {
			backends := make([]Burden, n)
			for b.Loop() {
				ShortestExpectedDelay.Next(backends, 8191)
			}
		})
	}
}
