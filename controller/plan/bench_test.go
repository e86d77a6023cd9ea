package plan

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

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
	for _, n := range []int{100, 1_000, 10_000, 100_000} {
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

// BenchmarkChange has one Service go and another come while n others hold addresses.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			pools, services := benchWorld(n, n)
			book := NewBook(Config{})
			book.SetPools(pools, nil)
			for _, s := range services {
				book.Set(s, Pending{}, time.Time{})
			}
			book.Plan(time.Time{})
			w := newWorld(Config{})
			service("another")(w)
			s := w.services[key("another")]
			b.ReportAllocs()
			for b.Loop() {
				book.Set(s, Pending{}, time.Time{})
				if p := book.Plan(time.Time{}); len(p.Services[s.Key].Addresses) != 1 {
					b.Fatal(p)
				}
				book.Delete(s.Key, time.Time{})
			}
		})
	}
}

// BenchmarkFill gives each of 20,000 new Services an address of a /16.
func BenchmarkFill(b *testing.B) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/16")(w)
	for i := range 20_000 {
		service(fmt.Sprint(i))(w)
	}
	b.ReportAllocs()
	for b.Loop() {
		Assign(w.input(nil))
	}
}
