package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Whatever the slices hold, ports that are chosen together get what each gets by itself.
func TestPortsAreChosenAsEachByItself(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	at := lb.Place{Node: "here", Zone: "a"}
	shared := 0
	for range 2000 {
		ports := []lb.ServicePort{{Name: "a", Protocol: lb.TCP}, {Name: "b", Protocol: lb.TCP}, {Name: "b", Protocol: lb.UDP}}
		var all []lb.Slice
		for range r.IntN(4) {
			s := lb.Slice{Family: []lb.Family{lb.IPv4, lb.IPv4, lb.IPv6}[r.IntN(3)]}
			for i, p := range ports {
				for times := 1 + (r.IntN(22)-10)/10; times > 0; times-- {
					s.Ports = append(s.Ports, lb.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: uint16(8000 + i + r.IntN(20)/19)})
				}
			}
			for range r.IntN(5) {
				e := lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(6))}), Ready: r.IntN(3) > 0,
					Serving: r.IntN(2) == 0, Terminating: r.IntN(2) == 0, Node: []string{"here", "there"}[r.IntN(2)]}
				if r.IntN(2) == 0 {
					e.ForZones = []string{[]string{"a", "b"}[r.IntN(2)]}
				}
				s.Endpoints = append(s.Endpoints, e)
			}
			all = append(all, s)
		}
		c := newChooser(all, at)
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			for _, p := range ports {
				want := chosen{backends: lb.Choose(all, p.Name, p.Protocol, family, at), serving: allServing(all, p, family)}
				if p.Protocol == lb.TCP {
					want.serving = nil
				}
				if places := c.places[portID{family, p.Name, p.Protocol}]; len(places) > 0 && c.same(places, family) &&
					len(c.first) > 0 {
					shared++
				}
				got := c.port(p, family)
				if got.number != 0 {
					got.backends = lb.Usable{Cluster: listening(got, got.backends.Cluster), Local: listening(got, got.backends.Local)}
					got.number = 0
				}
				if fmt.Sprint(got) != fmt.Sprint(want) ||
					(got.backends.Cluster == nil) != (want.backends.Cluster == nil) || len(got.serving) != len(want.serving) ||
					!reflect.DeepEqual(got.backends, want.backends) {
					t.Fatalf("%+v of %+v: %+v, want %+v", p, all, got, want)
				}
			}
		}
	}
	if shared < 500 {
		t.Errorf("only %d were chosen together", shared)
	}
}

// listening returns backends with the number of their port.
func listening(c chosen, list []lb.Backend) []lb.Backend {
	list = slices.Clone(list)
	for i, b := range list {
		list[i].Addr = Port{Number: c.number}.At(b)
	}
	return list
}

// Ports with the same endpoints share their lists, whatever their numbers.
func TestPortsShareTheirEndpoints(t *testing.T) {
	svc := service(func(s *lb.Service) {
		s.Ports = append(s.Ports, lb.ServicePort{Name: "other", Protocol: lb.TCP, Port: 81})
	})
	endpoints := slice("1 here, 2 there")
	other := endpoints[0].Ports[0]
	other.Name, other.Port = "other", other.Port+1
	endpoints[0].Ports = append(endpoints[0].Ports, other)
	s := New(svc, endpoints, here)
	a, b := s.Ports[0], s.Ports[1]
	if !sameList(a.Backends.Cluster, b.Backends.Cluster) || !sameList(a.Backends.Local, b.Backends.Local) ||
		len(a.Backends.Cluster) != 2 || b.At(b.Backends.Cluster[0]).Port() != other.Port ||
		a.At(a.Backends.Cluster[0]).Port() != other.Port-1 {
		t.Errorf("%+v\n%+v", a, b)
	}
	if s.Equal(New(svc, slice("1 here, 2 there"), here)) {
		t.Error("a plan without the endpoints of one port is the same")
	}
	moved := New(svc, endpoints, here)
	moved.Ports[1].Number++
	if s.Equal(moved) || SameRules(s, moved, lb.IPv4) {
		t.Error("a plan with another number is the same")
	}
	for _, d := range Report(moved, s, nil, Path{}) {
		if d.Ready != 2 { // by the port that stays
			t.Errorf("%+v", d)
		}
	}
	for i := range moved.Ports {
		moved.Ports[i].Number += 2
	}
	for _, d := range Report(moved, s, nil, Path{}) {
		if d.Ready != 0 {
			t.Errorf("at other numbers: %+v", d)
		}
	}
}

// allServing is what serving returns, by definition.
func allServing(endpoints []lb.Slice, port lb.ServicePort, family lb.Family) []netip.AddrPort {
	all := map[netip.AddrPort]bool{}
	for _, slice := range endpoints {
		for _, p := range slice.Ports {
			for _, ep := range slice.Endpoints {
				if slice.Family == family && p.Name == port.Name && p.Protocol == port.Protocol && (ep.Ready || ep.Serving) {
					all[netip.AddrPortFrom(ep.Addr, p.Port)] = true
				}
			}
		}
	}
	return slices.SortedFunc(maps.Keys(all), netip.AddrPort.Compare)
}
