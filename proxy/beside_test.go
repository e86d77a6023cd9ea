package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// crowded is a running proxy with many plain Services and some large ones, whose rules are in a kernel.
type crowded struct {
	*proxy
	family    lb.Family
	services  *kubetest.Table[lb.Key, lb.Service]
	slices    *kubetest.Table[lb.Key, []lb.Slice]
	confirmed chan lb.Key // the Services that the kernel has confirmed
}

type rulesOf = func(lb.Family, *dialect.Ledger) dialect.Rules

func newCrowded(t testing.TB, family lb.Family, plain int, rules rulesOf, change ...func(*settings)) *crowded {
	p, all := loaded(plain)
	for _, f := range change {
		f(&p.settings)
	}
	b := &crowded{family: family, services: p.from.services.(*kubetest.Table[lb.Key, lb.Service]), slices: all,
		confirmed: make(chan lb.Key, 1<<17)}
	p.families = []lb.Family{family}
	for key, svc := range b.services.All() {
		of, _ := all.Get(key)
		svc, of = b.inFamily(svc, of)
		b.services.Set(key, svc)
		all.Set(key, of)
	}
	b.proxy = reborn(t, p, rules, b.confirmed)
	return b
}

// run has the proxy write all rules, and go on until the test ends.
func (b *crowded) run(t testing.TB) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- b.runner.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	b.markAll(b.now())
	b.runner.Poke()
	<-b.settled
}

func largeKey(i int) lb.Key { return lb.Key{Namespace: "bench", Name: fmt.Sprint("large-", i)} }

// grow sets a large Service, whose first endpoint has a number that grows with the version.
func (b *crowded) grow(i int, s shape, version int) {
	svc, all := b.large(i, s, version)
	b.services.Set(svc.Key, svc)
	b.slices.Set(svc.Key, all)
	b.markEndpoints(svc.Key)
}

func (b *crowded) large(i int, s shape, version int) (lb.Service, []lb.Slice) {
	svc, all := s.service(largeKey(i), version)
	for j := range svc.Ports {
		svc.Ports[j].Protocol = lb.TCP
		for _, slice := range all {
			slice.Ports[j].Protocol = lb.TCP
		}
	}
	svc.ClusterIPs[0] = netip.AddrFrom4([4]byte{9, byte(i >> 16), byte(i >> 8), byte(i)})
	return b.inFamily(svc, all)
}

// inFamily returns a Service of IPv4 as one of the family.
func (b *crowded) inFamily(svc lb.Service, all []lb.Slice) (lb.Service, []lb.Slice) {
	svc.ClusterIPs, svc.Ingress, all = slices.Clone(svc.ClusterIPs), slices.Clone(svc.Ingress), slices.Clone(all)
	for i, a := range svc.ClusterIPs {
		svc.ClusterIPs[i] = b.addr(a.As4())
	}
	for i := range svc.Ingress {
		svc.Ingress[i].Addr = b.addr(svc.Ingress[i].Addr.As4())
	}
	for i := range all {
		all[i].Family, all[i].Endpoints = b.family, slices.Clone(all[i].Endpoints)
		for j := range all[i].Endpoints {
			all[i].Endpoints[j].Addr = b.addr(all[i].Endpoints[j].Addr.As4())
		}
	}
	return svc, all
}

// addr returns an address of IPv4, or one of IPv6 that begins so.
func (b *crowded) addr(four [4]byte) netip.Addr {
	if b.family == lb.IPv4 {
		return netip.AddrFrom4(four)
	}
	var six [16]byte
	copy(six[:], four[:])
	return netip.AddrFrom16(six)
}

// change changes the endpoints of a plain Service.
func (b *crowded) change(i int, how func([]lb.Endpoint)) lb.Key {
	key := benchKey(i)
	of, _ := b.slices.Get(key)
	changed := of[0]
	changed.Endpoints = slices.Clone(changed.Endpoints)
	how(changed.Endpoints)
	b.slices.Set(key, []lb.Slice{changed})
	b.markEndpoints(key)
	return key
}

// written is a transaction with a kernel, or a call of iptables-restore.
type written struct {
	keys    []lb.Key
	changes int
	part    bool // of a Service of which more is to come
}

// recorder are rules that tell of what they have written.
type recorder struct {
	dialect.Rules
	ledger *dialect.Ledger
	tell   func(written)
}

func (r recorder) Commit(ctx context.Context, keys []lb.Key) (n int, err error) {
	before := r.ledger.Stats
	n, err = r.Rules.Commit(ctx, keys)
	if now := r.ledger.Stats; now.Transactions > before.Transactions {
		r.tell(written{slices.Clone(keys[:n]), now.Changes - before.Changes, errors.Is(err, dialect.ErrUnfinished)})
	}
	return n, err
}

// Contract clause 11: while a large Service is written or changes, the next transaction is for another Service that
// changes, and is as large as without the large one. So the other Service waits for one part of the large one at most.
// The memory has a bound.
func TestContract11ALargeServiceCostsOthersNothing(t *testing.T) {
	const most = 150 << 20 // bytes in use, the objects of the API server included
	for _, c := range []struct {
		mode   string
		family lb.Family
		plain  int
		large  shape
		parts  int // at least
	}{
		{modeNftables, lb.IPv4, 5000, shape{ports: 200, endpoints: 500}, 1},
		{modeNftables, lb.IPv4, 5000, shape{ports: 200, endpoints: 500, apart: true}, 15},
		{modeNftables, lb.IPv6, 5000, shape{ports: 200, endpoints: 500}, 1},
		{modeNftables, lb.IPv6, 500, shape{ports: 20, endpoints: 500, apart: true}, 4},
		{modeIptables, lb.IPv4, 500, shape{ports: 10, endpoints: 100}, 2},
		{modeIptables, lb.IPv6, 500, shape{ports: 10, endpoints: 100}, 2},
	} {
		t.Run(fmt.Sprintf("%s, %s, %d plain, %+v", c.mode, c.family, c.plain, c.large), func(t *testing.T) {
			rules := rulesIn(t, nstest.New(t), c.mode, batchIptables)
			synctest.Test(t, func(t *testing.T) {
				besideLargeService(t, rules, c.family, c.plain, c.large, c.parts, most)
			})
		})
	}
}

func besideLargeService(t *testing.T, rules rulesOf, of lb.Family, plain int, large shape, parts int, most uint64) {
	var tell func(written)
	b := newCrowded(t, of, plain, func(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
		if family != of {
			return rules(family, ledger)
		}
		return recorder{rules(family, ledger), ledger, func(w written) { tell(w) }}
	})
	all := []written(nil)
	tell = func(w written) { all = append(all, w) }
	b.run(t)
	turn := 0
	replace := func() lb.Key {
		turn++
		return b.change(turn*7919%plain, func(all []lb.Endpoint) {
			all[1].Addr = b.addr([4]byte{10, 202, byte(turn >> 8), byte(turn)})
		})
	}
	// alone is what a change takes without the large Service.
	alone := func() written {
		t.Helper()
		all = nil
		key := replace()
		time.Sleep(time.Second)
		synctest.Wait()
		if len(all) != 1 || !slices.Equal(all[0].keys, []lb.Key{key}) || all[0].part {
			t.Fatalf("a change of %s was written so: %+v", key, all)
		}
		return all[0]
	}
	time.Sleep(time.Minute)
	want := alone()

	largest := uint64(0)
	weigh := func() {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		largest = max(largest, m.HeapAlloc)
	}
	for version := range 2 {
		// In the middle of each part of the large Service, a plain one changes.
		var waiting lb.Key
		asked, late, other := 0, 0, map[int]int{}
		tell = func(w written) {
			switch {
			case waiting != (lb.Key{}):
				if !slices.Equal(w.keys, []lb.Key{waiting}) {
					late++
				} else {
					other[w.changes]++
					waiting = lb.Key{}
				}
			case slices.Equal(w.keys, []lb.Key{largeKey(0)}):
				if waiting = replace(); asked%16 == 0 {
					weigh()
				}
				asked++
				time.Sleep(50 * time.Millisecond) // of the simulated clock: the planner does its part meanwhile
			}
		}
		b.grow(0, large, version*large.endpoints) // then none of its endpoints stays
		time.Sleep(time.Minute)
		synctest.Wait()
		t.Logf("version %d: %d transactions, of others as many changes as: %v", version, asked, other)
		if asked < parts || late > 0 || waiting != (lb.Key{}) || len(other) != 1 || other[want.changes] != asked {
			t.Errorf("version %d: between %d parts of the large Service, %d transactions came before those of others, which "+
				"had as many changes as %v; want at least %d, none, and %d each", version, asked, late, other, parts, want.changes)
		}
		b.mu.Lock()
		if n := len(b.records[largeKey(0)].applied.Ports); n != large.ports || len(b.unconfirmed) > 0 {
			t.Errorf("version %d: %d ports are written, %d Services are not", version, n, len(b.unconfirmed))
		}
		b.mu.Unlock()
	}
	tell = func(w written) { all = append(all, w) }
	if again := alone(); again.changes != want.changes {
		t.Errorf("beside the large Service a change needs %d changes, and %d without", again.changes, want.changes)
	}
	weigh()
	t.Logf("%d MiB in use", largest>>20)
	if largest > most {
		t.Errorf("%d MiB are in use, want at most %d", largest>>20, most>>20)
	}
	runtime.KeepAlive(b)
}

// reborn returns a proxy with the same sources whose rules are in a kernel of their own, and which
// tells of what the kernel has confirmed.
func reborn(t testing.TB, before *proxy, rules rulesOf, confirmed chan<- lb.Key) *proxy {
	p := newProxy(before.self, before.settings, before.families, before.log, time.Now)
	p.from, p.to = before.from, before.to
	actor := dialect.New(dialect.Deps{Log: p.log, Changed: p.runner.PokeNow, Rules: rules})
	p.to.rules, p.to.flows = actor, telling{confirmed}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- actor.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// telling tells of the Services that the kernel has confirmed.
type telling struct{ confirmed chan<- lb.Key }

func (t telling) Begin(map[lb.Key]plan.Service) {}

func (t telling) Update(applied map[lb.Key]plan.Service) {
	for key := range applied {
		t.confirmed <- key
	}
}
