package main

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
)

// TestContract8RandomRestarts drives processes that lead in turn, with watches that are late and
// writes that fail.
func TestContract8RandomRestarts(t *testing.T) {
	seeds.Run(t, seeds.Of(400, 2000), nil, func(t *testing.T, seed uint64) { randomRun(t, seed, 1) })
}

// TestContract8RandomTogether has two or three controllers lead at the same time, as the Lease
// should prevent: they are slow, see late what the others write, and what they have sent may arrive
// when they have long given up.
func TestContract8RandomTogether(t *testing.T) {
	found := []uint64{
		1009, 1613, 1926, 2238, // a controller that reserves without catching up with the Services
		685, 1114, 2456, 2608, // one that counts beside another's reservation without becoming its writer
		1169, 1672, 1877, // one that counts on a reservation that its last write left out
	}
	seeds.Run(t, seeds.Of(600, 3000), found, func(t *testing.T, seed uint64) { randomRun(t, seed, 2) })
}

// randomRun has so many controllers, or one more if there are several, keep their promises.
func randomRun(t *testing.T, seed uint64, controllers int) {
	r := rand.New(rand.NewPCG(seed, 1))
	if controllers > 1 {
		controllers += r.IntN(2)
	}
	c := newCluster()
	deny := func(key lb.Key) (error, bool) { return c.refuse(key), false } // an admission webhook, now and then
	failures := []failure{conflict, refused, lost, forbidden, deny, deny, stall, stall, stall, nil, nil}
	c.webhook, c.invalid = true, map[lb.Key]bool{}
	c.addPool("p", "10.0.0.0/28")
	c.before = func() {
		// What was sent earlier arrives at any time, also between two writes of another controller.
		if len(c.stalled) > 0 && r.IntN(3) == 0 {
			c.arrive(r.IntN(len(c.stalled)))
		}
	}
	processes := make([]*process, controllers)
	for i := range processes {
		processes[i] = newProcess(c)
		processes[i].deliver()
	}
	var internal, all []string
	for i := range 60 {
		which := r.IntN(controllers)
		p := processes[which]
		switch r.IntN(15) {
		case 0, 1, 2:
			s := service(fmt.Sprintf("s%d", i))
			if r.IntN(2) == 0 {
				s.Type = lb.ClusterIP
				internal = append(internal, s.Key.Name)
			}
			all = append(all, s.Key.Name)
			c.put(s)
		case 3:
			if len(all) > 0 && r.IntN(2) == 0 {
				c.remove(all[0])
				all = all[1:]
			}
		case 4, 5:
			if len(internal) > 0 {
				if _, ok := c.services[key(internal[0])]; ok {
					becomesLoadBalancer(c, internal[0])
				}
				internal = internal[1:]
			}
		case 6, 7:
			c.fail(failures[r.IntN(len(failures))], failures[r.IntN(len(failures))], failures[r.IntN(len(failures))])
		case 8:
			p.deliverServices(1 + r.IntN(4))
		case 9: // crash, and another takes over: from what is there now
			processes[which] = newProcess(c)
			processes[which].deliver()
		case 10:
			p.deliver()
		case 11:
			p.deliverPools()
		case 12:
			if len(c.stalled) > 0 {
				c.arrive(r.IntN(len(c.stalled)))
			}
		case 13:
			if len(all) > 0 {
				c.touch(all[r.IntN(len(all))])
			}
		case 14: // the webhook refuses a Service until this comes up for it again
			if len(all) > 0 {
				k := key(all[r.IntN(len(all))])
				c.invalid[k] = !c.invalid[k]
			}
		}
		_, _ = processes[r.IntN(controllers)].step(t.Context())
		c.check(t)
		if t.Failed() {
			t.FailNow()
		}
	}
	c.fail()
	clear(c.invalid)
	for len(c.stalled) > 0 {
		c.arrive(0)
		c.check(t)
	}
	for range 3 {
		for _, p := range processes {
			p.clock = p.clock.Add(maxUnwritable) // those that were refused are tried again
			p.settle(t)
		}
	}
	for k, s := range c.services {
		if len(c.services) <= 16 && s.Type == lb.LoadBalancer && len(s.Ingress) == 0 {
			t.Errorf("%s has no address in the end: %v", k, s.Conditions)
		}
	}
}
