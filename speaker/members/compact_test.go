package members

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// address returns the nth address of a pool; every 16th is IPv6.
func address(n int) netip.Addr {
	var b [16]byte
	if n%16 == 15 {
		copy(b[:], []byte{0x20, 0x01, 0x0d, 0xb8})
		binary.BigEndian.PutUint32(b[12:], uint32(n))
		return netip.AddrFrom16(b)
	}
	binary.BigEndian.PutUint32(b[:4], 0x0a000000+uint32(n))
	return netip.AddrFrom4([4]byte(b[:4]))
}

// manyAlike are the states of nodes in a cluster: all claim most VIPs, and each announces its share
// of them; a quarter of the Services has policy Local, with three endpoints each, and every third
// node has another weight.
func manyAlike(nodes, vips int) []update {
	var updates []update
	for node := range nodes {
		j := newJournal(fmt.Sprintf("k8s-worker-%04d", node), 1700000000000000000+uint64(node))
		claims := map[netip.Addr]*plan.Claim{}
		for n := range vips {
			claim := plan.Claim{Answering: n%nodes == node, Weight: uint16(node % 3 * 10)}
			if n%4 == 3 && (n*7)%nodes != node && (n*11)%nodes != node && (n*13)%nodes != node {
				claim = plan.Claim{Reason: lb.ReasonNoLocalBackends}
			}
			claims[address(n)] = &claim
		}
		j.set(claims)
		updates = append(updates, j.full().compacted())
	}
	return updates
}

func TestCompactRoundTrip(t *testing.T) {
	empty := update{node: "n0", born: 1}
	changes := update{node: "n9", born: 5, entries: []entry{{vip: vip1, seq: 9, gone: true},
		{vip: vip6, seq: 1 << 40, claim: plan.Claim{Reason: lb.ReasonStopping, Answering: true, Weight: 300, Parted: true}},
		{vip: vip2, seq: 2, claim: plan.Claim{Routes: "tor-1", Unrouted: lb.ReasonStopping}}}}
	saysNothing := update{node: "n8", born: 5, floor: 7}.compacted()
	more := update{node: "n7", born: 5, floor: 1, entries: []entry{{vip: vip1, seq: 1}, changes.entries[0]}}.compacted()
	for name, updates := range map[string][]update{
		"none": nil, "one empty": {empty}, "changes": {changes}, "says nothing": {saysNothing},
		"changes after a whole": {more},
		"many":                  manyAlike(20, 500),
		"all of these":          append(manyAlike(10, 300), empty, changes, saysNothing, more),
		"no two alike":          unlike(30, 200),
		"more than tidy":        manyAlike(4, 3000),
	} {
		got, err := decode(encodeCompact(updates...))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for i := range updates {
			if d := cmp.Diff(updates[i].explicit(), got[i].explicit(), sameUpdates); d != "" {
				t.Errorf("%s: %s", name, d)
			}
		}
	}
}

// unlike are nodes that have nothing in common.
func unlike(nodes, vips int) []update {
	random := rand.New(rand.NewPCG(3, 3))
	var updates []update
	for node := range nodes {
		u := update{node: fmt.Sprint("n", node), born: 1, floor: uint64(vips)}
		for n := range vips {
			if random.IntN(3) > 0 {
				u.entries = append(u.entries, entry{vip: address(n), seq: u.floor,
					claim: plan.Claim{Weight: uint16(random.IntN(40))}})
			}
		}
		sortEntries(u.entries)
		updates = append(updates, u.compacted())
	}
	return updates
}

// The bytes of a message are the protocol between versions.
func TestCompactBytes(t *testing.T) {
	u := func(node string, answers int) update {
		u := update{node: node, born: 300, floor: 3}
		for n := range 3 {
			u.entries = append(u.entries, entry{vip: address(n), seq: uint64(n + 1), claim: plan.Claim{Answering: n == answers}})
		}
		return u.compacted()
	}
	got := encodeCompact(u("n1", 2), u("n2", 2))
	want := []byte{2, 0, // no words
		2, 0, 0, 2, 0, // claims: none of the flags, and Answering
		1, 0x80, 0x80, 0x80, 0x50, 3, 0, // a run of three addresses from 10.0.0.0, and no IPv6
		2, 'n', '1', 0xac, 2, 3, 1, 1, 2, 2, 1, 0, // a new pattern
		2, 'n', '2', 0xac, 2, 3, 2, 1, 2, 0, 0} // the same
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestCompactRefuses(t *testing.T) {
	good := encodeCompact(manyAlike(3, 20)...)
	for n := range good {
		// A message that ends between two updates is whole.
		if updates, err := decode(good[:n]); err == nil && len(updates) == 3 {
			t.Errorf("the first %d of %d bytes are taken for all", n, len(good))
		}
	}
	head := []byte{2, 0, 1, 0, 0}
	for name, b := range map[string][]byte{
		"no dictionary":               {2},
		"an address after the last":   append(slices.Clone(head), 1, 0xff, 0xff, 0xff, 0xff, 0x0f, 2, 0),
		"addresses that wrap around":  append(slices.Clone(head), 2, 0xff, 0xff, 0xff, 0xff, 0x0f, 1, 1, 1, 0),
		"more addresses than allowed": append(slices.Clone(head), 1, 0, 0xff, 0xff, 0xff, 0xff, 0x0f, 0),
		"a run of no address":         append(slices.Clone(head), 1, 0, 0, 0),
		"more cells than addresses":   append(slices.Clone(head), 1, 0, 2, 0, 1, 'n', 1, 1, 1, 1, 3, 0),
		"a run of no cells":           append(slices.Clone(head), 1, 0, 2, 0, 1, 'n', 1, 1, 1, 1, 0, 0),
		"a claim that there is not":   append(slices.Clone(head), 1, 0, 2, 0, 1, 'n', 1, 1, 1, 2, 2, 0),
		"a pattern that there is not": append(slices.Clone(head), 1, 0, 2, 0, 1, 'n', 1, 1, 2, 1, 0, 0),
		"an exception past the end": append(slices.Clone(head), 1, 0, 2, 0, 1, 'n', 1, 1, 1, 1, 2, 0, 1, 'm', 1, 1, 2, 1,
			1, 2, 1, 0),
		"an update without a node":      append(slices.Clone(head), 0, 0, 0, 1, 1, 0, 0),
		"too many nodes with addresses": slices.Concat(head, []byte{1, 0, 0x80, 0x80, 0x08, 0}, tiny(maxCells/maxVIPs+1)),
	} {
		if u, err := decode(b); err == nil {
			t.Errorf("%s: decoded as %d updates", name, len(u))
		}
	}
}

// tiny are nodes that say nothing.
func tiny(nodes int) []byte {
	var b []byte
	for range nodes {
		b = append(b, 1, 'n', 1, 0, 0, 0)
	}
	return b
}

// TestStoryOfCompactStates has nodes speak at random, and others hear some of it late, twice or not
// at all, as changes, as whole states and from third nodes. After the last whole states all know
// what was said last.
func TestStoryOfCompactStates(t *testing.T) {
	for seed := range uint64(150) {
		random := rand.New(rand.NewPCG(seed, 1))
		const nodes = 4
		journals, truth := make([]*journal, nodes), make([]map[netip.Addr]plan.Claim, nodes)
		books, inboxes := make([]book, nodes), make([][][]byte, nodes)
		for i := range nodes {
			journals[i], books[i] = newJournal(fmt.Sprint("n", i), 1), newBook()
			truth[i] = map[netip.Addr]plan.Claim{}
		}
		live := map[string]plan.Standing{"n0": {Live: true}, "n1": {Live: true}, "n2": {Live: true}, "n3": {Live: true}}
		state := func(i int) []byte {
			others := slices.DeleteFunc(books[i].updates(live), func(u update) bool { return u.node == journals[i].node })
			return state(journals[i].full(), others, random.IntN(4) > 0, maxState)
		}
		hear := func(i int, b []byte) {
			updates, err := decode(b)
			if err != nil {
				t.Fatal(err)
			}
			books[i].merge(slices.DeleteFunc(updates, func(u update) bool { return u.node == journals[i].node })...)
		}
		for range 120 {
			i := random.IntN(nodes)
			switch random.IntN(8) {
			case 0, 1, 2, 3: // it says something
				changes := map[netip.Addr]*plan.Claim{}
				for range 1 + random.IntN(4) {
					vip := address(random.IntN(12))
					changes[vip] = nil
					delete(truth[i], vip)
					if random.IntN(3) > 0 {
						claim := plan.Claim{Answering: random.IntN(2) == 0, Weight: uint16(random.IntN(3))}
						changes[vip], truth[i][vip] = &claim, claim
					}
				}
				journals[i].set(changes)
				for _, b := range split(update{node: journals[i].node, born: journals[i].born, entries: journals[i].take()}) {
					for to := range nodes {
						if to != i && random.IntN(4) > 0 {
							inboxes[to] = append(inboxes[to], b)
						}
					}
				}
			case 4: // it is restarted
				journals[i] = newJournal(journals[i].node, journals[i].born+1)
				truth[i] = map[netip.Addr]plan.Claim{}
			case 5: // it tells all that it knows
				to := random.IntN(nodes)
				inboxes[to] = append(inboxes[to], state(i))
			default: // it hears what has come, in some order, and keeps some to hear it again
				random.Shuffle(len(inboxes[i]), func(x, y int) { inboxes[i][x], inboxes[i][y] = inboxes[i][y], inboxes[i][x] })
				for _, b := range inboxes[i] {
					hear(i, b)
				}
				inboxes[i] = inboxes[i][:len(inboxes[i])/3]
			}
		}
		for range 2 { // around the ring twice, each hears only its neighbor
			for i := range nodes {
				hear((i+1)%nodes, state(i))
			}
		}
		for i := range nodes {
			want := map[string]map[netip.Addr]plan.Claim{}
			for other := range nodes {
				if other != i {
					want[journals[other].node] = truth[other]
				}
			}
			if d := cmp.Diff(want, known(books[i]), sameUpdates); d != "" {
				t.Fatalf("seed %d: node %d: %s", seed, i, d)
			}
			for node, p := range books[i].pages {
				if len(p.seen) > 0 || len(p.said) > recentVIPs {
					t.Errorf("seed %d: node %d: of %s it remembers %d and %d changes at rest", seed, i, node, len(p.seen),
						len(p.said))
				}
			}
		}
	}
}

// TestTheBookForgets checks that addresses and claims that are gone take no memory for ever.
func TestTheBookForgets(t *testing.T) {
	b, j := newBook(), newJournal("n1", 1)
	for n := range 20_000 {
		claim := plan.Claim{Weight: uint16(n)}
		j.set(j.whole(map[netip.Addr]*plan.Claim{address(n): &claim, vip1: {Answering: true}}))
		b.merge(update{node: "n1", born: 1, entries: j.take()})
	}
	if vips, claims := len(b.index.vips), len(b.index.claims); vips+claims > 2000 {
		t.Errorf("the book remembers %d addresses and %d claims, of 2", vips, claims)
	}
	want := map[string]map[netip.Addr]plan.Claim{"n1": {address(19_999): {Weight: 19_999}, vip1: {Answering: true}}}
	if d := cmp.Diff(want, known(b), sameUpdates); d != "" {
		t.Error(d)
	}
}

// TestCompactOnlyAmongThoseWhoUnderstand checks that a speaker writes what the oldest live one can
// read, also in the middle of an upgrade.
func TestCompactOnlyAmongThoseWhoUnderstand(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 3), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler)})
	claim := plan.Claim{Answering: true}
	m.Begin(map[netip.Addr]*plan.Claim{vip1: &claim})
	node := func(name string, wire byte) *memberlist.Node {
		return &memberlist.Node{Name: name, Meta: meta{born: 1, macs: []string{"02:00:00:00:00:01"}, wire: wire}.encode(512)}
	}
	version := func() byte { return delegate{m}.LocalState(false)[0] }
	for _, c := range []struct {
		what string
		join *memberlist.Node
		want byte
	}{
		{"it knows of nobody", nil, wireVersion},
		{"the other understands", node("b", compactVersion), compactVersion},
		{"a third one does not", node("c", 0), wireVersion},
		{"the third one was upgraded", node("c", compactVersion+1), compactVersion},
	} {
		if c.join != nil {
			m.live[c.join.Name] = c.join
		}
		if got := version(); got != c.want {
			t.Errorf("%s: a state of version %d, want %d", c.what, got, c.want)
		}
		// memberlist asks for what one that joins is sent before it says who that is.
		if got := (delegate{m}).LocalState(true)[0]; got != wireVersion {
			t.Errorf("%s: one that joins gets version %d, which it may not know", c.what, got)
		}
		greetings := m.own.greet(m.compacts(), len(m.live)).encode()
		if got := greetings[0][0]; len(greetings) != 1 || got != c.want {
			t.Errorf("%s: %d greetings of version %d, want one of version %d", c.what, len(greetings), got, c.want)
		}
	}
	claims := map[netip.Addr]*plan.Claim{}
	for n := range joinState / 8 {
		claims[address(n)] = &claim
	}
	m.Begin(claims)
	if got := (delegate{m}).LocalState(true)[0]; got != compactVersion {
		t.Errorf("%d claims are told in version %d to one that joins", len(claims), got)
	}
	self := metaOf(&memberlist.Node{Meta: delegate{m}.NodeMeta(memberlist.MetaMaxSize)})
	if self.wire != farewellVersion || self.born != 3 {
		t.Errorf("it tells %+v of itself", self)
	}
}

// TestGreetings checks what a newcomer is told: all, in one packet where that is possible; in a
// large cluster what whom it has joined may not know yet.
func TestGreetings(t *testing.T) {
	j := newJournal("n1", 1)
	for n := range 3000 {
		claim := plan.Claim{Weight: uint16(n % 5)}
		j.set(map[netip.Addr]*plan.Claim{address(n): &claim})
		j.take()
	}
	last := plan.Claim{Answering: true}
	for _, c := range []struct {
		compact      bool
		others, want int
	}{{false, 3, 3000}, {true, 3, 3000}, {false, directMembers, 3000}, {true, directMembers, recentChanges}} {
		j.set(map[netip.Addr]*plan.Claim{vip1: &last})
		b := newBook()
		for _, message := range j.greet(c.compact, c.others).encode() {
			got, err := decode(message)
			if err != nil || len(message) > messageSize || got[0].floor != 0 {
				t.Fatalf("%+v: %d bytes, up to %d (%v)", c, len(message), got[0].floor, err)
			}
			b.merge(got...)
		}
		if got := known(b)["n1"]; got[vip1] != last || len(got) < c.want || len(got) > c.want+1 {
			t.Errorf("%+v: a newcomer knows of %d addresses", c, len(got))
		}
	}
	small := newJournal("n2", 1)
	small.set(map[netip.Addr]*plan.Claim{vip1: &last, vip2: {}})
	if got := small.greet(true, directMembers).encode(); len(got) != 1 || got[0][0] != compactVersion {
		t.Errorf("two addresses are told as %v", got)
	}
}

// TestAStateHasALimit checks that a state stays below what memberlist refuses: it has this node's
// claims, and those of as many others as fit.
func TestAStateHasALimit(t *testing.T) {
	updates := manyAlike(40, 200)
	for _, compact := range []bool{false, true} {
		whole := state(updates[0].explicit(), updates[1:], compact, maxState)
		limit := len(whole) / 2
		b := state(updates[0].explicit(), updates[1:], compact, limit)
		got, err := decode(b)
		if err != nil || len(b) > limit || len(got) < 5 || got[0].node != updates[0].node {
			t.Errorf("compact %v: %d bytes with %d nodes (%v), limit %d", compact, len(b), len(got), err, limit)
		}
		if got, _ := decode(state(updates[0].explicit(), updates[1:], compact, 1)); len(got) != 1 {
			t.Errorf("compact %v: %d nodes, want this one alone", compact, len(got))
		}
	}
}

// TestStatesOfManyNodesAreSmall checks the size that docs/guide/l2.md names, at a fifth of its nodes.
func TestStatesOfManyNodesAreSmall(t *testing.T) {
	updates := manyAlike(200, 2000)
	before, after := len(encode(updates...)), len(encodeCompact(updates...))
	if after*50 > before {
		t.Errorf("a state takes %d bytes, %d in the old form", after, before)
	}
}
