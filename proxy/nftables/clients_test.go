package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// client is one that the kernel's map for session affinity remembers.
type client struct {
	group, place uint32
	to           netip.Addr
}

// clients reads which clients the kernel remembers.
func (a *testActor) clients(t testing.TB, family lb.Family) (all []client) {
	t.Helper()
	err := a.table(family).kernel.(netlinkKernel).listing().Elements(stickyMap, func(e nft.Element) {
		to, _ := netip.AddrFromSlice(e.Value)
		all = append(all, client{binary.NativeEndian.Uint32(e.Key), binary.NativeEndian.Uint32(e.Key[4:]), to})
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// remember makes the kernel remember a backend for the first places of a group.
func (a *testActor) remember(t testing.TB, family lb.Family, group uint32, places int, to netip.Addr) {
	t.Helper()
	const batch = 4000
	k := a.table(family).kernel.(netlinkKernel)
	for from := 0; from < places; from += batch {
		place, end := from, min(from+batch, places)
		b := nft.NewBatch(k.table())
		b.AddElements(stickyMap, func(e *nft.Element) bool {
			if place == end {
				return false
			}
			e.Key = binary.NativeEndian.AppendUint32(nil, group)
			e.Key = binary.NativeEndian.AppendUint32(e.Key, uint32(stickyPlaces+place))
			e.Value = to.AsSlice()
			place++
			return true
		})
		if err := b.Commit(k.socket); err != nil {
			t.Fatal(err)
		}
	}
}

// groupOf returns the group of a Service's first frontend.
func groupOf(t *table, key lb.Key) uint32 {
	for _, p := range t.applied[key].parts {
		if p.group != 0 {
			return p.group
		}
	}
	return 0
}

// TestALostBackendIsForgotten checks that a client whose backend is gone goes elsewhere with its
// next connection, and from then on there, also when the backend is back; and that a client that
// did not connect in between finds the backend again.
func TestALostBackendIsForgotten(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		world := func(sets map[string]map[string]string, at ...string) *walker {
			s, config := three(w, plan.Random, time.Hour, at...)
			out := newRenderer(family, config).service(s.Key, s.Only(family))
			walk := newWalker(t, newRuleset(family, config, neededBy(out)), nil, out)
			if sets != nil {
				walk.sets[stickyMap] = sets[stickyMap]
			}
			return walk
		}
		first := packetOf(w, cases.Case{From: "outside", To: "vip"})
		second := first
		second.src = netip.AddrPortFrom(first.src.Addr().Next(), 40000)
		backend := func(addr netip.Addr) netip.AddrPort { return netip.AddrPortFrom(addr, cases.BackendPort(lb.TCP)) }
		lost, other := backend(w.Local), backend(w.Local2)
		goes := func(when string, walk *walker, p packet, to netip.AddrPort) {
			t.Helper()
			if shares, _ := walk.fate(p); shares[to.String()] != 1 {
				t.Errorf("%s, %s: the client ends at %v, want %s", family, when, shares, to)
			}
		}
		walk := world(nil, "local", "local2", "remote")
		walk.establish(first, lost)
		walk.establish(second, lost)
		goes("at first", walk, first, lost)
		walk = world(walk.sets, "local2", "remote")
		if shares, _ := walk.fate(first); len(shares) != 2 || shares[lost.String()] > 0 {
			t.Errorf("%s: without its backend the client ends at %v, want one of two", family, shares)
		}
		if n := len(walk.sets[stickyMap]); n != 1 {
			t.Errorf("%s: %d clients are remembered, want the one that did not connect", family, n)
		}
		walk.establish(first, other)
		goes("remembered elsewhere", walk, first, other)
		walk = world(walk.sets, "local", "local2", "remote")
		goes("after its backend is back", walk, first, other)
		goes("who was away", walk, second, lost)
	}
}

// TestContract11AChangeDoesNotReadTheClients checks that neither a start nor the loss of a backend
// reads or writes what is remembered, however much that is.
func TestContract11AChangeDoesNotReadTheClients(t *testing.T) {
	if of, ok := setOf(stickyMap); ok {
		t.Errorf("a start reads %s as %+v", stickyMap, of)
	}
	kernels := fakeKernels()
	k, a := kernels[lb.IPv4].(*fakeKernel), fakeActor(kernels)
	a.Configure(plan.Config{})
	a.settle(t, map[lb.Key]plan.Service{manyLists(300).Key: manyLists(300)})
	loads, commits := k.loads, k.commits
	k.refuse = func(c change) error {
		if n := len(c.add) + len(c.remove); n > 4 {
			t.Errorf("a change of %d elements", n)
		}
		return nil
	}
	s := manyLists(300)
	s.Ports[7].Backends.Cluster[0].Addr = netip.MustParseAddrPort("10.3.0.1:80")
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	if k.loads != loads || k.commits != commits+1 {
		t.Errorf("another backend: the table was read %d times and written %d times, want once", k.loads-loads,
			k.commits-commits)
	}
}

// TestAnotherSizeHasAnotherMap checks that a start over a map of another size, as an older release
// has it, writes one of the right size and removes the old one.
func TestAnotherSizeHasAnotherMap(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	s := affineTo("10.1.0.1:8080", "10.1.0.2:8080")
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	k := a.table(lb.IPv4).kernel.(netlinkKernel)
	b := nft.NewBatch(k.table())
	for _, old := range newSets(nil, false) {
		if old.name == stickyMap {
			old.name, old.size = "clients-1048576", 1<<20
			b.AddSet(old.definition(lb.IPv4))
		}
	}
	if err := b.Commit(k.socket); err != nil {
		t.Fatal(err)
	}
	newTestActor(t, ns).settle(t, map[lb.Key]plan.Service{s.Key: s})
	out := ns.Run(t, "nft", "-t", "list", "maps")
	if want := fmt.Sprint("size ", stickyLimit); strings.Contains(out, "1048576") || !strings.Contains(out, want) {
		t.Errorf("the maps are %s, want one with %q", out, want)
	}
}

// TestContract11TogglingListsKeepsHalfTheMap checks that the places that a Service has with any
// number of lists are together at most half of the map.
func TestContract11TogglingListsKeepsHalfTheMap(t *testing.T) {
	total, splits := 0, map[uint32]bool{}
	for lists := 1; lists <= MaxElements/2; lists++ { // a list needs more than two elements
		split := splitFor(lists)
		if n, _ := places(split); int(n)*lists > stickyShare {
			t.Fatalf("%d lists have %d places each, together more than %d", lists, n, stickyShare)
		}
		if !splits[split] {
			splits[split], total = true, total+stickyShare
		}
	}
	if total > stickyLimit/2 {
		t.Errorf("with any number of lists a Service may have %d places, want at most %d", total, stickyLimit/2)
	}
}

// BenchmarkLoseBackend measures a change of a Service that is remembered for as many clients as
// there are places, and a start.
func BenchmarkLoseBackend(b *testing.B) {
	ns := nstest.New(b)
	a := newTestActor(b, ns)
	two, one := affineTo("10.1.0.1:8080", "10.1.0.2:8080"), affineTo("10.1.0.2:8080")
	a.settle(b, map[lb.Key]plan.Service{two.Key: two})
	a.remember(b, lb.IPv4, groupOf(a.table(lb.IPv4), two.Key), stickyPlaces, addr("10.1.0.1"))
	b.Run("change", func(b *testing.B) {
		for b.Loop() {
			a.settle(b, map[lb.Key]plan.Service{one.Key: one})
			a.settle(b, map[lb.Key]plan.Service{two.Key: two})
		}
	})
	b.Run("start", func(b *testing.B) {
		for b.Loop() {
			newTestActor(b, ns).settle(b, map[lb.Key]plan.Service{two.Key: two})
		}
	})
}
