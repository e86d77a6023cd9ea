package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
)

// TestContract8RandomStories makes up stories: whatever the order of creations, deletions, edits of
// pools and of requests, and however late writes are seen, no address has two holders and none is
// taken from a holder that does not ask for another.
func TestContract8RandomStories(t *testing.T) {
	// Those that find a book which does not decide anew for Services that share an address, for those
	// that wait for one to be shared, or that forgets when a kept address becomes free.
	found := []uint64{513, 571, 1051, 1305, 1312, 1335, 1668}
	seeds.Run(t, seeds.Of(300, 2000), found, func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(Config{})
		w.repeats = r.IntN(2)
		for range 40 {
			before := maps.Clone(w.services)
			randomChange(r)(w)
			given := maps.Clone(w.services)
			p := w.settle(t, r.IntN(2) == 0)
			w.invariants(t, before, given, askingForAnother(w))
			oldestFirst(t, w, p)
			if t.Failed() {
				t.FailNow()
			}
		}
	})
}

func randomChange(r *rand.Rand) change {
	if r.IntN(4) == 0 {
		return randomRule(r)
	}
	name := fmt.Sprintf("s%d", r.IntN(12))
	addr := fmt.Sprintf("10.0.0.%d", r.IntN(16))
	pools := []string{"a", "b", "c"}
	switch r.IntN(10) {
	case 0, 1, 2:
		return service(name)
	case 3:
		return service(name, asks(addr))
	case 4:
		return service(name, asks(), asksPool(""))
	case 5:
		return service(name, asksPool(pools[r.IntN(3)]))
	case 6:
		return noService(name)
	case 7:
		return service(name, requireDual)
	case 8:
		return noPool(pools[r.IntN(3)])
	}
	from := r.IntN(16)
	ranges := []string{fmt.Sprintf("10.0.0.%d-10.0.0.%d", from, from+r.IntN(6))}
	if r.IntN(2) == 0 {
		ranges = append(ranges, fmt.Sprintf("fd00::%x-fd00::%x", from, from+r.IntN(6)))
	}
	return poolWith(pools[r.IntN(3)], r.IntN(4) > 0, ranges...)
}

// randomRule changes what the first form of this test did not know of: sharing, rules of pools,
// time.
func randomRule(r *rand.Rand) change {
	name := fmt.Sprintf("s%d", r.IntN(12))
	edit := func(f func(*lb.Pool)) change {
		pool := []string{"a", "b", "c"}[r.IntN(3)]
		return func(w *world) {
			if p, ok := w.pools[pool]; ok {
				f(&p)
				p.Generation++
				w.pools[pool] = p
			}
		}
	}
	switch r.IntN(10) {
	case 8:
		addr := netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", r.IntN(16)))
		return func(w *world) {
			w.nodes["n"] = lb.Node{Name: "n", Unassignable: []lb.Unassignable{{Addr: addr, What: "the gateway"}}}
		}
	case 0:
		return service(name, shares("k"+fmt.Sprint(r.IntN(2)), uint16(80+r.IntN(2))))
	case 1:
		return service(name, shares("k", uint16(80+r.IntN(3))), local(fmt.Sprint(r.IntN(2))))
	case 2:
		return edit(func(p *lb.Pool) { p.Quarantine = time.Duration(r.IntN(3)-1) * 30 * time.Second })
	case 3:
		return edit(func(p *lb.Pool) { p.PerNamespace = r.IntN(4) })
	case 4:
		return edit(func(p *lb.Pool) {
			p.Allocation = &lb.Allocation{Priority: r.IntN(3), Namespaces: []string{[]string{"default", "other"}[r.IntN(2)]}}
		})
	case 5:
		return edit(func(p *lb.Pool) {
			p.Allocation, p.Excluded, p.Reservations, p.AvoidBuggy = nil, nil, nil, r.IntN(2) == 0
		})
	case 6:
		addr := netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", r.IntN(16)))
		return edit(func(p *lb.Pool) {
			p.Excluded = append(slices.Clone(p.Excluded), lb.Range{From: addr, To: addr})
		})
	case 7:
		addr := netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", r.IntN(16)))
		return edit(func(p *lb.Pool) {
			p.Reservations = append(slices.Clone(p.Reservations),
				lb.Reservation{Range: lb.Range{From: addr, To: addr}, Namespace: "default", Name: name})
		})
	}
	return pass(time.Duration(r.IntN(40)) * time.Second)
}

// askingForAnother names the Services that want another address than the one that they had last.
func askingForAnother(w *world) []string {
	var names []string
	for k, s := range w.services {
		if s.Request.Pool != "" || len(s.Request.Addresses) > 0 {
			names = append(names, k.Name)
		}
	}
	return names
}

// oldestFirst fails if a Service that asks for nothing special waits while a pool has an address
// for it.
func oldestFirst(t *testing.T, w *world, p Plan) {
	t.Helper()
	taken := map[netip.Addr]bool{}
	for _, s := range w.services {
		for _, addr := range addresses(s) {
			taken[addr] = true
		}
	}
	free, ruled := map[lb.Family]bool{}, len(w.nodes) > 0
	for name, pool := range w.pools {
		// Rules and quarantine have reasons of their own to let a Service wait.
		ruled = ruled || pool.Quarantine != 0 || pool.PerNamespace > 0 || pool.Allocation != nil || pool.AvoidBuggy ||
			len(pool.Excluded)+len(pool.Reservations) > 0
		if !pool.AutoAssign || !p.Pools[name].Status.Conditions[0].Status {
			continue
		}
		for _, r := range pool.Ranges {
			for addr := r.From; r.Contains(addr); addr = addr.Next() {
				if !taken[addr] {
					free[r.Family()] = true
				}
			}
		}
	}
	for k, s := range w.services {
		if ruled || len(s.Request.Addresses) > 0 || s.Request.Pool != "" || len(addresses(s)) > 0 {
			continue
		}
		if !slices.ContainsFunc(s.Families, func(f lb.Family) bool { return !free[f] }) {
			t.Errorf("%s waits (%v) although there is room", k, s.Conditions)
		}
	}
}
