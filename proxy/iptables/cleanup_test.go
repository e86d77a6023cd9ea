package iptables

import (
	"context"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/internal/seeds"
)

// Cleanup leaves what was there before, and what came from others meanwhile.
func TestCleanup(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			t.Run(kind+"/"+string(family), func(t *testing.T) {
				ns := nstest.New(t)
				kernel := nsKernel{t, ns, variant(family, kind)}
				others := "*filter\n:KUBE-FORWARD - [0:0]\n:MINE - [0:0]\n-A FORWARD -j KUBE-FORWARD\n-A INPUT -j MINE\n-A MINE " +
					"-p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n" +
					"*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A POSTROUTING -o eth7 -j MASQUERADE\nCOMMIT\n"
				if err := kernel.Restore(context.Background(), others); err != nil {
					t.Fatal(err)
				}
				before := listing(t, kernel)
				a := newActor(map[lb.Family]Kernel{family: kernel}, seedConfig)
				r := rand.New(rand.NewPCG(3, 3))
				for n := range 6 {
					a.Set(plans(random(r, n)))
				}
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				if during := listing(t, kernel); !strings.Contains(during, prefix) {
					t.Fatalf("nothing to clean up:\n%s", during)
				}
				for range 2 { // the second time there is nothing to do
					if err := cleanup(context.Background(), kernel, func() {}); err != nil {
						t.Fatal(err)
					}
					if d := cmp.Diff(before, listing(t, kernel)); d != "" {
						t.Errorf("left (-before +after):\n%s", d)
					}
				}
			})
		}
	}
}

// Contract clause 6: where kube-proxy serves a node too, our rules come and go without a loss.
func TestContract6ComingAndGoingBesideAnother(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			w := cases.WorldOf(lb.IPv4)
			s := cases.NewSite(t, w)
			kernel := nsKernel{t, s.Node, variant(lb.IPv4, kind)}
			c := cases.Case{Backends: []cases.Backend{{At: "local", Ready: true, Serving: true},
				{At: "remote", Ready: true, Serving: true}}}
			service, config := c.Plan(w)
			b := cases.NewBeside(t, s)
			for range seeds.Of(8, 100) {
				a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, config)
				a.Set(plans(service))
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				b.Wait()
				if err := cleanup(t.Context(), kernel, func() {}); err != nil {
					t.Fatal(err)
				}
				b.Wait()
			}
			b.WantNoneLost(t)
		})
	}
}
