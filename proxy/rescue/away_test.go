package rescue

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// A node whose link is away, or whose tunnel cannot be looked at, stays the target that it was, but not for ever.
func TestContract5ANodeWhoseLinkIsAwayKeepsItsPlace(t *testing.T) {
	vip, node := addr("192.0.2.1"), addr("10.0.0.1")
	routed := links.Neighbor{Routed: true, Link: 3, MTU: 1500}
	near := there(1)
	near.Link = 2
	previous := Desired{Previous: map[netip.Addr][]netip.Addr{vip: {node}}}
	ring := Desired{Ring: map[netip.Addr][]netip.Addr{vip: {node}}}
	noTunnel := errors.New("list of routes: results may be incomplete or inconsistent")
	type look struct {
		what    string
		n       links.Neighbor // the zero value if the kernel knows nothing
		cannot  error          // of the tunnel
		later   time.Duration
		kept    bool
		carried int
	}
	for _, tt := range []struct {
		name  string
		w     Desired
		looks []look
	}{
		{"a previous owner", previous, []look{
			{"there", near, nil, 0, true, 0}, {"away", routed, nil, 0, true, 2},
			{"still away", routed, nil, time.Minute, true, 2},
			{"back, and nobody had answered", links.Neighbor{Failed: true}, nil, 0, true, 0},
			{"asked for", links.Neighbor{}, nil, 0, true, 0}, {"found", near, nil, 0, true, 0},
			{"fails", links.Neighbor{Failed: true}, nil, 0, false, 0}}},
		{"it has moved behind a router", previous, []look{
			{"there", near, nil, 0, true, 0}, {"away", routed, nil, 0, true, 2},
			{"for too long", routed, nil, linkAway, false, 0}, {"and on", routed, nil, 0, false, 0},
			{"back", near, nil, 0, true, 0}, {"away once more", routed, nil, 0, true, 2}}},
		{"the other way is away too for a moment", previous, []look{
			{"there", near, nil, 0, true, 0}, {"away", routed, nil, 0, true, 2},
			{"no way at all", links.Neighbor{}, nil, linkAway / 2, true, 2}, {"away", routed, nil, 0, true, 2},
			{"no way once more", links.Neighbor{}, nil, linkAway / 2, true, 2}, {"for too long", routed, nil, 0, false, 0},
			{"back", near, nil, 0, true, 0}}},
		{"over a router of the same link", previous, []look{
			{"there", near, nil, 0, true, 0}, {"the address is gone", links.Neighbor{Routed: true, Link: 2}, nil, 0, false, 0},
			{"back", near, nil, 0, true, 0}}},
		{"over a router of the same link, of a ring without a tunnel", ring, []look{
			{"there", near, errNoTunnel, 0, true, 0},
			{"the address is gone", links.Neighbor{Routed: true, Link: 2}, errNoTunnel, 0, false, 0}}},
		{"of a ring without a tunnel", ring, []look{
			{"there", near, errNoTunnel, 0, true, 0}, {"away", routed, errNoTunnel, 0, true, 2},
			{"back", near, errNoTunnel, 0, true, 0}}},
		{"of a ring, over the tunnel meanwhile", ring, []look{
			{"there", near, nil, 0, true, 0}, {"away", routed, nil, 0, true, 7}, {"back", near, nil, 0, true, 0}}},
		{"a tunnel that cannot be looked at once", ring, []look{
			{"there", routed, nil, 0, true, 7}, {"fails", routed, noTunnel, 0, true, 7}, {"works", routed, nil, 0, true, 7},
			{"fails again", routed, noTunnel, tunnelAway - time.Second, true, 7}}},
		{"a tunnel that is gone for good", ring, []look{
			{"there", routed, nil, 0, true, 7}, {"fails", routed, noTunnel, 0, true, 7},
			{"for too long", routed, noTunnel, tunnelAway, false, 0}, {"works", routed, nil, 0, true, 7}}},
		{"a tunnel that is switched off", ring, []look{
			{"there", routed, nil, 0, true, 7}, {"none", routed, errNoTunnel, 0, false, 0}}},
	} {
		k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}, tunnel: 7}
		a := newActor(fakeDeps, k)
		a.SetNodes([]netip.Addr{addr("10.0.1.1")}, []netip.Addr{node})
		for _, l := range tt.looks {
			if k.neighbor[node] = l.n; l.n == (links.Neighbor{}) {
				delete(k.neighbor, node)
			}
			k.cannotCarry = l.cannot
			for away, since := range a.away {
				a.away[away] = since.Add(-l.later)
			}
			for range 2 { // the second one finds all as it shall be
				a.set(tt.w)
				a.looked = time.Time{}
				if _, err := a.step(t.Context()); err != nil {
					t.Fatal(err)
				}
				if l.n.Failed {
					break
				}
			}
			if _, kept := k.have.sent[node]; kept != l.kept || a.written[lb.IPv4].carried[node] != l.carried {
				t.Errorf("%s, %s: the kernel has it: %t, over interface %d; want %t, %d", tt.name, l.what, kept,
					a.written[lb.IPv4].carried[node], l.kept, l.carried)
			}
		}
	}
}

// The next node of a ring is one to which there is a way, if there is such; who is away keeps what is remembered of it.
func TestContract5ANodeThatIsAwayIsNotTheNext(t *testing.T) {
	vip, first, second := addr("192.0.2.1"), addr("10.0.0.1"), addr("10.0.0.2")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{first: there(1), second: there(2)}, cannotCarry: errNoTunnel}
	a := newActor(fakeDeps, k)
	w := Desired{Ring: map[netip.Addr][]netip.Addr{vip: {first, second}}}
	for _, tt := range []struct {
		what string
		n    links.Neighbor
		next netip.Addr
	}{{"there", there(1), first}, {"away", links.Neighbor{Routed: true, Link: 9}, second}, {"back", there(1), first}} {
		k.neighbor[first] = tt.n
		for range 2 {
			a.set(w)
			a.looked = time.Time{}
			if _, err := a.step(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		_, kept := k.have.sent[first]
		if targets := a.written[lb.IPv4].targets; !slices.Equal(targets[tt.next], []netip.Addr{vip}) || !kept {
			t.Errorf("%s: the next node is by %v, want %s; the first one is a target: %t", tt.what, targets, tt.next, kept)
		}
	}
}

// A link to the others that is away while the default route leaves over another one costs nothing that is remembered,
// and no copy goes to that one's router meanwhile.
func TestContract5ALinkThatIsAwayForgetsNothing(t *testing.T) {
	for _, away := range []string{"the link is down", "the addresses are taken away with the carrier"} {
		r := newRack(t, 2)
		node, a := r.nodes[1], r.actors[1]
		uplink := lan{client: nstest.New(t)}
		nstest.Veth(t, uplink.client, "eth0", "10.8.0.1/24", node, "up0", "10.8.0.2/24")
		uplink.client.Run(t, "ip", "addr", "add", "fd08::1/64", "dev", "eth0", "nodad")
		node.Run(t, "ip", "addr", "add", "fd08::2/64", "dev", "up0", "nodad")
		node.Run(t, "ip", "route", "add", "default", "via", "10.8.0.1")
		node.Run(t, "ip", "route", "add", "default", "via", "fd08::1")
		for _, router := range []string{"10.8.0.1", "fd08::1"} { // so copies to it would not have to wait
			node.Run(t, "ip", "neigh", "replace", router, "lladdr", macOf(t, uplink.client), "dev", "up0", "nud", "permanent")
		}
		mac := strings.Fields(node.Run(t, "ip", "-br", "link", "show", "up0"))[2]
		toRouter := arrivals(t, uplink.client, madeUp...)
		node.Run(t, "sysctl", "-qw", "net.ipv6.conf.eth0.keep_addr_on_down=1")
		w := from(v4.vip, v4.a, v6.vip, v6.a)
		r.set(t, 1, w)
		for _, at := range []addresses{v4, v6} {
			h := headerOf(lb.FamilyOf(addr(at.vip)))
			node.Run(t, "nft", "add", "element", nftFamily(h), tableName, name(prefixFlows, addr(at.a)),
				"{ "+at.client+" . 1 . "+at.vip+" . 80 }")
		}
		check := func(when string, pinned bool) {
			t.Helper()
			for _, at := range []addresses{v4, v6} {
				h := headerOf(lb.FamilyOf(addr(at.vip)))
				out := node.Run(t, "nft", "list", "table", nftFamily(h), tableName)
				if !strings.Contains(out, at.client+" . 1 . "+at.vip) ||
					strings.Count(out, "dup to "+at.a+` device "eth0"`) > 0 != pinned {
					t.Errorf("%s, %s: want what is remembered, and the link in rules: %t\n%s", away, when, pinned, out)
				}
			}
		}
		if away == "the link is down" {
			node.Run(t, "ip", "link", "set", "eth0", "down")
		} else {
			node.Run(t, "ip", "addr", "flush", "dev", "eth0")
		}
		for range 2 {
			node.Do(t, a.apply)
			check("away", true)
		}
		moved := a.Packets()
		uplink.send(t, slices.Values([][]byte{ack(mac, v4.vip, 1), ack(mac, v6.vip, 1)}))
		until(t, "both are moved", func() bool {
			node.Do(t, a.apply)
			return a.Packets() == moved+2
		})
		if n := toRouter(); n > 0 {
			t.Errorf("%s: the router has got %d packets that were moved", away, n)
		}
		if away == "the link is down" {
			node.Run(t, "ip", "link", "set", "eth0", "up")
		} else {
			node.Run(t, "ip", "addr", "add", "10.0.0.2/24", "dev", "eth0")
			node.Run(t, "ip", "addr", "add", "fd00::2/64", "dev", "eth0", "nodad")
		}
		until(t, "the route is back", func() bool { // IPv6 takes a moment
			return strings.Contains(node.Run(t, "ip", "-6", "route", "get", v6.a), "dev eth0")
		})
		until(t, "the other node has answered", func() bool { // until then rules name the link
			node.Do(t, a.apply)
			return len(a.away) == 0
		})
		for range 3 {
			node.Do(t, a.apply)
			check("back", false)
		}
	}
}
