package rescue

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// Desired is all that the speaker says.
type Desired struct {
	Previous, Ring map[netip.Addr][]netip.Addr
	Gone           []netip.Addr
	CutOff         bool
}

// all is what is said of each VIP.
func (w Desired) all() map[netip.Addr]Origins {
	all := map[netip.Addr]Origins{}
	for _, of := range []map[netip.Addr][]netip.Addr{w.Previous, w.Ring} {
		for vip := range of {
			all[vip] = Origins{Previous: w.Previous[vip], Ring: w.Ring[vip]}
		}
	}
	return all
}

// set tells an actor what differs from what it was told before.
func (a *Actor) set(w Desired) {
	begun := a.take()
	changes := map[netip.Addr]*Origins{}
	for vip := range a.all {
		changes[vip] = nil
	}
	for vip, o := range w.all() {
		before, known := a.all[vip]
		if known && slices.Equal(before.Previous, o.Previous) && slices.Equal(before.Ring, o.Ring) {
			delete(changes, vip)
		} else {
			changes[vip] = &o
		}
	}
	a.SetGone(w.Gone, w.CutOff)
	if begun {
		a.Update(changes)
	} else {
		a.Begin(changes)
	}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func there(last byte) links.Neighbor {
	return links.Neighbor{MAC: [6]byte{2, 0, 0, 0, 0, last}, Found: true}
}

func TestChoose(t *testing.T) {
	vip1, vip2, vip6 := addr("192.0.2.1"), addr("192.0.2.2"), addr("2001:db8::1")
	a, b, c, a6 := addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.3"), addr("fd00::1")
	all := map[netip.Addr]links.Neighbor{a: there(1), b: there(2), c: there(3), a6: there(1)}
	dead := maps.Clone(all)
	dead[a] = links.Neighbor{MAC: [6]byte{2, 0, 0, 0, 0, 1}, Failed: true}
	type owners = map[netip.Addr][]netip.Addr
	for _, test := range []struct {
		name      string
		family    lb.Family
		w         Desired
		neighbors map[netip.Addr]links.Neighbor
		sent      []netip.Addr
		targets   owners
		peers     []byte
	}{
		{"nothing", lb.IPv4, Desired{}, all, nil, owners{}, nil},
		{"one family", lb.IPv4, Desired{Previous: owners{vip1: {a}, vip6: {a6}}}, all, nil, owners{a: {vip1}}, []byte{1}},
		{"the other family", lb.IPv6, Desired{Previous: owners{vip1: {a}, vip6: {a6}}}, all, nil, owners{a6: {vip6}},
			[]byte{1}},
		{"the likeliest, and packets of all come over", lb.IPv4, Desired{Previous: owners{vip1: {b, a}, vip2: {b}}}, all,
			nil,
			owners{b: {vip1, vip2}}, []byte{1, 2}},
		{"not there yet", lb.IPv4, Desired{Previous: owners{vip1: {a}}}, nil, nil, owners{}, nil},
		{"the likeliest answers no more", lb.IPv4, Desired{Previous: owners{vip1: {a, b}}}, dead, nil, owners{b: {vip1}},
			[]byte{2}},
		{"the likeliest is said to be gone", lb.IPv4, Desired{Previous: owners{vip1: {a, b}}, Gone: []netip.Addr{a}}, all,
			nil,
			owners{b: {vip1}}, []byte{2}},
		{"what was sent goes on", lb.IPv4, Desired{Previous: owners{vip1: {b}}}, all, []netip.Addr{a, b},
			owners{a: nil, b: {vip1}}, []byte{1, 2}},
		{"unknown is not absent", lb.IPv4, Desired{}, nil, []netip.Addr{a}, owners{a: nil}, nil},
		{"until the node is gone", lb.IPv4, Desired{}, dead, []netip.Addr{a}, owners{}, nil},
		{"or said to be", lb.IPv4, Desired{Gone: []netip.Addr{a}}, all, []netip.Addr{a}, owners{}, nil},
	} {
		j := judge{neighbors: test.neighbors, lost: losses{test.w.Gone, test.w.CutOff}}
		got := choose(test.family, test.w.all(), j, test.sent)
		var peers []byte
		for _, peer := range got.peers {
			peers = append(peers, peer[5])
		}
		if d := cmp.Diff(test.targets, got.targets, cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()); d != "" ||
			!slices.Equal(peers, test.peers) {
			t.Errorf("%s: peers %v, want %v; targets (-want +got):\n%s", test.name, peers, test.peers, d)
		}
	}
}

func TestChooseIsBounded(t *testing.T) {
	w := Desired{Previous: map[netip.Addr][]netip.Addr{}}
	neighbors := map[netip.Addr]links.Neighbor{}
	var sent []netip.Addr
	for i := range byte(200) {
		node := netip.AddrFrom4([4]byte{10, 0, 0, i})
		neighbors[node] = there(i)
		w.Previous[netip.AddrFrom4([4]byte{192, 0, 2, i})] = []netip.Addr{node}
		sent = append(sent, netip.AddrFrom4([4]byte{10, 0, 1, i}))
	}
	if got := choose(lb.IPv4, w.all(), judge{neighbors: neighbors}, sent); len(got.targets) != maxTargets+maxDirect ||
		len(got.others) != maxTargets {
		t.Errorf("%d targets, %d with addresses", len(got.targets), len(got.others))
	}
}

// VIPs that are forwarded directly leave the targets of the others alone, however many they are, in
// whichever order they come, and all at once or one by one.
func TestContract11DirectVIPsTakeNoTargetsFromOthers(t *testing.T) {
	all, j := map[netip.Addr]Origins{}, judge{neighbors: map[netip.Addr]links.Neighbor{}}
	node := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }
	var direct, others []netip.Addr
	for i := range 120 {
		j.neighbors[node(i)] = there(byte(i))
		vip := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}) // ahead of the others
		direct = append(direct, vip)
		o := Origins{Direct: true}
		for k := range 16 {
			o.Ring = append(o.Ring, node((i+k)%120))
		}
		all[vip] = o
	}
	for i := range maxTargets {
		vip := netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
		others = append(others, vip)
		all[vip] = Origins{Previous: []netip.Addr{node(119 - i)}}
	}
	check := func(what string, got *table) {
		t.Helper()
		for _, vip := range others {
			if len(got.of(vip)) != 1 {
				t.Errorf("%s: %s has the targets %v", what, vip, got.of(vip))
			}
		}
		if len(got.targets) > maxTargets+maxDirect {
			t.Errorf("%s: %d targets", what, len(got.targets))
		}
		if asked := len(got.ring); asked < maxDirect {
			t.Errorf("%s: of %d direct VIPs, only %d have a target", what, len(direct), asked)
		}
	}
	at := choose(lb.IPv4, all, j, nil)
	check("at once", at)
	for _, order := range [][]netip.Addr{slices.Concat(direct, others), slices.Concat(others, direct)} {
		now := newTable()
		for _, vip := range order {
			now.add(vip, all[vip], j)
		}
		check("one by one", now)
		for _, vip := range slices.Concat(others, direct) {
			now.remove(vip, all[vip], j)
		}
		if len(now.others)+len(now.hops)+len(now.ring)+len(now.lengths()) > 0 {
			t.Errorf("removed, it still counts %v, %v", now.others, now.hops)
		}
	}
}

// A VIP that changes alone gets the target that it gets by a look: nodes that are only remembered take
// no places from it.
func TestContract5NodesThatAreOnlyRememberedTakeNoPlaces(t *testing.T) {
	for _, tt := range []struct {
		name   string
		nodes  int
		length int
		direct bool
	}{{"rings of 17 among 120 nodes", 120, 16, false}, {"rings of 2 among 120 nodes", 120, 1, false},
		{"direct, 1 endpoint elsewhere, among 40 nodes", 40, 1, true}} {
		t.Run(tt.name, func(t *testing.T) {
			k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
			var nodes []netip.Addr
			for i := range tt.nodes {
				node := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
				nodes, k.neighbor[node] = append(nodes, node), there(byte(i))
			}
			nodes = append(nodes, nodes...)
			a := newActor(fakeDeps, k)
			vip, keeps := addr("192.0.2.1"), addr("192.0.2.2")
			origins := func(i int) *Origins { return &Origins{Ring: nodes[i : i+tt.length], Direct: tt.direct} }
			step := func(look bool) {
				if look {
					a.looked = time.Time{}
				}
				if _, err := a.step(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			all := map[netip.Addr]*Origins{vip: origins(0), keeps: origins(0)}
			for i := 0; i < tt.nodes; i += lb.MaxRing { // so each node is known
				all[netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + i)})] = &Origins{Ring: nodes[i : i+lb.MaxRing]}
			}
			a.Begin(all)
			for range 3 {
				step(true)
			}
			for turn := range tt.nodes + 8 { // another node is the next one on the ring
				i := turn % tt.nodes
				a.Update(map[netip.Addr]*Origins{vip: origins(i)})
				step(false)
				for range 2 {
					step(true)
				}
				if got := a.written[lb.IPv4].of(vip); len(got) != 1 || got[0] != nodes[i] {
					want := choose(lb.IPv4, a.all, judge{neighbors: a.known}, a.written[lb.IPv4].nodes()).of(vip)
					t.Fatalf("turn %d, after two looks: targets %v for the VIP, of %d; choose says %v; on a ring %t", turn, got,
						len(a.written[lb.IPv4].targets), want, len(a.written[lb.IPv4].ring) == len(all))
				}
				if tt.direct { // and back
					a.Update(map[netip.Addr]*Origins{vip: origins(0)})
					for range 4 {
						step(true)
					}
				}
			}
		})
	}
}

// A proxy that starts waits for nodes in the rules that it finds, not for others, nor for dead ones.
func TestContract5AProxyThatStartsWaitsForNoOthers(t *testing.T) {
	near, silent := addr("10.0.0.1"), addr("10.0.0.9")
	for name, test := range map[string]struct {
		found map[netip.Addr]uint64
		gone  []netip.Addr
		waits bool
	}{
		"for one in the rules":       {found: map[netip.Addr]uint64{near: 0, silent: 0}, waits: true},
		"for one that is not":        {found: map[netip.Addr]uint64{near: 0}},
		"for one there that is gone": {found: map[netip.Addr]uint64{near: 0, silent: 0}, gone: []netip.Addr{silent}},
	} {
		k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{near: there(1)}}
		k.have = held{exists: true, sent: test.found}
		a := newActor(fakeDeps, k)
		a.Begin(map[netip.Addr]*Origins{addr("192.0.2.1"): {Previous: []netip.Addr{near}},
			addr("192.0.2.2"): {Ring: []netip.Addr{silent, near}}})
		a.SetGone(test.gone, false)
		if _, err := a.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if waits := a.Targets() == 0; waits != test.waits {
			t.Errorf("%s: it waits: %v", name, waits)
		}
	}
}

// A VIP that has found the table full of others' targets gets one as soon as there is room, also if that comes without
// a target going: one is left to VIPs that are forwarded directly.
func TestContract5RoomThatComesIsUsed(t *testing.T) {
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	all := map[netip.Addr]*Origins{}
	vip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}) }
	for i := range maxTargets + 1 {
		node := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		k.neighbor[node], all[vip(i)] = there(byte(i)), &Origins{Ring: []netip.Addr{node}}
	}
	waits := vip(maxTargets)
	all[addr("192.0.2.200")] = &Origins{Ring: all[vip(0)].Ring, Direct: true}
	a := newActor(fakeDeps, k)
	a.Begin(all)
	step := func() []netip.Addr {
		t.Helper()
		if _, err := a.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		return a.written[lb.IPv4].of(waits)
	}
	step()
	if got := step(); len(got) > 0 {
		t.Fatalf("%s has the targets %v: the test shows nothing", waits, got)
	}
	a.Update(map[netip.Addr]*Origins{vip(0): nil})
	if got := step(); len(got) != 1 {
		t.Errorf("with room %s has the targets %v", waits, got)
	}
}

// fakeKernel has one family's table in memory.
type fakeKernel struct {
	have      held
	table     table
	neighbor  map[netip.Addr]links.Neighbor
	fail      error // of the next write
	unread    error // of the next load
	loads     int
	writes    int
	edits     int
	lastAsked []netip.Addr
	loosened  []int
	tightened int
	strict    error
	forgetful error // of remember, and of the notes that tighten needs
	// carried is what the tunnel was last asked to be, nil if there is none.
	carried     *tunnel.Desired
	tunnel      int
	refused     uint64
	cannotCarry error
	cannotEnd   error // of the next uncarry
}

func (k *fakeKernel) load(_ lb.Family, all bool) (held, error) {
	k.loads++
	if err := k.unread; err != nil {
		k.unread = nil
		return held{}, err
	}
	have := k.have
	if all {
		have.table, have.rings = k.table, k.table.rings()
	}
	have.sent = maps.Clone(have.sent)
	return have, nil
}

func (k *fakeKernel) write(_ lb.Family, want *table, _ held) error {
	k.writes++
	if err := k.fail; err != nil {
		k.fail = nil
		return err
	}
	k.table = table{targets: map[netip.Addr][]netip.Addr{}, peers: slices.Clone(want.peers),
		ring: slices.Clone(want.ring), hops: maps.Clone(want.hops), onRing: map[netip.Addr][]netip.Addr{}}
	for node, vips := range want.onRing {
		k.table.onRing[node] = slices.Clone(vips)
	}
	k.have = held{exists: len(want.targets) > 0, sent: map[netip.Addr]uint64{}, moving: map[netip.Addr][]string{}}
	for _, node := range want.nodes() {
		k.table.targets[node] = slices.Clone(want.targets[node])
		k.have.sent[node], k.have.moving[node] = 0, headerOf(lb.IPv4).moving(want, node)
	}
	if k.have.exists {
		h := headerOf(lb.IPv4)
		k.have.rules, k.have.limits = nft.UserData(h.strayRules(want)), h.limitsOf(want.limit)
		k.have.errors = nft.UserData(h.errorRules(want))
		k.have.recall, k.have.offRing = nft.UserData(h.recallRules(want)), nft.UserData(h.offRingRules(want))
	}
	return nil
}

func (k *fakeKernel) carry(_ lb.Family, d tunnel.Desired) (tunnel.State, error) {
	k.carried = &d
	if k.cannotCarry != nil {
		return tunnel.State{}, k.cannotCarry
	}
	return tunnel.State{Link: k.tunnel, MTU: d.MTU, Refused: k.refused}, nil
}

func (k *fakeKernel) uncarry(lb.Family) error {
	if err := k.cannotEnd; err != nil {
		k.cannotEnd = nil
		return err
	}
	k.carried = nil
	return nil
}

func (k *fakeKernel) edit(_ lb.Family, edits []edit) error {
	k.edits++
	if err := k.fail; err != nil {
		k.fail = nil
		return err
	}
	for _, e := range edits {
		for _, node := range e.from {
			k.table.targets[node] = drop(k.table.targets[node], e.vip)
		}
		for _, node := range e.to {
			k.table.targets[node] = insert(k.table.targets[node], e.vip)
		}
		k.table.ring = drop(k.table.ring, e.vip)
		if delete(k.table.hops, e.vip); e.hops.to > 0 {
			k.table.ring, k.table.hops[e.vip] = insert(k.table.ring, e.vip), e.hops.to
		}
		for _, node := range e.leaves {
			if k.table.onRing[node] = drop(k.table.onRing[node], e.vip); len(k.table.onRing[node]) == 0 {
				delete(k.table.onRing, node)
			}
		}
		for _, node := range e.joins {
			k.table.onRing[node] = insert(k.table.onRing[node], e.vip)
		}
	}
	return nil
}

func (k *fakeKernel) loosen(_ string, from []int) ([]string, error) {
	k.loosened = append(k.loosened, from...)
	return nil, k.strict
}

func (k *fakeKernel) remember(string, map[string]int) error { return k.forgetful }

func (k *fakeKernel) tighten(string, map[string]int) ([]string, error) {
	if k.forgetful != nil {
		return nil, k.forgetful
	}
	k.tightened++
	return nil, k.strict
}

func (k *fakeKernel) neighbors(_ lb.Family, nodes []netip.Addr) (map[netip.Addr]links.Neighbor, error) {
	k.lastAsked = nodes
	found := maps.Clone(k.neighbor)
	maps.DeleteFunc(found, func(node netip.Addr, _ links.Neighbor) bool { return !slices.Contains(nodes, node) })
	return found, nil
}

var fakeDeps = Deps{Log: slog.New(slog.DiscardHandler), Families: []lb.Family{lb.IPv4}, Ring: true}

func TestActor(t *testing.T) {
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{addr("10.0.0.1"): there(1)}}
	a := newActor(fakeDeps, k)
	step := func(writes int) {
		t.Helper()
		a.looked = time.Time{} // it is time for a look
		if _, err := a.step(t.Context()); err != nil {
			t.Log(err)
		}
		if k.writes != writes {
			t.Errorf("%d writes, want %d", k.writes, writes)
		}
	}
	step(0) // nothing is known
	w := from("192.0.2.1", "10.0.0.1")
	a.set(w)
	k.fail = errors.New("no such expression")
	step(1)
	step(2) // again, after the failure
	step(2) // all is well
	if a.Targets() != 1 {
		t.Errorf("%d targets", a.Targets())
	}
	k.have.sent[addr("10.0.0.1")] = 7
	step(2)
	k.have.sent[addr("10.0.0.1")] = 9
	step(2)
	k.have.sent[addr("10.0.0.1")] = 1 // another program has written it anew
	step(2)
	if a.Packets() != 10 {
		t.Errorf("%d packets", a.Packets())
	}
	next := newActor(fakeDeps, k)
	next.set(w)
	if _, err := next.step(t.Context()); err != nil || k.writes != 2 {
		t.Errorf("a successor wrote what was right: %v", err)
	}
	k.have = held{} // another program has removed it
	step(3)
	k.neighbor = map[netip.Addr]links.Neighbor{} // the kernel has forgotten the node
	step(3)
	a.set(Desired{Gone: []netip.Addr{addr("10.0.0.1")}})
	step(4)
	if k.have.exists || a.Targets() != 0 {
		t.Error("the table is still there")
	}
}

// TestContract5TheKernelHasWhatIsConfirmed: a number is confirmed once the kernel has what came
// before it and all nodes were looked for, with and without a look at the kernel.
func TestContract5TheKernelHasWhatIsConfirmed(t *testing.T) {
	vip1, vip2, a, b := addr("192.0.2.1"), addr("192.0.2.2"), addr("10.0.0.1"), addr("10.0.0.2")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	var confirmed []uint64
	deps := fakeDeps
	deps.Confirmed = func(number uint64) { confirmed = append(confirmed, number) }
	actor := newActor(deps, k)
	step := func(what string, look bool, want ...uint64) {
		t.Helper()
		loads := k.loads
		_, _ = actor.step(t.Context())
		if k.loads > loads != look {
			t.Errorf("%s: looked %v", what, !look)
		}
		if !slices.Equal(confirmed, want) {
			t.Errorf("%s: confirmed %v, want %v", what, confirmed, want)
		}
		confirmed = nil
	}
	type owners = map[netip.Addr][]netip.Addr
	tell := func(number uint64, ring owners, gone ...netip.Addr) {
		actor.set(Desired{Ring: ring, Gone: gone})
		actor.Confirm(number)
	}
	step("nothing was told", false)
	tell(1, owners{vip1: {a}})
	step("the node was not found yet", true)
	k.neighbor[a] = there(1)
	k.fail = errors.New("no such expression")
	step("the kernel refuses it", true)
	step("all is there", true, 1)
	step("nothing has changed", false)
	tell(2, owners{vip1: {a}, vip2: {a}})
	step("a change among nodes in use", false, 2)
	k.neighbor[b] = links.Neighbor{Failed: true}
	tell(3, owners{vip1: {a, b}, vip2: {a}})
	step("a node does not answer", true)
	actor.looked = time.Time{}
	k.neighbor[b] = there(2)
	step("it answers", true, 3)
	actor.looked = time.Time{}
	k.neighbor[b] = links.Neighbor{Failed: true}
	tell(4, owners{vip1: {a, b}, vip2: {a}})
	step("it does not answer any more", true)
	tell(5, owners{vip1: {a}, vip2: {a}}, b)
	step("and is dead", true, 5)
	delete(k.neighbor, b)
	actor.looked, actor.known = time.Time{}, map[netip.Addr]links.Neighbor{}
	tell(6, owners{vip1: {a, b}, vip2: {a}})
	for range soonLooks - 1 {
		step("one is behind a router", true)
	}
	step("which is not waited for", true, 6)
}

// A change of single VIPs among nodes that are in use needs no look at the kernel; a node that
// comes into use, or a write that fails, does.
func TestAChangeNeedsNoLook(t *testing.T) {
	vip1, vip2, a, b := addr("192.0.2.1"), addr("192.0.2.2"), addr("10.0.0.1"), addr("10.0.0.2")
	stays, staysToo := addr("192.0.2.8"), addr("192.0.2.9")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{a: there(1), b: there(2)}}
	actor := newActor(fakeDeps, k)
	type owners = map[netip.Addr][]netip.Addr
	step := func(looks bool, previous owners) {
		t.Helper()
		loads := k.loads
		actor.set(Desired{Previous: previous})
		if _, err := actor.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := k.loads > loads; got != looks {
			t.Errorf("%v: looked %v, want %v", previous, got, looks)
		}
		want := choose(lb.IPv4, actor.all, judge{neighbors: k.neighbor}, slices.Collect(maps.Keys(k.have.sent)))
		if !k.table.equal(want) {
			t.Errorf("%v: the kernel has %+v, want %+v", previous, k.table, want)
		}
	}
	step(true, owners{vip1: {a}})
	step(false, owners{vip1: {a}, vip2: {a}})
	step(true, owners{vip1: {a}, vip2: {b}})
	step(true, owners{vip1: {b}, vip2: {b}}) // a is for nothing any more
	step(true, owners{vip1: {b}, stays: {a}, staysToo: {b}})
	step(false, owners{vip1: {b}, vip2: {a}, stays: {a}, staysToo: {b}})
	step(false, owners{vip1: {a}, vip2: {b, a}, stays: {a}, staysToo: {b}})
	step(false, owners{stays: {a}, staysToo: {b}})
	k.fail = errors.New("no")
	step(true, owners{vip1: {b}, stays: {a}, staysToo: {b}})
	k.have.rules = k.have.rules[1:] // another program's doing, which is seen at the next look
	actor.looked = actor.looked.Add(-lookEvery)
	writes := k.writes
	step(true, owners{vip1: {b}, stays: {a}, staysToo: {b}})
	if k.writes != writes+1 {
		t.Error("it was not put right")
	}
}

// Other nodes answer no more where this node's own link was away. They are looked for often then,
// as connections arrive with the link; unless the speaker takes them for dead.
func TestContract5NodesThatAnswerAgainAreFoundSoon(t *testing.T) {
	node, other := addr("10.0.0.1"), addr("10.0.0.2")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{node: {Failed: true}, other: there(2)}}
	a := newActor(fakeDeps, k)
	step := func(what string, after, next time.Duration, targets int) {
		t.Helper()
		a.looked = a.looked.Add(-after)
		if got, err := a.step(t.Context()); err != nil || got != next || a.Targets() != targets {
			t.Errorf("%s: next after %s, %v, with %d targets; want %s and %d", what, got, err, a.Targets(), next, targets)
		}
	}
	a.set(from("192.0.2.1", "10.0.0.1", "192.0.2.2", "10.0.0.2"))
	step("it does not answer", 0, lookFailed, 1)
	step("nor later", lookFailed, lookFailed, 1)
	k.neighbor[node] = there(1)
	step("it answers again", lookFailed, lookEvery, 2)
	k.neighbor[node] = links.Neighbor{Failed: true}
	step("no more", lookEvery, lookFailed, 1)
	w := from("192.0.2.1", "10.0.0.1", "192.0.2.2", "10.0.0.2")
	w.Gone = []netip.Addr{node}
	a.set(w)
	step("it is dead", lookFailed, lookEvery, 1)
}

// A node that is cut off finds that nobody answers. It goes on to move connections to the others:
// once it is connected again, such connections may be the first to arrive.
func TestContract5ANodeThatIsCutOffKeepsItsTargets(t *testing.T) {
	node, other, unseen := addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.3")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{node: there(1), other: there(2), unseen: {Failed: true}}}
	a := newActor(fakeDeps, k)
	vip := addr("192.0.2.1")
	w := Desired{Ring: map[netip.Addr][]netip.Addr{vip: {node, other, unseen}}}
	step := func(what string, hops, targets int) {
		t.Helper()
		a.set(w)
		a.looked = time.Time{}
		if _, err := a.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if a.Targets() != targets || k.table.hops[vip] != hops {
			t.Errorf("%s: %d targets, %d hops, want %d and %d", what, a.Targets(), k.table.hops[vip], targets, hops)
		}
	}
	step("together", 2, 1)
	k.neighbor[other] = links.Neighbor{Failed: true}
	step("one is not found before the speaker says why", 1, 1)
	w.CutOff = true
	step("it does", 3, 1)
	k.neighbor[node] = links.Neighbor{Failed: true}
	step("nobody answers", 3, 1)
	k.neighbor[node], k.neighbor[other] = links.Neighbor{}, links.Neighbor{}
	step("connected, and asking", 3, 1)
	k.neighbor[node], k.neighbor[other] = there(1), there(2)
	step("found", 3, 1)
	w.CutOff = false
	step("together again", 2, 1)
	k.neighbor[node], k.neighbor[other] = links.Neighbor{Failed: true}, links.Neighbor{Failed: true}
	step("they do not answer this time", 0, 0)
}

// However many nodes have come and gone, an actor remembers those that are named or were moved to.
func TestContract11NodesThatAreGoneAreForgotten(t *testing.T) {
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	a := newActor(fakeDeps, k)
	vip := addr("192.0.2.1")
	for i := range 200 {
		node := netip.AddrFrom4([4]byte{10, 0, 1, byte(i)})
		k.neighbor[node] = there(byte(i))
		for _, gone := range []bool{false, true} {
			w := Desired{Ring: map[netip.Addr][]netip.Addr{vip: {node}}}
			if gone {
				w.Gone = []netip.Addr{node}
			}
			a.set(w)
			a.looked = time.Time{}
			if _, err := a.step(t.Context()); err != nil {
				t.Fatal(err)
			}
			for target := range k.have.sent {
				k.have.sent[target] = 1
			}
		}
	}
	if n := len(a.known) + len(a.counted) + len(a.asked) + len(a.away); n > 4 {
		t.Errorf("%d nodes are known, %d counted, %d asked for, %d away", len(a.known), len(a.counted), len(a.asked),
			len(a.away))
	}
}

// A proxy that starts without addresses, and finds a table with a node that does not answer, looks after it.
func TestContract6ATableThatIsFoundIsLookedAfter(t *testing.T) {
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	k.have = held{exists: true, sent: map[netip.Addr]uint64{addr("10.0.0.1"): 0}}
	a := newActor(fakeDeps, k)
	a.Begin(nil)
	for look := range soonLooks + 1 {
		a.looked = time.Time{}
		next, err := a.step(t.Context())
		want := map[bool]time.Duration{true: lookSoon, false: lookEvery}[look < soonLooks-1]
		if err != nil || next != want || (k.writes > 0) != (look >= soonLooks-1) {
			t.Errorf("look %d: the next one is after %s, %v, want %s; %d writes", look, next, err, want, k.writes)
		}
	}
}

// What could not be read is not taken for written by the next step, nor confirmed.
func TestContract6AFailedLookIsRepeated(t *testing.T) {
	vip, other, node := addr("192.0.2.1"), addr("192.0.2.2"), addr("10.0.0.1")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{node: there(1)}}
	deps := fakeDeps
	var confirmed []uint64
	deps.Confirmed = func(number uint64) { confirmed = append(confirmed, number) }
	a := newActor(deps, k)
	a.set(from(vip.String(), node.String()))
	if _, err := a.step(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.set(from(vip.String(), node.String(), other.String(), node.String()))
	a.Confirm(1)
	a.looked = time.Time{} // it is time for a look
	k.unread = errors.New("no buffer")
	if _, err := a.step(t.Context()); err == nil || len(confirmed) > 0 {
		t.Fatalf("the look has failed: %v, confirmed %v", err, confirmed)
	}
	if _, err := a.step(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := k.table.targets[node]; !slices.Contains(got, other) || !slices.Equal(confirmed, []uint64{1}) {
		t.Errorf("the kernel has %v, confirmed %v", got, confirmed)
	}
}

// BenchmarkChange has one of many VIPs on a ring move, in memory.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{1000, 20000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			nodes := []netip.Addr{addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.3")}
			k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
			for i, node := range nodes {
				k.neighbor[node] = there(byte(i))
			}
			a := newActor(fakeDeps, k)
			all := map[netip.Addr]*Origins{}
			vip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 20, byte(i >> 8), byte(i)}) }
			for i := range n {
				all[vip(i)] = &Origins{Ring: []netip.Addr{nodes[i%3], nodes[(i+1)%3], nodes[(i+2)%3]}}
			}
			a.Begin(all)
			if err := a.apply(); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				a.Update(
					map[netip.Addr]*Origins{vip(i % n): {Ring: []netip.Addr{nodes[i/7%3], nodes[(i/7+1)%3], nodes[(i/7+2)%3]}}})
				if !a.adjust() {
					b.Fatal("it needs a look")
				}
			}
		})
	}
}

// What the speaker says again costs nothing more, and what differs is taken.
func TestOnlyWhatDiffersIsTaken(t *testing.T) {
	vip, other, node, next := addr("192.0.2.1"), addr("192.0.2.2"), addr("10.0.0.1"), addr("10.0.0.2")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{node: there(1), next: there(2)}}
	a := newActor(fakeDeps, k)
	say := func(ring ...netip.Addr) map[netip.Addr]*Origins {
		return map[netip.Addr]*Origins{vip: {Ring: ring}, other: {Ring: []netip.Addr{node, next}}}
	}
	a.Begin(say(node, next))
	if err := a.apply(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ring []netip.Addr
		want int
	}{{[]netip.Addr{node, next}, 0}, {[]netip.Addr{next, node}, 1}, {[]netip.Addr{next}, 1}, {nil, 1}, {nil, 0}} {
		a.Update(say(c.ring...))
		a.take()
		if got := len(a.changed); got != c.want {
			t.Errorf("%v: %d VIPs differ, want %d", c.ring, got, c.want)
		}
		if !a.adjust() {
			if err := a.apply(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Many changes at once end where few do, and where a look at the kernel does.
func TestContract6ManyChangesEndWhereFewDo(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var nodes []netip.Addr
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	for i := range 5 {
		node := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		nodes, k.neighbor[node] = append(nodes, node), there(byte(i))
	}
	a := newActor(fakeDeps, k)
	w := map[netip.Addr]*Origins{}
	for i, node := range nodes { // each is a target for something, and each length of a ring stays
		w[netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})] = &Origins{Previous: []netip.Addr{node}}
		w[netip.AddrFrom4([4]byte{192, 0, 3, byte(i)})] = &Origins{Ring: slices.Concat(nodes[i:], nodes[:i])[:i+1]}
	}
	a.Begin(w)
	if _, err := a.step(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := a.step(t.Context()); err != nil { // so that all is known that was written
		t.Fatal(err)
	}
	before := []int{k.loads, k.edits}
	most := 0
	for range 40 {
		changes := map[netip.Addr]*Origins{}
		for range r.IntN(3 * manyChanges) {
			vip := netip.AddrFrom4([4]byte{172, 20, byte(r.IntN(3)), byte(r.IntN(256))})
			order := slices.Clone(nodes)
			r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			order = order[:1+r.IntN(len(order))]
			changes[vip] = []*Origins{nil, {Previous: order}, {Ring: order}, {Ring: order}}[r.IntN(4)]
		}
		most = max(most, len(changes))
		a.Update(changes)
		a.looked = time.Now()
		if _, err := a.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := choose(lb.IPv4, a.all, judge{neighbors: k.neighbor}, nodes)
		if !k.table.equal(want) || !a.written[lb.IPv4].equal(want) {
			t.Fatalf("after %d changes the kernel has %+v, want %+v", len(changes), k.table, want)
		}
	}
	if k.loads != before[0] || k.edits < before[1]+40 || most <= manyChanges {
		t.Errorf("%d looks, %d edits, %d changes at most: the test shows nothing", k.loads-before[0], k.edits-before[1], most)
	}
}

// deaf is a kernel whose edits cost nothing.
type deaf struct{ *fakeKernel }

func (deaf) edit(lb.Family, []edit) error { return nil }

// BenchmarkAll has the speaker say something of all VIPs on rings of 17 nodes: the same as before,
// as when a node comes that announces none of them; or other rings, as when one comes that
// announces all, or when the order changes.
func BenchmarkAll(b *testing.B) {
	const vips = 10_000
	var nodes []netip.Addr
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	for i := range lb.MaxRing {
		node := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
		nodes, k.neighbor[node] = append(nodes, node), there(byte(i))
	}
	say := func(shift, length int) map[netip.Addr]*Origins {
		all := map[netip.Addr]*Origins{}
		for i := range vips {
			from := (i + shift) % len(nodes)
			vip := netip.AddrFrom4([4]byte{172, 20, byte(i >> 8), byte(i)})
			all[vip] = &Origins{Ring: slices.Concat(nodes[from:], nodes[:from])[:length]}
		}
		return all
	}
	for _, bench := range []struct {
		name string
		says []map[netip.Addr]*Origins
	}{
		{"again", []map[netip.Addr]*Origins{say(0, 12)}},
		{"another order", []map[netip.Addr]*Origins{say(0, 12), say(1, 12)}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			a := newActor(fakeDeps, deaf{k})
			a.Begin(bench.says[0])
			if err := a.apply(); err != nil {
				b.Fatal(err)
			}
			for i := 1; b.Loop(); i++ {
				a.Update(bench.says[i%len(bench.says)])
				if !a.adjust() {
					b.Fatal("it needs a look")
				}
			}
		})
	}
}
