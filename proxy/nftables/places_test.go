package nftables

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contract clause 11: the Services with session affinity of one namespace leave others a quarter of the map, however many
// lists each has; one without places takes none, and its clients' addresses choose.
func TestContract11ANamespaceLeavesOthersPlaces(t *testing.T) {
	most := map[plan.Places]int{}
	for lists := 1; lists <= 1<<14; lists++ { // more have no room among the elements
		for _, has := range []plan.Places{plan.ManyPlaces, plan.FewPlaces, plan.NoPlaces} {
			m, taken := memoryOf(time.Hour, lists, has), 0
			if m > 0 {
				n, _ := places(splitOf(m))
				taken = int(n) * lists
			}
			most[has] = max(most[has], taken)
		}
	}
	all := plan.MaxManyPlaces*most[plan.ManyPlaces] + plan.MaxFewPlaces*most[plan.FewPlaces]
	if all > stickyLimit/4*3 || most[plan.NoPlaces] > 0 || most[plan.FewPlaces] == 0 {
		t.Errorf("Services have up to %v places, and those of one namespace %d of %d", most, all, stickyLimit)
	}
}

// What a Service has in the memory for session affinity holds in the kernel: its clients take only places that it has,
// and without any they keep the endpoint of their address.
func TestPlacesInTheKernel(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := cases.WorldOf(family)
			s := cases.NewSite(t, w)
			a := newTestActor(t, s.Node)
			service, config := three(w, plan.Random, 3*time.Hour, "local", "local2", "remote")
			a.Configure(config)
			ask := func() string {
				t.Helper()
				at, _, err := s.Ask(cases.Case{From: "pod", To: "cluster"}, cases.Long)
				if err != nil {
					t.Fatal(err)
				}
				return at
			}
			known := 0
			for _, step := range []struct {
				has       plan.Places
				from, to  uint32
				scheduler plan.Scheduler
			}{
				{plan.ManyPlaces, stickyPlaces, 2 * stickyPlaces, plan.Random},
				{plan.FewPlaces, stickyPlaces >> 5, stickyPlaces >> 4, plan.Random},
				{plan.NoPlaces, 0, 0, plan.Random}, {plan.NoPlaces, 0, 0, plan.RoundRobin},
			} {
				service.Places, service.Scheduler = step.has, step.scheduler
				a.settle(t, map[lb.Key]plan.Service{service.Key: service})
				first := ask()
				for range 8 {
					if at := ask(); at != first {
						t.Errorf("with %d a client was sent to %s, and then to %s", step.has, first, at)
					}
				}
				known++
				if step.has == plan.NoPlaces {
					known = 0 // who connects then is forgotten
					if want := byAddress(t, w, service, config); first != want {
						t.Errorf("without places a client was sent to %s, not to that of its address, %s", first, want)
					}
				}
				clients := a.clients(t, family)
				if len(clients) != known {
					t.Errorf("with %d there are %d clients, want %d", step.has, len(clients), known)
				}
				in := 0
				for _, c := range clients {
					if c.place >= step.from && c.place < step.to {
						in++
					}
				}
				if step.to > 0 && in != 1 {
					t.Errorf("with %d there is no client from place %d to %d: %v", step.has, step.from, step.to, clients)
				}
			}
		})
	}
}

// The kernel takes the rules for groups of which each has one place.
func TestOnePlaceInTheKernel(t *testing.T) {
	a := newTestActor(t, nstest.New(t))
	s := mixedService(2049, 2, 0)
	s.AffinityTimeout, s.Places = time.Hour, plan.FewPlaces
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	want := need{setRemember, memoryOf(time.Hour, 2049, plan.FewPlaces)}
	has := a.table(lb.IPv4).rules.needs
	if n, first := places(splitOf(want.number)); n != 1 || first != 1 || !slices.Contains(has, want) {
		t.Errorf("%d places from %d on, the rules have %v", n, first, has)
	}
	if st, err := a.Apply(t.Context(), true); err != nil || st.Repaired > 0 || st.Changes > 0 {
		t.Errorf("read back: %+v, %v", st, err)
	}
}

// byAddress returns where the address of a pod leads by source-hash.
func byAddress(t *testing.T, w cases.World, s plan.Service, config plan.Config) string {
	t.Helper()
	s.AffinityTimeout, s.Places, s.Scheduler = 0, plan.ManyPlaces, plan.SourceHash
	r := newRenderer(w.Family, config)
	walk := newWalker(t, newRuleset(w.Family, config, nil), nil, r.service(s.Key, s.Only(w.Family)))
	shares, _ := walk.fate(packetOf(w, cases.Case{From: "pod", To: "cluster"}))
	for at, share := range shares {
		if _, err := netip.ParseAddrPort(at); err != nil || share != 1 {
			t.Fatalf("by its address a client is sent to %v", shares)
		}
		return at
	}
	return ""
}
