package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/internal/seeds"
)

// In namespaces an admission webhook keeps each write to a Service for as long as it may take. Services of other
// namespaces get their addresses meanwhile, those of the namespaces once the webhook answers.
func TestContract11WritesThatHangHoldUpTheirNamespace(t *testing.T) {
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprint("at last they take place=", late), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { writesThatHang(t, late) })
		})
	}
}

func writesThatHang(t *testing.T, late bool) {
	c := newCluster()
	p := newProcess(c)
	p.deps.parallel, p.deps.now = 8, time.Now
	p.lanes = loop.NewLanes(8, 2)
	var hanging sync.Map
	c.holding = func(ctx context.Context, key lb.Key) error {
		if _, ok := hanging.Load(key.Namespace); !ok {
			return nil
		}
		<-ctx.Done()
		if late {
			return nil
		}
		return ctx.Err()
	}
	hang := func(namespace, name string) lb.Service {
		s := service(name)
		s.Key.Namespace = namespace
		return s
	}
	hanging.Store("slow", true)
	hanging.Store("slower", true)
	c.addPool("p", "10.0.0.0/20")
	for i := range maxReservations * 3 / 5 { // older than all others
		c.put(hang("slow", fmt.Sprint("s", i)))
		c.put(hang("slower", fmt.Sprint("s", i)))
	}
	p.deliver()
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.lead(ctx) }()
	for i := range 30 {
		name := fmt.Sprint("bystander-", i)
		c.put(service(name))
		p.deliver()
		time.Sleep(time.Second)
		if got := c.holds(name); !strings.HasSuffix(got, " Assigned") {
			t.Fatalf("%s holds %q after a second", name, got)
		}
	}
	hanging.Clear()
	for range 120 {
		p.deliver()
		time.Sleep(time.Second)
	}
	for key, s := range c.services {
		if len(s.Ingress) != 1 {
			t.Errorf("%s holds %v in the end", key, s.Ingress)
			break
		}
	}
	c.check(t)
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The reservations of a pool are never all of namespaces that have many: one that has none finds room. And many
// Services that wait for room keep no other namespace from its turn, nor those for another pool.
func TestContract11ManyThatWaitForRoomLeaveSome(t *testing.T) {
	of := func(namespace string, i int) lb.PendingReservation {
		return lb.PendingReservation{Service: lb.Key{Namespace: namespace, Name: fmt.Sprint("s", i)},
			Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}
	}
	var open []lb.PendingReservation
	for i := range 20 {
		var wanted []lb.PendingReservation
		for j := range maxReservations {
			wanted = append(wanted, of(fmt.Sprint("hangs-", i), j))
		}
		open = append(open, fitting(wanted, open)...)
	}
	if fit := fitting([]lb.PendingReservation{of("bystander", 0), of("bystander", 1)}, open); len(fit) != 1 {
		t.Errorf("beside %d reservations of 20 namespaces there is room for %d of another one, want 1", len(open), len(fit))
	}

	c := &controller{crowded: map[lb.Key]crowded{}}
	wait := func(namespace, name, pool string, age time.Duration) lb.Key {
		key := lb.Key{Namespace: namespace, Name: name}
		c.crowded[key] = crowded{key, pool, time.Unix(1e9, 0).Add(-age)}
		return key
	}
	for i := range 20 * maxReservations {
		wait("many", fmt.Sprint("s", i), "full", 0)
	}
	want := []lb.Key{wait("many", "oldest", "full", time.Hour), wait("many", "other-pool", "free", 0),
		wait("bystander", "s", "full", 0)}
	for range 10 {
		keys := map[lb.Key]bool{}
		c.uncrowd(keys)
		for _, key := range want {
			if !keys[key] {
				t.Fatalf("%s has no turn", key)
			}
		}
		if len(keys) != maxReservations {
			t.Fatalf("%d are decided again, want %d", len(keys), maxReservations)
		}
	}
}

// Controllers go on while their writes are under way: one after the other, and several at once. A write arrives at
// any time, with an answer or without one.
func TestContract8RandomUnderWay(t *testing.T) {
	seeds.Run(t, seeds.Of(200, 2000), nil, func(t *testing.T, seed uint64) {
		synctest.Test(t, func(t *testing.T) { randomUnderWay(t, seed) })
	})
}

func randomUnderWay(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 2))
	c := newCluster()
	c.addPool("p", "10.0.0.0/28")
	var mu sync.Mutex
	underWay := map[string]chan error{}
	sent := 0
	c.holding = func(_ context.Context, key lb.Key) error {
		answer := make(chan error)
		mu.Lock()
		sent++
		underWay[fmt.Sprint(key, sent)] = answer
		mu.Unlock()
		return <-answer
	}
	end := func() { // of one of the writes that are under way
		synctest.Wait()
		mu.Lock()
		names := slices.Sorted(maps.Keys(underWay))
		if len(names) == 0 {
			mu.Unlock()
			return
		}
		name := names[r.IntN(len(names))]
		answer := underWay[name]
		delete(underWay, name)
		mu.Unlock()
		if r.IntN(5) == 0 {
			answer <- errors.New("the connection is lost")
		} else {
			answer <- nil
		}
		synctest.Wait()
		c.check(t)
	}
	processes := make([]*process, 1+r.IntN(2))
	begin := func(i int) {
		p := newProcess(c)
		p.deps.parallel = 4
		p.lanes = loop.NewLanes(4, 3)
		processes[i] = p
		p.takeOver(t)
	}
	for i := range processes {
		begin(i)
	}
	for i := range 60 {
		p := processes[r.IntN(len(processes))]
		switch r.IntN(9) {
		case 0, 1, 2:
			if len(c.services) < 12 {
				c.put(service(fmt.Sprint("s", i)))
			}
		case 3:
			if names := slices.SortedFunc(maps.Keys(c.services), lb.Key.Compare); len(names) > 0 {
				c.remove(names[r.IntN(len(names))].Name)
			}
		case 4:
			if names := slices.SortedFunc(maps.Keys(c.services), lb.Key.Compare); len(names) > 0 {
				c.touch(names[r.IntN(len(names))].Name)
			}
		case 5:
			p.deliver()
		case 6:
			p.deliverServices(1 + r.IntN(3))
		case 7:
			begin(r.IntN(len(processes)))
		case 8:
			end()
		}
		_, _ = p.controller.step(t.Context())
		synctest.Wait()
		c.check(t)
		if r.IntN(2) == 0 {
			end()
		}
		if t.Failed() {
			break
		}
	}
	for len(underWay) > 0 {
		end()
	}
	c.holding = nil
	for range 3 {
		for _, p := range processes {
			p.settle(t)
		}
	}
	for key, s := range c.services {
		if len(s.Ingress) == 0 {
			t.Errorf("%s has no address in the end: %v", key, s.Conditions)
		}
	}
}
