package members

import (
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/speaker/plan"
)

func madeUp(i int) string { return fmt.Sprintf("x%d", i) }

// crowded is a compact message of so many updates of nodes with these names, which say the same of
// so many VIPs.
func crowded(nodes, vips int, name func(i int) string) []byte {
	b := []byte{compactVersion, 0, 1, flagAnswering, 0, 1} // no words, one claim, one run of IPv4
	b = binary.AppendUvarint(b, 10<<24)
	b = append(binary.AppendUvarint(b, uint64(vips)), 0) // none of IPv6
	for i := range nodes {
		b = append(appendString(b, name(i)), 1, 1) // born, floor
		if i == 0 {
			b = binary.AppendUvarint(append(b, 1, 1), uint64(vips))
		} else {
			b = append(b, 2, 1, 0)
		}
		b = append(b, 0) // entries
	}
	return b
}

// packed encodes fields and values as memberlist does (MessagePack).
func packed(fields ...any) []byte {
	b := []byte{0x80 | byte(len(fields)/2)}
	for _, f := range fields {
		switch f := f.(type) {
		case string:
			b = append(append(b, 0xa0|byte(len(f))), f...)
		case int:
			b = binary.BigEndian.AppendUint32(append(b, 0xce), uint32(f))
		case bool:
			b = append(b, 0xc2)
		}
	}
	return b
}

// exchange sends a member what somebody without a key may: a state with members and claims.
func exchange(t *testing.T, to netip.AddrPort, members int, claims []byte) {
	t.Helper()
	const pushPull = 6
	b := append(append([]byte{typeLabel, byte(len("landfall"))}, "landfall"...), pushPull)
	b = append(b, packed("Nodes", members, "UserStateLen", len(claims), "Join", false)...)
	for i := range members {
		b = append(b, packed("Name", madeUp(i), "Addr", string([]byte{127, 9, byte(i >> 8), byte(i)}), "Port", 9,
			"Incarnation", 1, "State", int(memberlist.StateAlive), "Vsn", "\x01\x05\x02\x00\x00\x00")...)
	}
	conn, err := net.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(append(b, claims...)); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, conn) // until the member has closed it
}

// kept are the names of all nodes of which a member remembers anything.
func kept(m *Members) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	names := map[string]bool{}
	for _, all := range []map[string]bool{m.greet, m.former} {
		maps.Copy(names, all)
	}
	for name := range m.live {
		names[name] = true
	}
	for name := range m.macs {
		names[name] = true
	}
	for name := range m.book.pages {
		names[name] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// Members that somebody makes up are none: nothing is kept of them, and the others are spoken to as
// before.
func TestMadeUpMembersAreRefused(t *testing.T) {
	r := newRig(t, "a", "b")
	r.cluster()
	a := r.members["a"]
	r.members["b"].say(map[netip.Addr]plan.Claim{vip2: {Answering: true}})
	r.wantClaims("a", vip2, map[string]plan.Claim{"b": {Answering: true}})
	read := a.understood.Load()
	exchange(t, netip.AddrPortFrom(r.peers["a"][0], uint16(testPort())), 4000, crowded(4000, 4096, madeUp))
	r.eventually("a has read it", func() bool { return a.understood.Load() > read })
	if got := kept(a.Members); !slices.Equal(got, []string{"b"}) {
		t.Errorf("it remembers %d nodes: %s", len(got), some(got))
	}
	r.eventually("others are told all in little space, while b is live", func() bool {
		return (delegate{a.Members}).LocalState(false)[0] == compactVersion
	})
}

// Nor does it help that they were members while the nodes of the cluster were unknown. Until then
// there are not too many of them, and nobody is written to at length for their sake.
func TestMadeUpMembersAreForgotten(t *testing.T) {
	r := newRig(t, "a", "b")
	a := r.start("a")
	r.start("b")
	r.introduce("b")
	r.eventually("a hears b, which it does not know", func() bool { return slices.Equal(a.Live(), []string{"a", "b"}) })
	r.members["b"].say(map[netip.Addr]plan.Claim{vip2: {Answering: true}})
	r.wantClaims("a", vip2, map[string]plan.Claim{"b": {Answering: true}})

	read := a.understood.Load()
	exchange(t, netip.AddrPortFrom(r.peers["a"][0], uint16(testPort())), 2*maxUnknown,
		crowded(2*maxUnknown, 300, madeUp))
	r.eventually("a has read it", func() bool { return a.understood.Load() > read })
	if got := len(kept(a.Members)); got < maxUnknown || got > 2*maxUnknown {
		t.Errorf("it remembers %d nodes", got)
	}
	if b := (delegate{a.Members}).LocalState(false); b[0] != compactVersion {
		t.Errorf("others are told all in version %d, %d bytes", b[0], len(b))
	}
	r.introduce("a")
	a.mu.Lock()
	pages, macs := slices.Sorted(maps.Keys(a.book.pages)), slices.Sorted(maps.Keys(a.macs))
	a.mu.Unlock()
	if want := []string{"b"}; !slices.Equal(pages, want) || !slices.Equal(macs, want) {
		t.Errorf("it remembers the claims of %d nodes and the MACs of %d", len(pages), len(macs))
	}
	r.wantClaims("a", vip2, map[string]plan.Claim{"b": {Answering: true}})
}

// A speaker may be heard of before its Node is known: it is refused, and called then.
func TestANodeThatIsKnownLateIsHeard(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.start("a").SetPeers(map[string][]netip.Addr{"b": r.peers["b"]})
	r.start("b")
	r.introduce("b")
	c := r.start("c")
	r.introduce("c")
	c.say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	c.SetMACs([]string{"02:00:00:00:00:0c"})
	r.wantClaims("b", vip1, map[string]plan.Claim{"c": {Answering: true}})
	r.eventually("c sees all", func() bool { return slices.Equal(c.Live(), r.names()) })
	r.eventually("a sees b", func() bool { return slices.Equal(r.members["a"].Live(), []string{"a", "b"}) })
	if got := kept(r.members["a"].Members); slices.Contains(got, "c") {
		t.Errorf("a remembers %v", got)
	}
	r.introduce("a")
	r.eventually("a sees all", func() bool { return slices.Equal(r.members["a"].Live(), r.names()) })
	r.wantClaims("a", vip1, map[string]plan.Claim{"c": {Answering: true}})
	r.eventually("a knows whose MACs they are", func() bool {
		return r.members["a"].MACs()["02:00:00:00:00:0c"] == "c"
	})
}

// A node whose Node comes late goes on where it has been: it is called for what it said before.
func TestALiveNodeThatBecomesOneOfTheCluster(t *testing.T) {
	r := newRig(t, "a", "b")
	a, b := r.start("a", patient), r.start("b", patient)
	b.say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.introduce("b")
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Answering: true}})
	a.SetPeers(map[string][]netip.Addr{})
	r.wantClaims("a", vip1, nil)
	r.introduce("a")
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Answering: true}})

	// And without its Node it is heard for as long as it takes part.
	a.SetPeers(map[string][]netip.Addr{})
	b.say(map[netip.Addr]plan.Claim{vip1: {}})
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {}})
	b.stop()
	r.eventually("a knows that b has left", func() bool { return slices.Equal(a.Live(), []string{"a"}) })
	a.SetPeers(map[string][]netip.Addr{})
	if got := kept(a.Members); len(got) > 0 {
		t.Errorf("a remembers %v", got)
	}
}

func TestAdmission(t *testing.T) {
	b4, b6, other := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("192.0.2.9")
	m := New(Options{Self: "a", Port: 7947})
	ours := m.config(b4).BuildVsnArray()
	for _, c := range []struct {
		unknown bool    // which nodes the cluster has
		speaks  []uint8 // the least, the greatest and the used version of two protocols; nil for those of this node
		name    string
		addr    netip.Addr
		port    uint16
		want    string // in the error
	}{
		{name: "a", addr: other, port: 1},
		{name: "b", addr: b4, port: 7947},
		{name: "b", addr: b6, port: 7947},
		{name: "b", addr: netip.AddrFrom16(b4.As16()), port: 7947},
		{name: "b", addr: other, port: 7947, want: "192.0.2.9:7947 is none of this node's addresses [192.0.2.2 2001:db8::2]"},
		{name: "b", addr: b4, port: 9, want: "192.0.2.2:9 is none"},
		{name: "b", port: 7947, want: "is none"},
		{name: "no address yet", addr: other, port: 7947},
		{name: "x", addr: b4, port: 7947, want: "no such node"},
		{name: "deleted", addr: other, port: 7947},
		{name: "deleted", addr: b4, port: 7947, want: "no such node"},
		{unknown: true, name: "x", addr: other, port: 9},
		{name: "b", addr: b4, port: 7947, speaks: []uint8{1, 9, 2, 0, 3, 0}},
		{name: "b", addr: b4, port: 7947, speaks: []uint8{1, 5, 2, 1, 1, 1}, want: "versions 2, from 1 to 5, and 1, from 1 to 1"},
		{name: "b", addr: b4, port: 7947, speaks: []uint8{3, 5, 2, 0, 0, 0}, want: "versions"},
		{name: "b", addr: b4, port: 7947, speaks: []uint8{1, 1, 2, 0, 0, 0}, want: "versions"},
		{name: "b", addr: b4, port: 7947, speaks: []uint8{1, 5, 3, 0, 0, 0}, want: "versions"},
		{name: "b", addr: b4, port: 7947, speaks: []uint8{1, 5, 2, 0, 1, 1}, want: "versions"},
		{unknown: true, name: "x", addr: other, port: 9, speaks: []uint8{1, 5, 2, 1, 1, 1}, want: "versions"},
		{name: "a", addr: other, port: 1, speaks: []uint8{1, 5, 2, 1, 1, 1}},
	} {
		m.peers = map[string][]netip.Addr{"b": {b4, b6}, "no address yet": nil}
		m.live["deleted"] = &memberlist.Node{Addr: other.AsSlice(), Port: 7947}
		m.former["deleted"] = true
		if c.unknown {
			m.peers = nil
		}
		v := c.speaks
		if v == nil {
			v = ours
		}
		err := m.admits(&memberlist.Node{Name: c.name, Addr: c.addr.AsSlice(), Port: c.port, PMin: v[0], PMax: v[1],
			PCur: v[2], DMin: v[3], DMax: v[4], DCur: v[5]})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s at %s port %d, versions %d: %v, want %q", c.name, c.addr, c.port, v, err, c.want)
		}
	}
}

// A member of versions that no speaker has would keep all others from exchanging states.
func TestAMemberOfOtherVersionsHoldsUpNobody(t *testing.T) {
	r := newRig(t, "a", "b", "x0")
	a := r.start("a", patient)
	r.start("b", patient)
	r.introduce("a")
	r.introduce("b")
	r.eventually("a sees b", func() bool { return a.Joined() && slices.Equal(a.Live(), []string{"a", "b"}) })
	const alive = 4
	at, port := r.peers["x0"][0], testPort()
	message := append([]byte{alive}, packed("Incarnation", 1, "Node", "x0", "Addr", string(at.AsSlice()), "Port", port,
		"Meta", "", "Vsn", "\x01\x05\x02\x01\x01\x01")...)
	packet := append(append([]byte{typeLabel, byte(len("landfall"))}, "landfall"...), message...)
	a.cable.inject(&memberlist.Packet{Buf: packet, From: net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, uint16(port))),
		Timestamp: time.Now()})
	said := time.Now()
	r.eventually("a has heard b since", func() bool { a.Seek(time.Now()); return a.Met().After(said) })
	if slices.Contains(kept(a.Members), "x0") {
		t.Error("a has taken it for a member")
	}
}

// Of messages without end no book gets too large, and it keeps what others say.
func TestABookIsBounded(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	peers := map[string][]netip.Addr{"b": nil, "wordy": nil, "gone": nil}
	for i := range 4 {
		peers[madeUp(i)] = nil
	}
	m.SetPeers(peers)
	m.learn(encode(update{node: "b", born: 9, entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}}}}))
	wordy, gone := update{node: "wordy", born: 1}, update{node: "gone", born: 1}
	routes := plan.PeerNames(strings.Repeat("x", 250))
	for range 4 {
		routes += "\n" + routes[:250]
	}
	for i := range maxVIPs {
		wordy.entries = append(wordy.entries, entry{vip: numbered(20, i), seq: uint64(i + 1),
			claim: plan.Claim{Weight: uint16(i), Routes: routes}})
		gone.entries = append(gone.entries, entry{vip: numbered(30, i), seq: uint64(i + 2), gone: true})
	}
	messages := [][]byte{encode(wordy), encode(gone)}
	for i := range gone.entries {
		gone.entries[i].vip, gone.entries[i].seq = numbered(31, i), uint64(i+2+maxVIPs)
	}
	messages = append(messages, encode(gone))
	for i := range 4 {
		message := crowded(1, maxVIPs, func(int) string { return madeUp(i) })
		message[9] += byte(i) // 10.x.0.0
		messages = append(messages, message)
	}
	for i, message := range messages {
		if _, ok := m.learn(message); !ok {
			t.Fatalf("message %d cannot be read", i)
		}
		pages, cells := m.book.all()
		if x := m.book.index; max(len(x.vips), len(x.claims)) > maxIndexed || x.words > maxWords || cells > maxBook {
			t.Fatalf("message %d: the book has %d VIPs, %d claims with %d bytes of words, and %d cells", i, len(x.vips),
				len(x.claims), x.words, cells)
		}
		for _, p := range pages {
			if len(p.said) > maxVIPs || len(p.seen) > maxSeen {
				t.Fatalf("message %d: a page remembers %d changes and has seen %d", i, len(p.said), len(p.seen))
			}
		}
		if m.book.pages["b"] == nil {
			t.Errorf("message %d: everything was forgotten", i)
		}
	}
	if claim, ok := m.book.pages["b"].get(vip1); !ok || !claim.Answering {
		t.Errorf("of b it knows %v, %+v", ok, claim)
	}
}

// numbered is one of 65,536 addresses.
func numbered(net byte, i int) netip.Addr {
	return netip.AddrFrom4([4]byte{net, 0, byte(i >> 8), byte(i)})
}

// Of a book that has too many words, the page goes that has them, and not one of more VIPs.
func TestTheWordiestPageGoes(t *testing.T) {
	wordy, honest := update{node: "wordy", born: 1}, update{node: "honest", born: 1}
	routes := plan.NewPeerNames(slices.Repeat([]string{strings.Repeat("x", 250)}, 16)...)
	for i := range 2 * maxWords / len(routes) {
		honest.entries = append(honest.entries, entry{vip: numbered(10, i), seq: uint64(i + 1)})
		if i%2 == 0 {
			wordy.entries = append(wordy.entries, entry{vip: numbered(20, i), seq: uint64(i/2 + 1),
				claim: plan.Claim{Weight: uint16(i), Routes: routes}})
		}
	}
	extra := entry{vip: vip1, seq: uint64(len(wordy.entries) + 1), claim: plan.Claim{Routes: routes[1:]}}
	wordy.entries = append(wordy.entries, extra, entry{vip: vip2, seq: extra.seq + 1, claim: plan.Claim{Routes: routes[2:]}})
	b := newBook()
	b.merge(honest)
	vips, _ := b.merge(wordy)
	if b.pages["wordy"] != nil || b.pages["honest"] == nil || len(vips) != len(wordy.entries) || b.index.words != 0 {
		t.Errorf("the book has pages %v with %d bytes of words; %d VIPs changed, want %d",
			slices.Sorted(maps.Keys(b.pages)), b.index.words, len(vips), len(wordy.entries))
	}
}

// Changes after a gap that all pages together have no room for wait for the exchange of states.
func TestChangesAfterGapsAreBounded(t *testing.T) {
	b := newBook()
	many := map[uint64]bool{}
	for i := range uint64(maxSeen) {
		many[i+100] = true
	}
	for i := range maxLoose/(maxSeen-fewLoose) + 1 {
		p := newPage(1, b.index)
		p.seen = many // as if it had them
		b.pages[madeUp(i)] = p
	}
	node := journalOf("n", 4*fewLoose)
	all := node.full()
	gap := update{node: "n", born: all.born, entries: slices.Clone(all.entries[1:])}
	b.merge(gap)
	if n := b.pages["n"].remembered(); n < fewLoose || n > fewLoose+1 {
		t.Errorf("the page remembers %d changes", n)
	}
	b.merge(all)
	if p := b.pages["n"]; len(p.vips()) != len(all.entries) || p.loose() > 0 || !p.whole() {
		t.Errorf("the page has %d VIPs of %d, and remembers %d changes", len(p.vips()), len(all.entries), p.remembered())
	}
}

// journalOf is a node that has said something of so many VIPs, one after the other.
func journalOf(node string, vips int) *journal {
	j := newJournal(node, 1)
	claims := map[netip.Addr]*plan.Claim{}
	for i := range vips {
		claims[numbered(10, i)] = &plan.Claim{Answering: true}
	}
	j.set(claims)
	return j
}

// What others say of this node's earlier processes is bounded like what they say of others.
func TestThePastIsBounded(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	seq := map[uint64]uint64{9: 1, 10: 0} // of one a change is missing
	for round := range 3 {
		for born := range seq {
			u := update{node: "a", born: born}
			for i := range maxVIPs {
				seq[born]++
				u.entries = append(u.entries, entry{vip: numbered(byte(born)<<3|byte(round), i), seq: seq[born], gone: born == 9,
					claim: plan.Claim{Answering: born == 10}})
			}
			m.learn(encode(u))
			if n := len(m.past.index.vips); n > maxIndexed {
				t.Errorf("round %d: it remembers %d VIPs of the past", round, n)
			}
			for _, p := range m.past.pages {
				if len(p.said) > maxVIPs || len(p.cells) > maxIndexed {
					t.Errorf("round %d: of process %d it remembers %d changes and has %d cells", round, p.born, len(p.said), len(p.cells))
				}
			}
		}
		m.Restarted(vip1, plan.Sight{Previous: 10})
	}
	m.learn(encode(update{node: "a", born: 11, entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}}}}))
	if !m.Restarted(vip1, plan.Sight{Previous: 11}) {
		t.Error("it does not know what its last process announced")
	}
}
