package members

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

var (
	vip1 = netip.MustParseAddr("172.26.236.180")
	vip2 = netip.MustParseAddr("172.26.236.181")
	vip6 = netip.MustParseAddr("2001:db8::180")
)

func TestWireRoundTrip(t *testing.T) {
	updates := []update{
		{node: "k8s-worker-178", born: 1700000000000000000, floor: 9, entries: []entry{
			{vip: vip1, seq: 3, claim: plan.Claim{Answering: true, Weight: 300, Parted: true}},
			{vip: vip2, seq: 9, claim: plan.Claim{Reason: lb.ReasonNotProgrammed}},
			{vip: vip6, seq: 1 << 40, claim: plan.Claim{Reason: lb.ReasonStopping, Answering: true}},
			{vip: netip.MustParseAddr("10.0.0.1"), seq: 4, gone: true},
		}},
		{node: "k8s-worker-179", born: 1},
	}
	got, err := decode(encode(updates...))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(updates, got, sameUpdates); d != "" {
		t.Error(d)
	}
}

var sameUpdates = cmp.Options{cmp.AllowUnexported(update{}, entry{}, row{}, cell{}, pattern{}, sheet{}),
	cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()}

// The bytes of a message are the protocol between versions.
func TestWireBytes(t *testing.T) {
	got := encode(update{node: "n1", born: 300, floor: 2, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}},
		{vip: vip2, seq: 2, claim: plan.Claim{Reason: "Stopping"}},
	}})
	want := []byte{1, 2, 'n', '1', 0xac, 2, 2, 1, 8, 'S', 't', 'o', 'p', 'p', 'i', 'n', 'g', 2,
		2, 172, 26, 236, 180, 1, 0,
		0, 172, 26, 236, 181, 2, 1}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// What speakers of earlier versions write is read as they meant it: version 1 as written before
// there was a compact form, and the first compact form.
func TestWhatEarlierVersionsWrote(t *testing.T) {
	want := []update{{node: "worker-1", born: 1700000000000000001, floor: 4, entries: []entry{
		{vip: netip.MustParseAddr("192.0.2.1"), seq: 1, claim: plan.Claim{Answering: true, Weight: 50}},
		{vip: netip.MustParseAddr("192.0.2.2"), seq: 4, claim: plan.Claim{Reason: lb.ReasonNotProgrammed}},
		{vip: netip.MustParseAddr("2001:db8::1"), seq: 3,
			claim: plan.Claim{Answering: true, Parted: true, Routes: "tor-1"}},
	}}, {node: "worker-2", born: 1700000000000000002, entries: []entry{
		{vip: netip.MustParseAddr("192.0.2.1"), seq: 7, gone: true}}}}
	for text, explicit := range map[string]bool{
		"0108776f726b65722d318180a8b1e39fe7cb1704020d4e6f7450726f6772616d6d6564095b22746f722d31225d030ac000020101003200" +
			"c000020204013320010db80000000000000000000000010300020008776f726b65722d328280a8b1e39fe7cb17000001" +
			"04c00002010700": true,
		"02020d4e6f7450726f6772616d6d6564095b22746f722d31225d0400000a003200013200020001818480800c020120010db80000000000" +
			"000000000000010108776f726b65722d318180a8b1e39fe7cb1704010201030104010008776f726b65722d328280a8b1e39fe7cb170000" +
			"0104c00002010701": false,
	} {
		message, err := hex.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decode(message)
		if err != nil {
			t.Fatalf("version %d: %v", message[0], err)
		}
		expected := slices.Clone(want)
		if !explicit { // a row has no numbers of its own
			got[0] = got[0].explicit()
			expected[0].entries = slices.Clone(want[0].entries)
			for i := range expected[0].entries {
				expected[0].entries[i].seq = want[0].floor
			}
		}
		if d := cmp.Diff(expected, got, sameUpdates); d != "" {
			t.Errorf("version %d: %s", message[0], d)
		}
	}
}

func TestWireRefuses(t *testing.T) {
	good := encode(update{node: "n1", born: 300,
		entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Reason: "Stopping"}}}})
	if _, err := decode(good); err != nil {
		t.Fatal(err)
	}
	for n := range good {
		if n == 1 {
			continue // the version alone is a message without updates
		}
		if _, err := decode(good[:n]); err == nil {
			t.Errorf("the first %d of %d bytes are taken for a message", n, len(good))
		}
	}
	newer := bytes.Clone(good)
	newer[0] = 3
	if _, err := decode(newer); err == nil ||
		err.Error() != "message of version 3, this speaker knows versions up to 2" {
		t.Errorf("a newer version gives %v", err)
	}
	for name, b := range map[string][]byte{
		"no node":               encode(update{born: 1}),
		"a reason not listed":   append(bytes.Clone(good[:len(good)-1]), 7),
		"more entries than fit": {1, 1, 'n', 1, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x0f},
		"more reasons than fit": {1, 1, 'n', 1, 0, 0xff, 0xff, 0xff, 0xff, 0x0f},
		"a name longer than it": {1, 0xff, 0xff, 0xff, 0xff, 0x0f, 'n'},
	} {
		if u, err := decode(b); err == nil {
			t.Errorf("%s: decoded as %+v", name, u)
		}
	}
}

// TestContract11NobodyChoosesTheWordsOfOthers checks that a message whose reasons or peers are none is left out as a
// whole: whoever reports on a Service writes them into its condition.
func TestContract11NobodyChoosesTheWordsOfOthers(t *testing.T) {
	one := func(claim plan.Claim) update {
		return update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 1, claim: claim}}}
	}
	for name, claim := range map[string]plan.Claim{
		"a long reason":             {Reason: lb.Reason(strings.Repeat("X", 65))},
		"a reason of several words": {Reason: "Not programmed"},
		"a reason for a terminal":   {Reason: "X\x1b]0;y\a"},
		"peers as the reason":       {Reason: "tor-1"},
		"the same of BGP":           {Routes: "tor-1", Unrouted: "tor-1"},
		"a reason as the peers":     {Routes: plan.PeerNames(lb.ReasonStopping)},
		"a long name of a peer":     {Routes: plan.PeerNames(strings.Repeat("x", 254))},
		"many peers":                {Routes: plan.PeerNames(strings.Repeat("tor\n", plan.MaxPeerNames/4) + "x")},
		"a peer for a terminal":     {Routes: plan.NewPeerNames("tor-1", "tor-2\x1b[2J")},
		"a peer without a name":     {Routes: plan.NewPeerNames("tor-1", "")},
		"no list of peers":          {Routes: `["tor-1"`},
		"an empty list of peers":    {Routes: `[]`},
	} {
		for form, message := range map[string][]byte{
			"changes": encode(one(claim)), "a whole state": encodeCompact(one(claim)),
			"a row": encodeCompact(one(claim).compacted()),
		} {
			if got, err := decode(message); err == nil {
				t.Errorf("%s in %s is read as %+v", name, form, got)
			} else if len(err.Error()) > 500 || strings.Contains(err.Error(), "\x1b") {
				t.Errorf("%s in %s: %.600s", name, form, err)
			}
		}
	}
}

func TestPeersAsEarlierBuildsWroteThem(t *testing.T) {
	want := plan.NewPeerNames("tor-1", "tor-2")
	for _, word := range []string{"tor-1, tor-2", `["tor-1","tor-2"]`, string(want)} {
		if got, err := readPeers(word); err != nil || got != want {
			t.Errorf("%q is read as %q, %v", word, got, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encode(update{node: "n1", born: 300, floor: 2, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}}, {vip: vip6, seq: 2, claim: plan.Claim{Reason: "Stopping"}},
		{vip: vip2, seq: 3, gone: true},
	}}, update{node: "n2"}))
	f.Add([]byte{1})
	f.Add(encode(update{node: "n3", entries: []entry{{vip: vip1, seq: 1,
		claim: plan.Claim{Routes: plan.NewPeerNames("tor-1", "tor-2"), Unrouted: lb.ReasonStopping}},
		{vip: vip2, seq: 1, claim: plan.Claim{Routes: `["tor-1"]`}}}}))
	f.Add(encodeCompact(manyAlike(3, 20)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		updates, err := decode(b)
		if err != nil {
			return
		}
		for _, u := range updates {
			for _, e := range u.explicit().entries {
				for _, reason := range []lb.Reason{e.claim.Reason, e.claim.Unrouted} {
					if reason != "" && !reason.IsWord() {
						t.Fatalf("the reason %q", reason)
					}
				}
				for _, peer := range e.claim.Routes.List() {
					if !lb.IsName(peer) {
						t.Fatalf("the peer %q", peer)
					}
				}
			}
		}
		same := encode
		if b[0] == compactVersion {
			same = encodeCompact
		}
		again, err := decode(same(updates...))
		if err != nil {
			t.Fatalf("what was decoded cannot be encoded and decoded: %v", err)
		}
		if b[0] == wireVersion {
			if d := cmp.Diff(updates, again, sameUpdates); d != "" {
				t.Fatal(d)
			}
		}
		first, second := newBook(), newBook()
		first.merge(updates...)
		second.merge(again...)
		if d := cmp.Diff(known(first), known(second), sameUpdates); d != "" {
			t.Fatal(d)
		}
	})
}

func TestSplitFitsIntoPackets(t *testing.T) {
	u := update{node: "k8s-worker-178", born: 1700000000000000000}
	addr := netip.MustParseAddr("10.0.0.0")
	for i := range 1000 {
		addr = addr.Next()
		u.entries = append(u.entries, entry{vip: addr, seq: uint64(i + 1),
			claim: plan.Claim{Reason: lb.ReasonNoLocalBackends}})
	}
	pages := newBook()
	messages := split(u)
	for _, message := range messages {
		if len(message) > messageSize {
			t.Errorf("a message of %d bytes", len(message))
		}
		updates, err := decode(message)
		if err != nil {
			t.Fatal(err)
		}
		pages.merge(updates[0])
	}
	if got := len(pages.pages[u.node].vips()); got != 1000 || len(messages) > 12 {
		t.Errorf("%d entries arrived in %d messages", got, len(messages))
	}
	if got := len(split(update{node: "n1", born: 1})); got != 1 {
		t.Errorf("an empty page goes in %d messages, want 1: it tells that there is a new process", got)
	}
}
