package plan

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// benchWorld has n Services and one pool of a /16, all of whose holders hold the lowest addresses.
func benchWorld(n, holders int) (map[string]lb.Pool, map[lb.Key]lb.Service) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/15")(w)
	addr := netip.MustParseAddr("10.0.0.0")
	for i := range n {
		if i < holders {
			service(fmt.Sprint(i), holds(addr.String()))(w)
			addr = addr.Next()
		} else {
			service(fmt.Sprint(i))(w)
		}
	}
	return w.pools, w.services
}

func BenchmarkAssign(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000} {
		for name, holders := range map[string]int{"all-hold": n, "one-new": n - 1, "all-new": 0} {
			b.Run(fmt.Sprintf("services=%d/%s", n, name), func(b *testing.B) {
				pools, services := benchWorld(n, holders)
				b.ReportAllocs()
				for b.Loop() {
					Assign(Input{Pools: pools, Services: services})
				}
			})
		}
	}
}

// BenchmarkAssignFull has many Services that wait for a full pool: each must be refused without a search.
func BenchmarkAssignFull(b *testing.B) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/24")(w)
	for i := range 10_000 {
		service(fmt.Sprint(i))(w)
	}
	b.ReportAllocs()
	for b.Loop() {
		Assign(w.input(nil))
	}
}
