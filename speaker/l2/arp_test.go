package l2

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
)

var (
	vip    = netip.MustParseAddr("172.26.236.180")
	client = netip.MustParseAddr("172.26.236.9")
	own    = net.HardwareAddr{0x02, 0, 0, 0, 0, 0x78}
	theirs = net.HardwareAddr{0x02, 0, 0, 0, 0, 0x09}
)

type question struct {
	op       arp.Operation
	from, to net.HardwareAddr
	sender   netip.Addr
	mac      net.HardwareAddr // in the ARP header
	target   netip.Addr
	tweak    func([]byte) []byte
}

func ask(tweak ...func(*question)) []byte {
	q := question{op: arp.OperationRequest, from: theirs, to: ethernet.Broadcast, sender: client, mac: theirs, target: vip}
	for _, t := range tweak {
		t(&q)
	}
	frame, err := encodeARP(q.op, q.mac, q.sender, make(net.HardwareAddr, 6), q.target, q.to)
	if err != nil {
		panic(err)
	}
	copy(frame[6:12], q.from)
	if q.tweak != nil {
		frame = q.tweak(frame)
	}
	return frame
}

func answerARP(b []byte, own net.HardwareAddr, answers func(netip.Addr) bool) ([]byte, netip.Addr, Drop) {
	f, ok := readARP(b)
	if !ok {
		return nil, netip.Addr{}, dropMalformed
	}
	return f.answer(own, answers)
}

func TestContract1AnswersOnlyWhatItShould(t *testing.T) {
	other := netip.MustParseAddr("172.26.236.181")
	for _, c := range []struct {
		name  string
		frame []byte
		want  Drop
	}{
		{"a broadcast request", ask(), dropNone},
		{"a request to our MAC, as a neighbor that checks us sends it", ask(func(q *question) { q.to = own }), dropNone},
		{"a probe (RFC 5227) is told that the address is in use",
			ask(func(q *question) { q.sender = netip.IPv4Unspecified() }), dropNone},
		{
			"padded to the least size of a frame",
			ask(func(q *question) { q.tweak = func(b []byte) []byte { return append(b, make([]byte, 18)...) } }), dropNone},
		{"a VIP that this node does not answer for", ask(func(q *question) { q.target = other }), dropNotOurs},
		{"a reply", ask(func(q *question) { q.op = arp.OperationReply }), dropNotRequest},
		{"a request to somebody else's MAC", ask(func(q *question) { q.to = net.HardwareAddr{2, 0, 0, 0, 0, 1} }),
			dropNotForUs},
		{"another node's announcement", ask(func(q *question) { q.sender = vip }), dropAnnounced},
		{"a sender whose MAC is broadcast", ask(func(q *question) { q.mac = ethernet.Broadcast }), dropBadSender},
		{"a sender whose MAC is ours", ask(func(q *question) { q.mac = own }), dropBadSender},
		{"empty", nil, dropMalformed},
		{"cut short", ask()[:20], dropMalformed},
		{"not ARP", ask(func(q *question) { q.tweak = func(b []byte) []byte { b[12], b[13] = 0x08, 0x00; return b } }),
			dropMalformed},
		{"not Ethernet", ask(func(q *question) { q.tweak = func(b []byte) []byte { b[15] = 6; return b } }), dropMalformed},
		{"not IPv4", ask(func(q *question) { q.tweak = func(b []byte) []byte { b[16] = 0x86; return b } }), dropMalformed},
		{"tagged for a VLAN", ask(func(q *question) {
			q.tweak = func(b []byte) []byte { return append(append(bytes.Clone(b[:12]), 0x81, 0, 0, 7), b[12:]...) }
		}), dropMalformed},
		{"lengths that lie", ask(func(q *question) { q.tweak = func(b []byte) []byte { b[18] = 200; return b } }),
			dropMalformed},
	} {
		t.Run(c.name, func(t *testing.T) {
			reply, _, drop := answerARP(c.frame, own, func(a netip.Addr) bool { return a == vip })
			if drop != c.want || (reply != nil) != (c.want == dropNone) {
				t.Errorf("got %q and %d bytes, want %q", drop, len(reply), c.want)
			}
		})
	}
}

// The bytes of an answer, written out: RFC 826, and the interface's own MAC in both headers.
func TestAnswerBytes(t *testing.T) {
	reply, asked, _ := answerARP(ask(), own, func(netip.Addr) bool { return true })
	want := []byte{
		2, 0, 0, 0, 0, 0x09, 2, 0, 0, 0, 0, 0x78, 0x08, 0x06, // to, from, type
		0, 1, 0x08, 0x00, 6, 4, 0, 2, // Ethernet, IPv4, lengths, reply
		2, 0, 0, 0, 0, 0x78, 172, 26, 236, 180, // the VIP is at our MAC
		2, 0, 0, 0, 0, 0x09, 172, 26, 236, 9,
	}
	if d := cmp.Diff(want, reply[:42]); d != "" || asked != vip {
		t.Errorf("asked %v: %s", asked, d)
	}
}

func TestAnnouncementBytes(t *testing.T) {
	frames, err := announceARP(own, vip)
	if err != nil || len(frames) != 2 {
		t.Fatalf("%d frames, %v", len(frames), err)
	}
	head := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 0x78, 0x08, 0x06, 0, 1, 0x08, 0x00, 6, 4}
	request := append(bytes.Clone(head), 0, 1, 2, 0, 0, 0, 0, 0x78, 172, 26, 236, 180, 0, 0, 0, 0, 0, 0, 172, 26, 236, 180)
	reply := append(bytes.Clone(head), 0, 2, 2, 0, 0, 0, 0, 0x78, 172, 26, 236, 180, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
		172, 26, 236, 180)
	for i, want := range [][]byte{request, reply} {
		if d := cmp.Diff(want, frames[i][:42]); d != "" {
			t.Errorf("frame %d: %s", i, d)
		}
	}
}

func FuzzAnswerARP(f *testing.F) {
	f.Add(ask())
	f.Add(ask(func(q *question) { q.op = arp.OperationReply }))
	f.Add(ask()[:30])
	f.Fuzz(func(t *testing.T, frame []byte) {
		reply, asked, drop := answerARP(frame, own, func(a netip.Addr) bool { return a == vip })
		if drop != dropNone {
			if reply != nil {
				t.Fatal("dropped and answered")
			}
			return
		}
		var eth ethernet.Frame
		var p arp.Packet
		if err := eth.UnmarshalBinary(reply); err != nil {
			t.Fatal(err)
		}
		if err := p.UnmarshalBinary(eth.Payload); err != nil {
			t.Fatal(err)
		}
		if asked != vip || p.SenderIP != vip || !bytes.Equal(p.SenderHardwareAddr, own) || !bytes.Equal(eth.Source, own) ||
			eth.Destination[0]&1 == 1 {
			t.Fatalf("answered %v with %v from %v to %v", asked, p, eth.Source, eth.Destination)
		}
	})
}
