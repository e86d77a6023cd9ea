package tunnel

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/nft/walk"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// written is the table of a family as it would be in the kernel.
type written struct {
	header
	contents
}

func (w written) Chain(name string) (rules []nft.Listed, ok bool) {
	for _, c := range w.chains(limits{DefaultPort, 152, 216, segment(w.family, 1500)}) {
		if c.name == name {
			for _, r := range c.rules {
				rules = append(rules, nft.Listed{Rule: r})
			}
			return rules, true
		}
	}
	return nil, false
}

func (w written) Set(name string) (nft.Shape, bool) {
	i := slices.IndexFunc(w.sets(), func(s nft.Set) bool { return s.Name == name })
	if i < 0 {
		return nft.Shape{}, false
	}
	return w.sets()[i].Shape(), true
}

func (w written) Get(set string, keys ...[]byte) ([]*nft.Element, error) {
	found := make([]*nft.Element, len(keys))
	for i, key := range keys {
		if value, is := w.contents[set][string(key)]; is {
			found[i] = &nft.Element{Key: key, Value: []byte(value)}
		}
	}
	return found, nil
}

func (written) Write(string, nft.Element, bool) {}

// Linux 6.1 refuses a rule that looks up a key of a map and does not load the value.
func TestMapsAreAskedForTheirValues(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		h := headerOf(family)
		for _, c := range h.chains(limits{DefaultPort, 152, 216, segment(family, 1500)}) {
			for _, r := range c.rules {
				for _, e := range r.Exprs {
					lookup, ok := e.(*expr.Lookup)
					if ok && !lookup.IsDestRegSet && (written{header: h}).isMap(lookup.SetName) {
						t.Errorf("%s, chain %s: a rule asks only whether the map %s has a key", family, c.name, lookup.SetName)
					}
				}
			}
		}
	}
}

func (w written) isMap(name string) bool {
	return slices.ContainsFunc(w.sets(), func(s nft.Set) bool { return s.Name == name && s.Flags&unix.NFT_SET_MAP != 0 })
}

// What other nodes hand over comes out of the tunnel for addresses that are forwarded directly alone, the rest of TCP
// and UDP goes back to its sender, once, and the kernel answers questions of nodes to which something could go back.
func TestWhatIsHandedOver(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		at := func(v4, v6 string) netip.AddrPort {
			if family == lb.IPv6 {
				return netip.AddrPortFrom(netip.MustParseAddr(v6), 80)
			}
			return netip.AddrPortFrom(netip.MustParseAddr(v4), 80)
		}
		self, node, other := at("10.2.1.1", "fd02:1::1"), at("10.2.2.1", "fd02:2::1"), at("10.2.3.1", "fd02:3::1")
		vip, unknown, client := at("198.51.100.1", "2001:db8::1"), at("198.51.100.2", "2001:db8::2"),
			at("203.0.113.1", "2001:db8:1::1")
		h, icmp := headerOf(family), uint8(unix.IPPROTO_ICMP)
		if family == lb.IPv6 {
			icmp = unix.IPPROTO_ICMPV6
		}
		want, _ := h.contents(Desired{Nodes: []netip.Addr{node.Addr(), other.Addr()}, Peers: []netip.Addr{node.Addr()},
			Direct: []netip.Addr{vip.Addr()}, DirectKnown: true}, false, false)
		for _, test := range []struct {
			to       netip.AddrPort
			protocol uint8
			ttl      uint8
			from     netip.AddrPort
			want     string
		}{
			{vip, unix.IPPROTO_TCP, 218, node, "accept"},
			{vip, unix.IPPROTO_UDP, 218, node, "accept"},
			{vip, unix.IPPROTO_UDP, 218, other, "accept"}, // a node that this one sends nothing to
			{vip, unix.IPPROTO_SCTP, 218, node, "refused"},
			{vip, icmp, 218, node, "refused"},
			{unknown, unix.IPPROTO_TCP, 218, node, "back to " + Alias(node.Addr()).String()},
			{unknown, unix.IPPROTO_UDP, 218, node, "back to " + Alias(node.Addr()).String()},
			{unknown, unix.IPPROTO_TCP, 218, other, "refused"},
			{vip, unix.IPPROTO_TCP, 217, node, "accept"},
			{vip, unix.IPPROTO_UDP, 217, node, "accept"},
			{unknown, unix.IPPROTO_TCP, 217, node, "refused"},
			{unknown, unix.IPPROTO_UDP, 217, node, "refused"},
			{self, icmp, 218, node, "accept"},
			{self, icmp, 218, other, "refused"},
			{other, icmp, 218, node, "refused"},
			{self, icmp, 64, node, "refused"},
			{vip, unix.IPPROTO_TCP, 219, node, "refused"},
			{vip, unix.IPPROTO_TCP, 64, node, "refused"},
			{vip, unix.IPPROTO_UDP, 200, node, "refused"},
		} {
			w := walk.Walker{Family: family, Name: TableName, Table: written{h, want},
				Local: func(a netip.Addr) bool { return a == self.Addr() }}
			p := trace.Packet{Source: client, Destination: test.to, Interface: lb.TunnelName(family), Protocol: test.protocol,
				TTL: test.ttl, Sender: MAC(test.from.Addr())}
			ends := w.Hook(unix.NF_INET_PRE_ROUTING, chainInside, trace.Way{Packet: p, Chance: 1})
			if len(ends) != 1 {
				t.Fatalf("%s: %+v", family, ends)
			}
			steps := ends[0].Steps()
			got := string(ends[0].Verdict)
			if ends[0].Verdict == trace.Drop {
				got = "refused"
				if before := steps[len(steps)-2].Text; strings.Contains(before, "send a copy") {
					got = "back to " + before[strings.LastIndex(before, " ")+1:]
				}
			}
			if got != test.want {
				t.Errorf("%s, protocol %d to %s with TTL %d from %s: %s, want %s: %+v", family, test.protocol, test.to.Addr(),
					test.ttl, test.from.Addr(), got, test.want, steps)
			}
		}
	}
}

// Answers to SYNs for addresses that are forwarded directly ask for segments that fit into the tunnel: what a client
// sends may come through it. Nothing else is changed.
func TestClientsSendSegmentsThatFit(t *testing.T) {
	for family, addrs := range map[lb.Family][3]string{
		lb.IPv4: {"198.51.100.1", "198.51.100.2", "203.0.113.1"},
		lb.IPv6: {"2001:db8::1", "2001:db8::2", "2001:db8:1::1"},
	} {
		var vip, other, client netip.AddrPort
		for i, at := range []*netip.AddrPort{&vip, &other, &client} {
			*at = netip.AddrPortFrom(netip.MustParseAddr(addrs[i]), 80)
		}
		fits := map[lb.Family]string{lb.IPv4: "at most 1410 bytes", lb.IPv6: "at most 1370 bytes"}[family]
		h := headerOf(family)
		want, _ := h.contents(Desired{Direct: []netip.Addr{vip.Addr()}, DirectKnown: true}, false, false)
		for _, test := range []struct {
			from, to netip.AddrPort
			protocol uint8
			bounded  bool
		}{
			{vip, client, unix.IPPROTO_TCP, true},
			{vip, client, unix.IPPROTO_UDP, false},
			{other, client, unix.IPPROTO_TCP, false},
			{client, vip, unix.IPPROTO_TCP, false}, // to the pod, whose packets do not pass the tunnel
		} {
			w := walk.Walker{Family: family, Name: TableName, Table: written{h, want}}
			p := trace.Packet{Source: test.from, Destination: test.to, Protocol: test.protocol, TTL: 64}
			ends := w.Hook(unix.NF_INET_POST_ROUTING, chainSegments, trace.Way{Packet: p, Chance: 1})
			if len(ends) != 1 || ends[0].Verdict != trace.Undecided {
				t.Fatalf("protocol %d from %s: %+v", test.protocol, test.from, ends)
			}
			steps := ends[0].Steps()
			if bounded := len(steps) == 1 && strings.Contains(steps[0].Text, fits); bounded != test.bounded || len(steps) > 1 {
				t.Errorf("protocol %d from %s to %s: %+v, bounded %v", test.protocol, test.from, test.to, steps, test.bounded)
			}
		}
	}
}

// What fits in one packet follows from the MTU of the networks between the nodes.
func TestSegment(t *testing.T) {
	for _, test := range []struct {
		between  int
		ip4, ip6 uint16
	}{{0, 0, 0}, {1500, 1410, 1370}, {1300, 1210, 1220}, {9000, 8910, 8870}, {300, 536, 1220}, {70_000, 65_535, 65_535}} {
		if ip4, ip6 := segment(lb.IPv4, test.between), segment(lb.IPv6, test.between); ip4 != test.ip4 || ip6 != test.ip6 {
			t.Errorf("MTU %d: %d and %d, want %d and %d", test.between, ip4, ip6, test.ip4, test.ip6)
		}
	}
}

// A pod's packet to another node's port would leave with this node's address as its source, which makes it a node's
// there. So it does not leave.
func TestContract11PodsSendNothingThroughTheTunnel(t *testing.T) {
	at := func(addr string, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr(addr), port)
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		self, pod, node, gateway, other := "10.2.1.1", "10.244.1.7", "10.2.2.1", "10.2.3.1", "198.51.100.9"
		if family == lb.IPv6 {
			self, pod, node, gateway, other = "fd02:1::1", "fd44:1::7", "fd02:2::1", "fd02:3::1", "2001:db8::9"
		}
		h := headerOf(family)
		want, _ := h.contents(Desired{Nodes: []netip.Addr{netip.MustParseAddr(node), netip.MustParseAddr(gateway)}}, false,
			false)
		for _, test := range []struct {
			from, to string
			port     uint16
			protocol uint8
			refused  bool
		}{
			{pod, node, DefaultPort, unix.IPPROTO_UDP, true},
			{pod, node, 53, unix.IPPROTO_UDP, false},
			{pod, node, DefaultPort, unix.IPPROTO_TCP, false},
			{pod, other, DefaultPort, unix.IPPROTO_UDP, false},
			{node, self, DefaultPort, unix.IPPROTO_UDP, false},
			{gateway, node, DefaultPort, unix.IPPROTO_UDP, false}, // this node routes between other nodes
		} {
			w := walk.Walker{Family: family, Name: TableName, Table: written{h, want},
				Local: func(a netip.Addr) bool { return a == netip.MustParseAddr(self) }}
			p := trace.Packet{Source: at(test.from, 40000), Destination: at(test.to, test.port), Interface: "eth0",
				Protocol: test.protocol, TTL: 64}
			ends := w.Hook(unix.NF_INET_PRE_ROUTING, chainReceived, trace.Way{Packet: p, Chance: 1})
			if len(ends) != 1 || (ends[0].Verdict == trace.Drop) != test.refused {
				t.Errorf("%s, protocol %d from %s to port %d of %s: %+v, refused: %t", family, test.protocol, test.from, test.port,
					test.to, ends, !test.refused)
			}
		}
	}
}

// Nodes that have the same alias have none: what goes back to one might get to the other.
func TestAliases(t *testing.T) {
	a, twin, other := netip.MustParseAddr("10.2.1.1"), netip.MustParseAddr("172.2.1.1"), netip.MustParseAddr("10.2.1.2")
	alias := apart([]netip.Addr{a, twin, other})
	if alias(a).IsValid() || alias(twin).IsValid() || alias(other) != netip.MustParseAddr("255.2.1.2") {
		t.Errorf("%s, %s, %s", alias(a), alias(twin), alias(other))
	}
	for _, node := range []netip.Addr{a, netip.MustParseAddr("fd02:1::1")} {
		if !aliases(lb.FamilyOf(node)).Contains(Alias(node)) {
			t.Errorf("%s is known as %s", node, Alias(node))
		}
	}
	for diverted, n := range map[bool]int{false: 1, true: 0} {
		want, _ := headerOf(lb.IPv4).contents(Desired{Peers: []netip.Addr{a, twin, other}}, false, diverted)
		if len(want[setSenders]) != n {
			t.Errorf("diverted %v: what goes back leads to %q", diverted, want[setSenders])
		}
	}
}
