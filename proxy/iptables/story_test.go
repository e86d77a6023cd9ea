package iptables

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// randomConfig is what a node's settings and addresses make of it.
func randomConfig(r *rand.Rand) plan.Config {
	c := seedConfig
	c.DropInvalid, c.MasqueradeAll = r.IntN(2) == 0, r.IntN(4) == 0
	if r.IntN(2) == 0 {
		c.NodePortAddresses = map[lb.Family][]netip.Addr{
			lb.IPv4: []netip.Addr{addr("172.31.0.1"), addr("172.31.0.4")}[:r.IntN(3)], lb.IPv6: {addr("fd31::1")},
		}
	}
	return c
}

// story makes random changes of Services, their endpoints and the node, some of them several at
// once, some twice, with restarts in between, and checks now and then that the rules are those of a
// fresh start.
func story(t *testing.T, seed uint64, steps, checks int, kernels func() map[lb.Family]Kernel) (changes int) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 9))
	kernel := kernels()
	config := randomConfig(r)
	start := func(on map[lb.Family]Kernel, all map[lb.Key]plan.Service) *testActor {
		a := newActor(on, config)
		a.Set(all)
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
		return a
	}
	final := map[lb.Key]plan.Service{}
	a := start(kernel, nil)
	for i := range steps {
		for range 1 + r.IntN(3) {
			s := random(r, r.IntN(12))
			if final[s.Key] = s; r.IntN(4) == 0 {
				s = plan.Service{Key: s.Key}
				delete(final, s.Key)
			}
			for range 1 + r.IntN(2) {
				a.Set(plans(s))
			}
			changes++
		}
		if r.IntN(25) == 0 {
			config = randomConfig(r)
			a.Configure(config)
			changes++
		}
		if r.IntN(60) == 0 {
			a = start(kernel, final)
		}
		check := i%(steps/checks) == 0 || i == steps-1
		if !check && r.IntN(4) == 0 {
			continue // the next changes are taken together with these
		}
		stats, err := a.Apply(t.Context(), r.IntN(20) == 0)
		if err != nil || stats.Failures > 0 { // the kernel refuses only what is wrong
			t.Fatalf("step %d: %v, %+v", i, err, stats)
		}
		if stats.Repaired > 0 { // nobody else has changed anything
			t.Fatalf("step %d: %+v", i, stats)
		}
		if !check {
			continue
		}
		fresh := kernels()
		start(fresh, final)
		for family := range kernel {
			if d := cmp.Diff(listing(t, fresh[family]), listing(t, kernel[family])); d != "" {
				t.Fatalf("step %d, %s: not as after a fresh start (-fresh +got):\n%s", i, family, d)
			}
		}
	}
	return changes
}

// Contract clause 6: thousands of changes, in any order, end in the rules of a fresh start.
func TestContract6ThousandsOfChanges(t *testing.T) {
	t.Parallel()
	changes := 0
	seeds.Run(t, seeds.Of(4, 60), nil, func(t *testing.T, seed uint64) {
		changes += story(t, seed, seeds.Of(200, 600), seeds.Of(6, 12), func() map[lb.Family]Kernel {
			return map[lb.Family]Kernel{lb.IPv4: newFakeKernel(), lb.IPv6: newFakeKernel()}
		})
	})
	t.Logf("%d changes", changes)
}

// Contract clause 6, with a real kernel.
func TestContract6ThousandsOfChangesInTheKernel(t *testing.T) {
	t.Parallel()
	seeds.Run(t, seeds.Of(1, 5), nil, func(t *testing.T, seed uint64) {
		changes := story(t, seed, seeds.Of(120, 600), 6, func() map[lb.Family]Kernel { return kernels(t, "nft") })
		t.Logf("%d changes", changes)
	})
}
