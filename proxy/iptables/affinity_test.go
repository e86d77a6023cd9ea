package iptables

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
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
