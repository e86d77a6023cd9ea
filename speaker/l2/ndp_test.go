package l2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"

	"github.com/landfall-lb/landfall/internal/lb"
)

var (
	vip6      = netip.MustParseAddr("2001:db8::180")
	client6   = netip.MustParseAddr("2001:db8::9")
	clientMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}
	ownMAC    = net.HardwareAddr{2, 0, 0, 0, 1, 78}
)

// solicit is a neighbor solicitation as a client's kernel sends it.
type solicit struct {
	source, destination, target netip.Addr
	to                          net.HardwareAddr
	option                      bool
	options                     []byte // others
	tweak                       func(frame []byte)
}

func (q solicit) frame(t testing.TB) []byte {
	message := &ndp.NeighborSolicitation{TargetAddress: q.target}
	if q.option {
		message.Options = []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: clientMAC}}
	}
	body, err := ndp.MarshalMessageChecksum(message, q.source, q.destination)
	if err != nil {
		t.Fatal(err)
	}
	if len(q.options) > 0 {
		body = append(body, q.options...)
		binary.BigEndian.PutUint16(body[2:], 0)
		binary.BigEndian.PutUint16(body[2:], checksumOf(q.source, q.destination, body))
	}
	header := make([]byte, ipv6Header)
	header[0] = 6 << 4
	binary.BigEndian.PutUint16(header[4:], uint16(len(body)))
	header[6], header[7] = protocolICMPv6, hopLimit
	copy(header[8:], q.source.AsSlice())
	copy(header[24:], q.destination.AsSlice())
	frame, err := (&ethernet.Frame{Destination: q.to, Source: clientMAC, EtherType: ethernet.EtherTypeIPv6,
		Payload: append(header, body...)}).MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if q.tweak != nil {
		q.tweak(frame)
	}
	return frame
}

// checksumOf returns the checksum of an ICMPv6 message of an even size whose own is 0 (RFC 8200 section 8.1).
func checksumOf(source, destination netip.Addr, body []byte) uint16 {
	sum := uint32(len(body)) + protocolICMPv6
	for _, part := range [][]byte{source.AsSlice(), destination.AsSlice(), body} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func group(t testing.TB, vip netip.Addr) netip.Addr {
	g, err := ndp.SolicitedNodeMulticast(vip)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func answerNDP(b []byte, own net.HardwareAddr, answers func(netip.Addr) bool) ([]byte, netip.Addr, Drop) {
	f, ok := readNDP(b)
	if !ok {
		return nil, netip.Addr{}, dropMalformed
	}
	return f.answer(own, answers)
}

func TestAnswerNDP(t *testing.T) {
	g := group(t, vip6)
	asked := solicit{source: client6, destination: g, target: vip6, to: multicastMAC(g), option: true}
	for _, c := range []struct {
		name  string
		tweak func(*solicit)
		want  Drop
		to    netip.Addr
		mac   net.HardwareAddr
	}{
		{name: "asked of the group", to: client6, mac: clientMAC},
		{name: "asked of the address itself, to see whether it is still here",
			tweak: func(q *solicit) { q.destination, q.to, q.option = vip6, ownMAC, false }, to: client6, mac: clientMAC},
		{name: "somebody is about to take the address",
			tweak: func(q *solicit) { q.source, q.option = netip.IPv6Unspecified(), false }, to: allNodes,
			mac: multicastMAC(allNodes)},
		{name: "another address of the same group",
			tweak: func(q *solicit) { q.target = netip.MustParseAddr("2001:db8:1::180") }, want: dropNotOurs},
		{name: "for another machine", tweak: func(q *solicit) {
			q.destination, q.to = vip6,
				net.HardwareAddr{2, 0, 0, 0, 0, 77}
		}, want: dropNotForUs},
		{name: "sent to another address", tweak: func(q *solicit) { q.destination, q.to = client6, ownMAC },
			want: dropBadSender},
		{name: "came over a router", tweak: func(q *solicit) { q.tweak = func(b []byte) { b[ethernetHeader+7] = 254 } },
			want: dropMalformed},
		{
			name:  "a wrong checksum",
			tweak: func(q *solicit) { q.tweak = func(b []byte) { b[ethernetHeader+ipv6Header+2] ^= 1 } }, want: dropMalformed},
		{name: "cut short", tweak: func(q *solicit) { q.tweak = func(b []byte) { b[ethernetHeader+5] = 200 } },
			want: dropMalformed},
		{name: "our own", tweak: func(q *solicit) { q.tweak = func(b []byte) { copy(b[6:], ownMAC) } }, want: dropBadSender},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := asked
			if c.tweak != nil {
				c.tweak(&q)
			}
			reply, _, drop := answerNDP(q.frame(t), ownMAC, func(a netip.Addr) bool { return a == vip6 })
			if drop != c.want {
				t.Fatalf("drop %q, want %q", drop, c.want)
			}
			if c.want != dropNone {
				return
			}
			var eth ethernet.Frame
			if err := eth.UnmarshalBinary(reply); err != nil {
				t.Fatal(err)
			}
			source, to, body, ok := icmp(eth.Payload)
			if !ok || source != vip6 || to != c.to || !slices.Equal(eth.Destination, c.mac) ||
				!slices.Equal(eth.Source, ownMAC) {
				t.Fatalf("the answer is well-formed: %v; from %s to %s at %s", ok, source, to, eth.Destination)
			}
			message, err := ndp.ParseMessage(body)
			if err != nil {
				t.Fatal(err)
			}
			a := message.(*ndp.NeighborAdvertisement)
			if a.TargetAddress != vip6 || !a.Override || a.Solicited != (c.to == client6) || a.Router {
				t.Errorf("%+v", a)
			}
			if l := a.Options[0].(*ndp.LinkLayerAddress); !slices.Equal(l.Addr, ownMAC) || l.Direction != ndp.Target {
				t.Errorf("%+v", l)
			}
		})
	}
}

// A solicitation is answered whatever options it has beside the one that counts (RFC 4861 section 7.1.1), also those
// that make no sense, and they cost nothing: anybody on the LAN may fill packets with them.
func TestOtherOptionsOfNDPCostNothing(t *testing.T) {
	g := group(t, vip6)
	for name, option := range map[string][]byte{
		"an MTU of 16 bytes":           append([]byte{5, 2}, make([]byte, 14)...),
		"a nonce":                      {14, 1, 1, 2, 3, 4, 5, 6},
		"an address of 16 bytes":       append([]byte{1, 2}, make([]byte, 14)...),
		"280 bytes that nobody knows":  append([]byte{200, 35}, make([]byte, 278)...),
		"a name of a domain in puny":   append([]byte{31, 3, 0, 0, 0, 0, 0, 9, 13}, "xn--bcher-kva\x00\x00"...),
		"a route to everywhere, often": bytes.Repeat([]byte{24, 1, 0, 0, 0, 0, 0, 0}, 5),
	} {
		t.Run(name, func(t *testing.T) {
			plain := solicit{source: client6, destination: g, target: vip6, to: multicastMAC(g), option: true}
			full := plain
			full.options = bytes.Repeat(option, 1400/len(option))
			cost := func(q solicit) float64 {
				frame := q.frame(t)
				return testing.AllocsPerRun(10, func() {
					if _, _, drop := answerNDP(frame, ownMAC, func(a netip.Addr) bool { return a == vip6 }); drop != dropNone {
						t.Errorf("it is dropped: %s", drop)
					}
				})
			}
			if few, many := cost(plain), cost(full); many > few {
				t.Errorf("%.0f allocations, and %.0f without the options", many, few)
			}
		})
	}
}

func FuzzAnswerNDP(f *testing.F) {
	g := group(f, vip6)
	f.Add(solicit{source: client6, destination: g, target: vip6, to: multicastMAC(g), option: true}.frame(f))
	f.Add(solicit{source: netip.IPv6Unspecified(), destination: g, target: vip6, to: multicastMAC(g)}.frame(f))
	f.Fuzz(func(t *testing.T, frame []byte) {
		reply, asked, drop := answerNDP(frame, ownMAC, func(a netip.Addr) bool { return a == vip6 })
		if (drop == dropNone) != (reply != nil) || reply != nil && asked != vip6 {
			t.Errorf("reply %x for %s, drop %q", reply, asked, drop)
		}
	})
}

// A client's kernel finds an IPv6 VIP, follows a takeover, sees by unicast that it is still there,
// and finds it again after a flap.
func TestClientResolvesOverNDP(t *testing.T) {
	l := newLAN(t)
	l.client.Run(t, "ip", "addr", "add", "2001:db8::9/64", "dev", "eth0", "nodad")
	first, second := l.node(t, "172.26.236.178/24"), l.node(t, "172.26.236.179/24")
	neighbor := func() string {
		return strings.TrimSpace(l.client.Run(t, "ip", "-6", "neigh", "show", vip6.String()))
	}
	knock := func() {
		l.client.Do(t, func() error {
			conn, err := net.DialUDP("udp6", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(vip6, 9)))
			if err != nil {
				return err
			}
			defer conn.Close()
			_, _ = conn.Write([]byte("knock"))
			return nil
		})
	}
	at := func(n *node) func() bool {
		return func() bool { knock(); return strings.Contains(neighbor(), n.i.MAC.String()) }
	}
	first.answerFor(vip6, vip)
	eventually(t, "the first node answers for both families",
		func() bool { return len(first.actor.Outcome().Answering) == 2 })
	eventually(t, "the client finds the VIP", at(first))
	before := first.stats.replies.Load()
	l.client.Run(t, "ip", "-6", "neigh", "replace", vip6.String(), "lladdr", first.i.MAC.String(), "dev", "eth0", "nud",
		"probe")
	eventually(t, "the client has made sure of it by unicast", func() bool {
		knock()
		return first.stats.replies.Load() > before && strings.Contains(neighbor(), "REACHABLE")
	})
	second.answerFor(vip6)
	eventually(t, "the client follows the announcement", at(second))
	first.answerFor()
	second.ns.Run(t, "ip", "link", "set", "eth0", "down")
	eventually(t, "the node knows that it does not answer",
		func() bool { return len(second.actor.Outcome().Answering) == 0 })
	second.ns.Run(t, "ip", "link", "set", "eth0", "up")
	eventually(t, "it answers again", func() bool { return len(second.actor.Outcome().Answering) == 1 })
	l.client.Run(t, "ip", "-6", "neigh", "flush", "all")
	eventually(t, "the client finds it again", at(second))
	second.answerFor()
	eventually(t, "it has stopped", func() bool { return len(second.actor.Outcome().Answering) == 0 })
	l.client.Run(t, "ip", "-6", "neigh", "flush", "all")
	knock()
	eventually(t, "the client finds nobody", func() bool { return strings.Contains(neighbor(), "FAILED") })
}

// A group that cannot be joined is a problem of the interface: nobody who asks would be heard.
func TestAGroupThatCannotBeJoined(t *testing.T) {
	r, err := newNDPResponder(lb.Interface{Name: "eth0", MAC: ownMAC},
		func(lb.Interface) (NDPSocket, error) { return deaf{}, nil }, around{stat: &counts{}})
	if err != nil {
		t.Fatal(err)
	}
	r.answer(&work{answers: map[netip.Addr]Answer{vip6: {}}})
	if err := r.announce(vip6); err == nil {
		t.Error("it announces what nobody can ask for")
	}
}

type deaf struct{ NDPSocket }

func (deaf) Join(netip.Addr) (func(), error) { return nil, errors.New("no buffer space available") }
