package members

import (
	"bytes"
	"encoding/binary"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// bomb is a compact message of 63 updates of nodes with these names, each of which says something
// of so many VIPs. Each has a pattern of its own, or all have the same.
func bomb(vips uint64, own bool, name func(i int) string) []byte {
	b := []byte{compactVersion, 0, 1, flagAnswering, 0, 1} // no words, one claim, one run of IPv4
	b = binary.AppendUvarint(b, 10<<24)
	b = append(binary.AppendUvarint(b, vips), 0) // none of IPv6
	for i := range 63 {
		b = appendString(b, name(i))
		b = append(b, byte(i+1), 1) // born, floor
		if own || i == 0 {
			b = binary.AppendUvarint(append(b, 1, 1), vips)
		} else {
			b = append(b, 2, 1, 0)
		}
		b = append(b, 0) // entries
	}
	return b
}

// A short message cannot fill the memory: it names few VIPs more than there are, few nodes that are
// none, and few patterns.
func TestAShortMessageCostsLittle(t *testing.T) {
	letter := func(i int) string { return "x" + string(rune('0'+i)) }
	for name, c := range map[string]struct {
		message []byte
		refused string
	}{
		"many VIPs":       {bomb(maxIndexed+1, false, letter), "may be named"},
		"many patterns":   {bomb(maxVIPs, true, letter), "patterns for"},
		"many nodes":      {bomb(maxVIPs, false, letter), ""},
		"one many times":  {bomb(maxVIPs, false, func(int) string { return "b" }), ""},
		"this many times": {bomb(maxVIPs, false, func(int) string { return "a" }), ""},
	} {
		m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
			Changed: func([]netip.Addr) {}})
		m.SetPeers(map[string][]netip.Addr{"b": nil, "c": nil})
		if _, err := decode(c.message); (err == nil) != (c.refused == "") ||
			err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %d bytes are read with error %v", name, len(c.message), err)
		}
		_, ok := m.learn(c.message)
		if ok != (c.refused == "") {
			t.Errorf("%s: taken in: %v", name, ok)
		}
		if b := m.book.pages["b"]; b != nil && b.born > maxLives {
			t.Errorf("%s: the book has process %d of b", name, b.born)
		}
		for _, node := range slices.Sorted(maps.Keys(m.book.pages)) {
			if node != "b" {
				t.Errorf("%s: the book has a page of %s", name, node)
			}
		}
		if len(m.past.pages) > maxLives {
			t.Errorf("%s: %d earlier processes are remembered", name, len(m.past.pages))
		}
	}
}

// Whoever has the key can name a process that begins as late as there are numbers for: no process could outlive it, and
// nobody would hear of that node until all have forgotten it at the same time.
func TestContract6NoProcessBeginsAtTheEndOfTime(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Now(), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	m.SetPeers(map[string][]netip.Addr{"b": nil})
	own := m.own.born
	forged := func(node string, born uint64) {
		t.Helper()
		if _, ok := m.learn(encode(update{node: node, born: born})); !ok {
			t.Fatal("the message is not read")
		}
	}
	for _, born := range []uint64{math.MaxUint64, uint64(time.Now().Add(maxAhead + time.Hour).UnixNano())} {
		forged("a", born)
		forged("b", born)
	}
	if m.own.born != own || m.book.pages["b"] != nil {
		t.Errorf("this process begins at %d, not %d any more; known of b: %+v", m.own.born, own, m.book.pages["b"])
	}
	ahead := uint64(time.Now().Add(maxAhead - time.Hour).UnixNano()) // by a clock that was wrong
	forged("a", ahead)
	forged("b", ahead)
	if m.own.born != ahead+1 || m.book.pages["b"] == nil {
		t.Errorf("this process begins at %d, and is not later than another one at %d; known of b: %+v", m.own.born, ahead,
			m.book.pages["b"])
	}
}

// Nor can a long one, of what takes many times its bytes once it is read.
func TestALongMessageCostsNoMultiple(t *testing.T) {
	many := func(n int, head, one []byte, tail ...byte) []byte {
		return append(append(binary.AppendUvarint(head, uint64(n)), bytes.Repeat(one, n)...), tail...)
	}
	for name, c := range map[string]struct {
		most    int
		message func(n int) []byte
	}{
		"nodes": {maxUpdates, func(n int) []byte {
			return append([]byte{wireVersion}, bytes.Repeat([]byte{1, 'n', 1, 0, 0, 0}, n)...)
		}},
		"nodes in little space": {maxUpdates, func(n int) []byte {
			return append([]byte{compactVersion, 0, 0, 0, 0}, bytes.Repeat([]byte{1, 'n', 1, 0, 0, 0}, n)...)
		}},
		"claims": {maxIndexed, func(n int) []byte {
			return many(n, []byte{compactVersion, 0}, []byte{0, 0}, 0, 0)
		}},
		"words": {maxStrings, func(n int) []byte {
			return many(n, []byte{compactVersion}, []byte{1, 'x'}, 0, 0, 0)
		}},
		"words of a node": {maxStrings, func(n int) []byte {
			return many(n, []byte{wireVersion, 1, 'n', 1, 0}, []byte{1, 'x'}, 0)
		}},
	} {
		if _, err := decode(c.message(c.most)); err != nil {
			t.Errorf("%s: as many as there may be: %v", name, err)
		}
		if _, err := decode(c.message(c.most + 1)); err == nil {
			t.Errorf("%s: more than there may be are read", name)
		}
	}
}

// Whoever has the key can say something new all the time, and more than a packet of gossip has room for. What waits to
// be passed on has a bound.
func TestWhatIsPassedOnHasABound(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	m.SetPeers(map[string][]netip.Addr{"b": nil})
	news := func(seq uint64, vips ...netip.Addr) []byte {
		u := update{node: "b", born: 1}
		for _, vip := range vips {
			u.entries = append(u.entries, entry{vip: vip, seq: seq, claim: plan.Claim{Answering: seq%2 == 0}})
		}
		return encode(u)
	}
	var many []netip.Addr
	for i := range 1000 {
		many = append(many, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
	}
	if long := news(1, many...); len(long) <= maxPassed {
		t.Fatalf("%d bytes are no long message", len(long))
	} else {
		delegate{m}.NotifyMsg(long)
	}
	if n := m.queue.NumQueued(); n != 0 {
		t.Errorf("%d messages wait for a packet that has room for them", n)
	}
	for i := range maxQueued + 1000 { // each changes the claim
		delegate{m}.NotifyMsg(news(uint64(i+2), vip1))
	}
	if n := m.queue.NumQueued(); n != maxQueued {
		t.Errorf("%d messages wait, want %d", n, maxQueued)
	}
}

// A node that has just started, and knows of no VIP, reads what the others say of 10,000.
func TestANodeThatKnowsNothingReadsALargeState(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	updates := manyAlike(3, 10_000)
	if _, ok := m.learn(encodeCompact(updates...)); !ok {
		t.Fatal("it cannot read the state")
	}
	for _, u := range updates {
		if p := m.book.pages[u.node]; p == nil || len(p.vips()) != 10_000 {
			t.Errorf("%s: not all VIPs are known", u.node)
		}
	}
}

// A large state is merged in portions, so that nothing waits for all of it, and comes to the same.
func TestALargeStateIsMergedInPortions(t *testing.T) {
	updates := manyAlike(16, 10_000)
	updates = append(updates, update{node: "b", born: 1, entries: []entry{{vip: vip1, seq: 1}}})
	parts, total := portions(updates), 0
	for i, part := range parts {
		size := 0
		for _, u := range part {
			size += len(u.entries)
			if u.sheet != nil {
				size += len(u.sheet.vips)
			}
		}
		if total += len(part); size > portion || len(part) == 0 {
			t.Errorf("portion %d has %d updates with %d claims, want at most %d", i, len(part), size, portion)
		}
	}
	if least := 16 * 10_000 / portion; len(parts) <= least || total != len(updates) {
		t.Errorf("%d updates in %d portions, want %d in more than %d", total, len(parts), len(updates), least)
	}
	if parts := portions(manyAlike(2, maxVIPs)); len(parts) != 2 {
		t.Errorf("two updates of the largest size are in %d portions", len(parts))
	}
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func(vips []netip.Addr) {
			if len(vips) < 10_000 || !slices.IsSortedFunc(vips, netip.Addr.Compare) ||
				len(slices.Compact(slices.Clone(vips))) != len(vips) {
				t.Errorf("%d VIPs changed, unsorted or twice", len(vips))
			}
		}})
	if news, ok := m.learn(encodeCompact(updates...)); !news || !ok {
		t.Fatalf("news: %v, read: %v", news, ok)
	}
	whole := newBook()
	whole.merge(updates...)
	for node, p := range whole.pages {
		if got := m.book.pages[node]; got == nil || !slices.Equal(got.vips(), p.vips()) {
			t.Errorf("%s: the book differs from one that was merged at once", node)
		}
	}
}

// What a speaker writes of a large cluster, others can read, although nodes are left out.
func TestALargeStateCanBeRead(t *testing.T) {
	one := manyAlike(1, maxVIPs)[0]
	others := []update{one}
	for i := range maxCells/maxVIPs + 10 {
		others = append(others, update{node: "n" + strconv.Itoa(i), born: 1, floor: 1, sheet: one.sheet, row: row{cells: one.row.cells[:1]}})
	}
	message := state(update{node: "a", born: 1}, others, true, maxState)
	if updates, err := decode(message); err != nil || len(updates) < len(others)/4 || len(updates) >= len(others) {
		t.Errorf("%d of %d nodes are read: %v", len(updates), len(others), err)
	}
}

// Nor does a node that says too much make the states of others unreadable.
func TestAStateOfABookThatIsFullCanBeRead(t *testing.T) {
	live := map[string]plan.Standing{"x": {Live: true}, "y": {Live: true}}
	own := update{node: "a", born: 100, floor: 1, entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Parted: true}}}}
	// all says something of 65,536 VIPs as entries, with such numbers, or as a row.
	all := func(node string, net byte, seq uint64, gone bool) update {
		u := update{node: node, born: 1}
		for i := range maxVIPs {
			u.entries = append(u.entries, entry{vip: numbered(net, i), seq: seq + uint64(i), gone: gone})
		}
		return u
	}
	row := func(u update) update { u.floor = maxVIPs; return u.compacted() }
	kinds := func(u update, answering bool) update {
		for i := range u.entries {
			u.entries[i].claim = plan.Claim{Weight: uint16(i), Answering: answering}
		}
		return u
	}
	for name, updates := range map[string][]update{
		"more that is gone than a node may have": {all("x", 10, 2, true), all("x", 11, maxVIPs+2, true)},
		"a row, and more that is gone":           {row(all("x", 10, 1, false)), all("x", 11, maxVIPs+2, true)},
		"as many VIPs as all may have":           {row(all("x", 10, 1, false)), row(all("y", 11, 1, false))},
		"as many claims":                         {row(kinds(all("x", 10, 1, false), true)), row(kinds(all("y", 10, 1, false), false))},
	} {
		b := newBook()
		b.merge(updates...)
		for _, compact := range []bool{false, true} {
			got, err := decode(state(own, b.updates(live), compact, maxState))
			if err != nil || len(got) == 0 || got[0].node != "a" {
				t.Errorf("%s, compact %v: %d updates are read: %v", name, compact, len(got), err)
			}
		}
	}
}

// Nor do pages of so many kinds of claims that no row follows that of another node.
func TestAStateOfManyPatternsCanBeRead(t *testing.T) {
	const vips, nodes, kinds, claims = maxIndexed, maxCells/maxIndexed - 2, 128, 2 * maxCounts / 128
	s := &sheet{}
	for i := range vips {
		s.vips = append(s.vips, numbered(byte(10+i>>16), i))
	}
	few, many := make([]uint32, vips), make([]uint32, vips)
	for i := range vips {
		few[i], many[i] = uint32(i*kinds/vips+1), uint32(i*claims/vips+1)
	}
	for i := range claims {
		s.claims = append(s.claims, plan.Claim{Weight: uint16(i)})
	}
	said := func(node string, cells []uint32) update {
		return update{node: node, born: 1, floor: 1, sheet: s, row: row{cells: cells}}
	}
	others := []update{said("x", many)}
	for i := range nodes {
		others = append(others, said(madeUp(i), few))
	}
	if got, err := decode(state(said("a", few), others, true, maxState)); err != nil || len(got) == 0 {
		t.Errorf("%d updates are read: %v", len(got), err)
	}
}

// Of a node that is neither a member nor one of the cluster nothing is kept.
func TestOnlyMembersAreHeard(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	m.SetPeers(map[string][]netip.Addr{"b": nil})
	for node, want := range map[string]bool{"b": true, "x": false} {
		if news, ok := m.learn(encode(update{node: node, born: 1, floor: 1,
			entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}}}})); news != want || !ok {
			t.Errorf("%s: news %v, read %v", node, news, ok)
		}
	}
}
