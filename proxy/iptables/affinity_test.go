package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Session affinity with real packets: a client stays with its backend for as long as that is
// usable, or until the time is over.
func TestSessionAffinity(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := cases.WorldOf(family)
			s := cases.NewSite(t, w)
			kernel := nsKernel{t, s.Node, variant(family, "nft")}
			a := newActor(map[lb.Family]Kernel{family: kernel}, seedConfig)
			program := func(timeout time.Duration, backends []cases.Backend) {
				t.Helper()
				c := cases.Case{Backends: backends, Service: func(_ cases.World, s *lb.Service) { s.AffinityTimeout = timeout }}
				service, config := c.Plan(w)
				a.Configure(config)
				a.Set(plans(service))
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				if input, err := repair(a, family); err != nil || input != "" {
					t.Errorf("what was written reads back otherwise: %v\n%s", err, input)
				}
			}
			ask := func(c cases.Case) string {
				t.Helper()
				got, _, err := s.Ask(c, cases.Long)
				if err != nil {
					t.Fatal(err)
				}
				return got
			}
			vip, cluster := cases.Case{From: "outside", To: "vip"}, cases.Case{From: "outside", To: "cluster"}
			here, there := cases.Backend{At: "local", Ready: true, Serving: true},
				cases.Backend{At: "remote", Ready: true, Serving: true}
			bothReady := []cases.Backend{here, there}
			program(time.Hour, bothReady)
			first := ask(vip)
			for range 12 {
				for _, c := range []cases.Case{vip, cluster} { // the client has one backend at all frontends of the port
					if got := ask(c); got != first {
						t.Fatalf("%s at %s, then %s", first, c.To, got)
					}
				}
			}
			other := bothReady[1:]
			if strings.HasPrefix(first, w.Remote.String()) || strings.HasPrefix(first, "["+w.Remote.String()) {
				other = bothReady[:1]
			}
			program(time.Hour, other) // its backend is gone
			moved := ask(vip)
			if moved == first {
				t.Fatalf("still at %s, which is gone", first)
			}
			program(time.Hour, bothReady) // its first backend is back, and forgotten
			for range 12 {
				if got := ask(vip); got != moved {
					t.Fatalf("%s, then %s", moved, got)
				}
			}
			program(time.Second, bothReady)
			for range 30 { // each time that it is forgotten there is an even chance that it comes elsewhere
				time.Sleep(1100 * time.Millisecond)
				if ask(vip) != moved {
					return
				}
			}
			t.Errorf("at %s long after the time is over", moved)
		})
	}
}

// A client has one pod at all ports of a Service, over whichever it comes first, as long as they have
// the same endpoints.
func TestSessionAffinityIsOfTheService(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, kind := range []string{"nft", "legacy"} {
			t.Run(string(family)+" "+kind, func(t *testing.T) {
				w := cases.WorldOf(family)
				s := cases.NewSite(t, w)
				kernel := nsKernel{t, s.Node, variant(family, kind)}
				a := newActor(map[lb.Family]Kernel{family: kernel}, seedConfig)
				program := func(timeout time.Duration) {
					t.Helper()
					c := cases.Case{Service: func(_ cases.World, s *lb.Service) { s.AffinityTimeout = timeout }}
					service, config := c.Plan(w)
					a.Configure(config)
					a.Set(plans(service))
					if err := settle(a, false); err != nil {
						t.Fatal(err)
					}
				}
				for i := range 12 { // each time without a common memory there is an even chance of another pod
					program(0) // which forgets all clients
					program(time.Hour)
					ask := func(to string, protocol lb.Protocol) netip.Addr {
						t.Helper()
						got, _, err := s.Ask(cases.Case{From: "outside", To: to, Protocol: protocol}, cases.Long)
						if err != nil {
							t.Fatal(err)
						}
						return netip.MustParseAddrPort(got).Addr()
					}
					protocols := []lb.Protocol{lb.TCP, lb.UDP}
					first, then := protocols[i%2], protocols[(i+1)%2]
					pod := ask("vip", first)
					for _, to := range []string{"vip", "cluster"} {
						if got := ask(to, then); got != pod {
							t.Fatalf("%s at the port of %s, then %s at that of %s at %s", pod, first, got, then, to)
						}
					}
				}
			})
		}
	}
}

// Ports share their lists of clients while their endpoints have the same addresses, one endpoint each.
func TestPortsShareTheirMemory(t *testing.T) {
	endpoints := func(all ...string) (backends []lb.Backend) {
		for _, one := range all {
			backends = append(backends, lb.Backend{Addr: netip.MustParseAddrPort(one)})
		}
		return backends
	}
	service := plan.Service{Key: lb.Key{Namespace: "n", Name: "s"}, AffinityTimeout: time.Hour}
	for name, cluster := range map[string][]lb.Backend{
		"1 first":   endpoints("10.0.0.1:80", "10.0.0.2:80"),
		"2 same":    endpoints("10.0.0.1:443", "10.0.0.2:8443"),
		"3 more":    endpoints("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"),
		"4 twice":   endpoints("10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"),
		"5 as 4":    endpoints("10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80"),
		"6 as 3":    endpoints("10.0.0.1:53", "10.0.0.2:53", "10.0.0.3:53"),
		"7 without": nil,
	} {
		service.Ports = append(service.Ports, plan.Port{Family: lb.IPv4, Name: name, Protocol: lb.TCP,
			Backends: lb.Usable{Cluster: cluster}})
	}
	slices.SortFunc(service.Ports, func(a, b plan.Port) int { return strings.Compare(a.Name, b.Name) })
	turned := service
	turned.Ports = slices.Clone(service.Ports)
	slices.Reverse(turned.Ports)
	names := (renderer{family: lb.IPv4}).memories(turned)
	slices.Reverse(names)
	if straight := (renderer{family: lb.IPv4}).memories(service); !slices.Equal(names, straight) {
		t.Errorf("ports in another order have other lists: %v, %v", names, straight)
	}
	numbers, got := map[string]int{}, ""
	for i, m := range (renderer{family: lb.IPv4}).memories(service) {
		for _, b := range service.Ports[i].Backends.Cluster {
			list := m.list(b.Addr)
			if numbers[list] == 0 {
				numbers[list] = len(numbers) + 1
			}
			got += fmt.Sprintf("%d ", numbers[list])
		}
		got += "| "
	}
	if want := "1 2 | 1 2 | 3 4 5 | 6 7 8 | 9 10 11 | 3 4 5 | | "; got != want {
		t.Errorf("lists %s, want %s", got, want)
	}
}

// A port whose memory becomes another one's is rendered again.
func TestPortsThatShareTheirMemoryNow(t *testing.T) {
	r := renderer{seedConfig, lb.IPv4}
	same := largeNumber(0, 2, 3, 1)
	apart := same
	apart.Ports = slices.Clone(same.Ports)
	apart.Ports[0].Backends.Cluster = apart.Ports[0].Backends.Cluster[1:]
	for name, change := range map[string][2]plan.Service{"together": {apart, same}, "apart": {same, apart}} {
		old := r.service(change[0]).chains
		if d := cmp.Diff(r.service(change[1]).chains, r.again(change[1], old).chains); d != "" {
			t.Errorf("%s (-fresh +again):\n%s", name, d)
		}
	}
}

// repair returns what it takes to make the kernel's rules as they are thought to be.
func repair(a *testActor, family lb.Family) (string, error) {
	for _, f := range a.families {
		if f.family == family {
			if err := f.read(context.Background(), false); err != nil {
				return "", err
			}
			input, _ := script(*f.have, f.all(nil), f.hooks(), leftovers{})
			return input, nil
		}
	}
	return "", nil
}
