package plan

import (
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
		{"one that counts", lb.Service{Scheduler: "lc"}, Random, false, "needs counts of connections"},
		{"no name", lb.Service{Scheduler: "least"}, Random, false, `"least" is none of random, round-robin (rr)`},
		{"iptables", lb.Service{Scheduler: "wrr", Weights: weights}, WeightedRoundRobin, true, `"wrr" needs a proxy in nftables`},
		{"weights at random", lb.Service{Weights: weights}, Random, false, "the scheduler random has no weights"},
		{"weights in turn", lb.Service{Scheduler: "rr", Weights: weights}, RoundRobin, false,
			"the scheduler round-robin has no weights"},
		{"weights by the node's default", lb.Service{Weights: weights}, Maglev, false, ""},
		{"weights in iptables", lb.Service{Weights: weights}, Random, true, "only proxies in nftables mode have weights"},
		{"wrong weights", lb.Service{Scheduler: "wrr", InvalidWeights: `"a": want b`}, WeightedRoundRobin, false,
			`"a": want b; all backends have the same weight`},
	} {
		got := SchedulerIgnored(tt.service, tt.scheduler, tt.onlyRandom)
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// Weights count with the schedulers that heed them.
func TestWeightsReachBackends(t *testing.T) {
	svc := service()
	svc.Weights = lb.Weights{{Node: "here", Share: 3}}
	for scheduler, want := range map[string]uint8{"": 0, "rr": 0, "wrr": 3, "sh": 3, "maglev": 3} {
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
