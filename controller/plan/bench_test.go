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
					assignModel(modelInput{Pools: pools, Services: services})
				}
			})
		}
	}
}

// BenchmarkAssignFull has many Services that wait for a full pool: each must be refused without a
// search.
func BenchmarkAssignFull(b *testing.B) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/24")(w)
	for i := range 10_000 {
		service(fmt.Sprint(i))(w)
	}
	b.ReportAllocs()
	for b.Loop() {
		assignModel(w.input(nil))
	}
}

// BenchmarkChange has one Service go and another come while n others hold addresses.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			pools, services := benchWorld(n, n)
			book := NewBook(Config{}, 0)
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
		assignModel(w.input(nil))
	}
}

// BenchmarkEdit edits a pool, or has another Node, while 20,000 Services hold addresses of one pool
// and one of another.
func BenchmarkEdit(b *testing.B) {
	pools, services := benchWorld(20_000, 20_000)
	other := pools["p"]
	other.Name, other.Ranges = "other",
		[]lb.Range{{From: netip.MustParseAddr("192.0.2.0"), To: netip.MustParseAddr("192.0.2.9")}}
	pools["other"] = other
	for name, edit := range map[string]func(generation int64) map[string]lb.Node{
		"the pool of 20,000": func(g int64) map[string]lb.Node {
			p := pools["p"]
			p.Generation = g
			pools["p"] = p
			return nil
		},
		"the other pool": func(g int64) map[string]lb.Node {
			p := pools["other"]
			p.Generation = g
			pools["other"] = p
			return nil
		},
		"a node": func(g int64) map[string]lb.Node {
			return map[string]lb.Node{"n": {Name: "n", Addresses: []netip.Addr{netip.AddrFrom4([4]byte{198, 51, 100, byte(g)})}}}
		},
	} {
		b.Run(name, func(b *testing.B) {
			book := NewBook(Config{}, len(services))
			book.SetPools(pools, nil)
			for _, s := range services {
				book.Set(s, Pending{}, time.Time{})
			}
			book.Plan(time.Time{})
			generation := pools["p"].Generation
			b.ReportAllocs()
			for b.Loop() {
				generation++
				book.SetPools(pools, edit(generation))
				book.Plan(time.Time{})
			}
		})
	}
}

// BenchmarkShared changes one of n Services that share an address, each with 60 ports: its version
// only, one of its ports, or whether it is there.
func BenchmarkShared(b *testing.B) {
	for _, n := range []int{10, 100, 1_000} {
		many := func(i, from int) lb.Service {
			w := newWorld(Config{})
			service(fmt.Sprint(i), shares("k", 0))(w)
			s := w.services[key(fmt.Sprint(i))]
			s.Created, s.Ports = at(i), nil
			for port := range 60 {
				s.Ports = append(s.Ports, lb.ServicePort{Protocol: lb.TCP, Port: uint16(from + port)})
			}
			return s
		}
		w := newWorld(Config{})
		newPool("p", "10.0.0.0/30")(w)
		book := NewBook(Config{}, n)
		book.SetPools(w.pools, nil)
		for i := range n - 1 {
			s := many(i, 1+60*i)
			book.Set(s, Pending{}, time.Time{})
			d := book.Plan(time.Time{}).Services[s.Key]
			s.Conditions = []lb.Condition{*d.Condition}
			for _, addr := range d.Addresses {
				s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr, Mode: lb.IPModeVIP})
			}
			book.Set(s, Pending{}, time.Time{})
			book.Plan(time.Time{})
		}
		shown := book.Service(key(fmt.Sprint(n / 2)))
		other := shown
		other.Ports = append(other.Ports[:59:59], lb.ServicePort{Protocol: lb.UDP, Port: 1})
		for name, step := range map[string]func(i int){
			"unchanged": func(int) { book.Set(shown, Pending{}, time.Time{}) },
			"a port": func(i int) {
				book.Set([]lb.Service{other, shown}[i%2], Pending{}, time.Time{})
			},
			"joins and leaves": func(i int) {
				if s := many(n, 1); i%2 == 0 {
					s.Ports = []lb.ServicePort{{Protocol: lb.UDP, Port: 53}}
					book.Set(s, Pending{}, time.Time{})
				} else {
					book.Delete(s.Key, time.Time{})
				}
			},
		} {
			b.Run(fmt.Sprintf("services=%d/%s", n, name), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					step(i)
					book.Plan(time.Time{})
				}
			})
		}
	}
}

// BenchmarkSharersWithManyPorts has a Service look for an address to share among those of n others, of which
// none has one of its ports.
func BenchmarkSharersWithManyPorts(b *testing.B) {
	const ports = 16_000
	for _, n := range []int{1, 5, 20} {
		with := func(name string, protocol lb.Protocol) lb.Service {
			w := newWorld(Config{})
			service(name, shares("k", 0))(w)
			s := w.services[key(name)]
			s.Ports = nil
			for port := range uint16(ports) {
				s.Ports = append(s.Ports, lb.ServicePort{Protocol: protocol, Port: port + 1})
			}
			return s
		}
		w := newWorld(Config{})
		newPool("p", "10.0.0.0/24")(w)
		book := NewBook(Config{}, n)
		book.SetPools(w.pools, nil)
		for i := range n {
			s := with(fmt.Sprint(i), lb.UDP)
			s.Ingress = []lb.Ingress{{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}}
			book.Set(s, Pending{}, time.Time{})
		}
		book.Plan(time.Time{})
		joiner := with("joiner", lb.TCP)
		joiner.ExternalPolicy = lb.Local // so that it may join none of them
		b.Run(fmt.Sprint("addresses=", n), func(b *testing.B) {
			for b.Loop() {
				book.Set(joiner, Pending{}, time.Time{})
				book.Plan(time.Time{})
				book.Delete(joiner.Key, time.Time{})
			}
		})
	}
}
