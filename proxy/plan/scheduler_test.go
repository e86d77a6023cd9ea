package plan

import (
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestSchedulerIgnored(t *testing.T) {
	weights := lb.Weights{{Node: "worker-1", Share: 3}}
	for _, tt := range []struct {
		name       string
		service    lb.Service
		scheduler  Scheduler // that is used
		onlyRandom bool
		want       string
	}{
		{"nothing asked", lb.Service{}, Random, false, ""},
		{"by IPVS' name", lb.Service{Scheduler: "mh", Weights: weights}, SourceHash, false, ""},
		{"one that counts", lb.Service{Scheduler: "lc"}, LeastConnections, false, ""},
		{"one that counts with weights", lb.Service{Scheduler: "nq", Weights: weights}, NeverQueue, false, ""},
		{"weights that do not count", lb.Service{Scheduler: "lc", Weights: weights}, LeastConnections, false,
			"the scheduler least-connections has no weights"},
		{"one that only IPVS has", lb.Service{Scheduler: "lblc"}, Random, false, `"lblc" is none of random`},
		{"no name", lb.Service{Scheduler: "least"}, Random, false, `"least" is none of random, round-robin (rr)`},
		{"iptables", lb.Service{Scheduler: "wrr", Weights: weights}, WeightedRoundRobin, true, `"wrr" needs a proxy in nftables`},
		{"iptables with a relay", lb.Service{Scheduler: "wrr", Relay: "true"}, WeightedRoundRobin, true,
			"spread at random, but for those that the relay ends"},
		{"weights at random", lb.Service{Weights: weights}, Random, false, "the scheduler random has no weights"},
		{"weights in turn", lb.Service{Scheduler: "rr", Weights: weights}, RoundRobin, false,
			"the scheduler round-robin has no weights"},
		{"weights by the node's default", lb.Service{Weights: weights}, Maglev, false, ""},
		{"weights in iptables", lb.Service{Weights: weights}, Random, true, "only proxies in nftables mode have weights"},
		{"wrong weights", lb.Service{Scheduler: "wrr", InvalidWeights: `"a": want b`}, WeightedRoundRobin, false,
			`"a": want b; it gives no backend a weight`},
	} {
		planned := Service{Scheduler: tt.scheduler, Relay: tt.service.Relay != ""}
		got := SchedulerIgnored(tt.service, nil, planned, tt.onlyRandom)
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestWeightsOfSlicesIgnored(t *testing.T) {
	named := func(name string, s lb.Slice) lb.Slice {
		s.Key = lb.Key{Namespace: "default", Name: name}
		return s
	}
	const heavyOne = "annotation landfall.dev/weight of EndpointSlice default/heavy: "
	heavy := named("heavy", lb.Slice{Weight: 3})
	bad := named("bad", lb.Slice{InvalidWeight: `"0": want a weight from 1 to 100`})
	for _, tt := range []struct {
		name       string
		slices     []lb.Slice
		scheduler  Scheduler // that is used
		onlyRandom bool
		want       string
	}{
		{"used", []lb.Slice{{}, heavy}, WeightedRoundRobin, false, ""},
		{"without weights", []lb.Slice{{}}, Random, false, ""},
		{"at random", []lb.Slice{{}, heavy}, Random, false,
			heavyOne + "the scheduler random has no weights"},
		{"iptables", []lb.Slice{heavy}, Random, true,
			heavyOne + "only proxies in nftables mode have weights"},
		{"wrong", []lb.Slice{heavy, bad}, WeightedRoundRobin, false,
			`annotation landfall.dev/weight of EndpointSlice default/bad: "0": want a weight from 1 to 100; ` +
				`its endpoints have the weight 1`},
		{"wrong, where none counts", []lb.Slice{bad}, Random, false, "EndpointSlice default/bad"},
	} {
		got := SchedulerIgnored(lb.Service{}, tt.slices, Service{Scheduler: tt.scheduler}, tt.onlyRandom)
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// IPVS' names and Landfall's mean the same; each is done in nftables mode, and refused in iptables mode,
// where all but random are.
func TestSchedulersByName(t *testing.T) {
	for name, want := range map[string]Scheduler{
		"rr": RoundRobin, "wrr": WeightedRoundRobin, "lc": LeastConnections, "wlc": WeightedLeastConnections,
		"sh": SourceHash, "mh": SourceHash, "dh": DestinationHash, "sed": ShortestExpectedDelay, "nq": NeverQueue,
		"random": Random, "maglev": Maglev,
	} {
		for _, asked := range []string{name, string(want)} {
			if got, ok := ParseScheduler(asked); !ok || got != want {
				t.Errorf("%s: %q, %v, want %q", asked, got, ok, want)
			}
			if said := SchedulerIgnored(lb.Service{Scheduler: asked}, nil, Service{Scheduler: want}, false); said != "" {
				t.Errorf("%s in nftables mode: %s", asked, said)
			}
			said := SchedulerIgnored(lb.Service{Scheduler: asked}, nil, Service{Scheduler: want}, true)
			if (said == "") != (want == Random) || said != "" && !strings.Contains(said, "in iptables mode connections are spread") {
				t.Errorf("%s in iptables mode: %q", asked, said)
			}
			if !strings.Contains(Schedulers, asked) {
				t.Errorf("%s is not in the list: %s", asked, Schedulers)
			}
		}
	}
}

// A Service that asks for what no mode has is spread at random, whatever the node's default is; one that asks for
// nothing has that.
func TestUnknownSchedulersAreRandom(t *testing.T) {
	for asked, want := range map[string]Scheduler{"": Maglev, "lblc": Random, "Maglev": Random, "wlc": WeightedLeastConnections} {
		svc := service()
		svc.Scheduler = asked
		if got := New(svc, slice("1 here, 2 there"), Node{Name: "here", Scheduler: Maglev}).Scheduler; got != want {
			t.Errorf("%q: %s, want %s", asked, got, want)
		}
	}
}

// Weights count with the schedulers that heed them.
func TestWeightsReachBackends(t *testing.T) {
	svc := service()
	svc.Weights = lb.Weights{{Node: "here", Share: 3}}
	for scheduler, want := range map[string]uint8{"": 0, "rr": 0, "wrr": 3, "sh": 3, "maglev": 3, "lc": 0, "wlc": 3,
		"sed": 3, "nq": 3} {
		svc.Scheduler = scheduler
		for _, p := range New(svc, slice("1 here, 2 there"), Node{Name: "here", Scheduler: Random}).Ports {
			for _, b := range p.Backends.Local {
				if b.Weight != want {
					t.Errorf("%q: weight %d, want %d", scheduler, b.Weight, want)
				}
			}
			if len(p.Backends.Local) == 0 {
				t.Errorf("%q: no backend here", scheduler)
			}
		}
	}
}

// Weights of slices reach the backends on each node alike: tables of all nodes follow from them.
func TestWeightsOfSlicesReachBackends(t *testing.T) {
	endpoints := append(slice("1 here, 2 there"), slice("3 there, 4 here")...)
	endpoints[2].Weight, endpoints[3].Weight = 7, 7
	svc := service()
	for scheduler, want := range map[string][]uint8{"": {0, 0, 0, 0}, "rr": {0, 0, 0, 0}, "wrr": {1, 1, 7, 7},
		"maglev": {1, 1, 7, 7}, "wlc": {1, 1, 7, 7}} {
		svc.Scheduler = scheduler
		for _, node := range []string{"here", "there", "elsewhere"} {
			for _, p := range New(svc, endpoints, Node{Name: node, Scheduler: Random}).Ports {
				var got []uint8
				for _, b := range p.Backends.Cluster {
					got = append(got, b.Weight)
				}
				if !slices.Equal(got, want) {
					t.Errorf("%q on %s: %d, want %d", scheduler, node, got, want)
				}
			}
		}
	}
}
