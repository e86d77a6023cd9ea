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
	for _, c := range []struct {
		unknown bool // which nodes the cluster has
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
	} {
		m.peers = map[string][]netip.Addr{"b": {b4, b6}, "no address yet": nil}
		m.live["deleted"] = &memberlist.Node{Addr: other.AsSlice(), Port: 7947}
		m.former["deleted"] = true
		if c.unknown {
			m.peers = nil
		}
		err := m.admits(&memberlist.Node{Name: c.name, Addr: c.addr.AsSlice(), Port: c.port})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s at %s port %d: %v, want %q", c.name, c.addr, c.port, err, c.want)
		}
	}
}

// Of messages without end no book gets too large, and it keeps what others say.
func TestABookIsBounded(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	peers := map[string][]netip.Addr{"b": nil}
	for i := range 4 {
		peers[madeUp(i)] = nil
	}
	m.SetPeers(peers)
	m.learn(encode(update{node: "b", born: 9, entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}}}}))
	for i := range 4 {
		message := crowded(1, maxVIPs, func(int) string { return madeUp(i) })
		message[9] += byte(i) // 10.x.0.0
		if _, ok := m.learn(message); !ok {
			t.Fatal("it cannot be read")
		}
		_, cells := m.book.all()
		if x := m.book.index; max(len(x.vips), len(x.claims)) > maxIndexed || cells > maxBook {
			t.Fatalf("the book has %d VIPs, %d claims and %d cells", len(x.vips), len(x.claims), cells)
		}
		if len(m.book.pages) < 2 {
			t.Error("everything was forgotten")
		}
	}
	if claim, ok := m.book.pages["b"].get(vip1); !ok || !claim.Answering {
		t.Errorf("of b it knows %v, %+v", ok, claim)
	}
}
