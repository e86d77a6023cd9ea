package links

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestRenew has a kernel wait for a neighbor that it asks only once: after Renew it finds the
// neighbor, and what was to be sent arrives.
func TestRenew(t *testing.T) {
	for name, c := range map[string]struct{ family, first, second, prefix string }{
		"IPv4": {"ipv4", "198.51.100.1", "198.51.100.2", "24"},
		"IPv6": {"ipv6", "2001:db8::1", "2001:db8::2", "64"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := nstest.New(t), nstest.New(t)
			nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
			a.Run(t, "ip", "addr", "add", c.first+"/"+c.prefix, "dev", "eth0", "nodad")
			a.Run(t, "sysctl", "-qw", "net."+c.family+".neigh.eth0.mcast_solicit=1",
				"net."+c.family+".neigh.eth0.retrans_time_ms=300000")
			to := netip.MustParseAddr(c.second)
			var n *Neighbors
			a.Do(t, func() (err error) {
				n, err = OpenNeighbors()
				return err
			})
			defer n.Close()
			find := func() (found Unresolved, ok bool) {
				t.Helper()
				all, err := n.Unresolved()
				if err != nil {
					t.Fatal(err)
				}
				i := slices.IndexFunc(all, func(u Unresolved) bool { return u.Addr == to })
				if i < 0 {
					return found, false
				}
				return all[i], true
			}
			if u, ok := find(); ok {
				t.Fatalf("nobody has asked, and %+v is there", u)
			}
			send(t, a, to)
			waiting, ok := find()
			if !ok || waiting.Failed || waiting.Link == 0 {
				t.Fatalf("while the kernel asks: %+v, found: %v", waiting, ok)
			}
			b.Run(t, "ip", "addr", "add", c.second+"/"+c.prefix, "dev", "eth0", "nodad")
			received := listen(t, b, to)
			// The kernel may not listen for questions about the new address for a moment.
			for deadline := time.Now().Add(20 * time.Second); !arrived(received); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("what was to be sent does not arrive: %s", a.Run(t, "ip", "neigh"))
				}
				if err := n.Renew(waiting); err != nil {
					t.Fatal(err)
				}
			}
			if u, ok := find(); ok {
				t.Errorf("after the answer: %+v", u)
			}
		})
	}
}

// TestRenewFailed does the same with a neighbor that the kernel has given up.
func TestRenewFailed(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "198.51.100.1/24", b, "eth0", "198.51.100.2/24")
	a.Run(t, "sysctl", "-qw", "net.ipv4.neigh.eth0.mcast_solicit=1", "net.ipv4.neigh.eth0.retrans_time_ms=10")
	to := netip.MustParseAddr("198.51.100.3")
	var n *Neighbors
	a.Do(t, func() (err error) {
		n, err = OpenNeighbors()
		return err
	})
	defer n.Close()
	wait := func(what string, is func([]Unresolved) bool) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			all, err := n.Unresolved()
			switch {
			case err != nil:
				t.Fatal(err)
			case is(all):
				return
			case time.Now().After(deadline):
				t.Fatalf("%s: still %+v", what, all)
			}
		}
	}
	send(t, a, to)
	var failed Unresolved
	wait("the kernel gives up", func(all []Unresolved) bool {
		if len(all) == 1 {
			failed = all[0]
		}
		return failed.Failed && failed.Addr == to
	})
	b.Run(t, "ip", "addr", "add", to.String()+"/24", "dev", "eth0")
	wait("the neighbor is there", func(all []Unresolved) bool {
		// On a busy machine the one question may be given up before the answer is there.
		if len(all) == 1 && all[0].Failed {
			if err := n.Renew(all[0]); err != nil {
				t.Fatal(err)
			}
		}
		return len(all) == 0
	})
}

// send sends a datagram.
func send(t *testing.T, from *nstest.NS, to netip.Addr) {
	t.Helper()
	from.Do(t, func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 4242)))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte("x"))
		return err
	})
}

// listen returns a channel that is closed when a datagram has come.
func listen(t *testing.T, at *nstest.NS, addr netip.Addr) <-chan struct{} {
	t.Helper()
	var conn *net.UDPConn
	at.Do(t, func() (err error) {
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 4242)))
		return err
	})
	t.Cleanup(func() { conn.Close() })
	received := make(chan struct{})
	go func() {
		if _, _, err := conn.ReadFromUDP(make([]byte, 1)); err == nil {
			close(received)
		}
	}()
	return received
}

func arrived(datagram <-chan struct{}) bool {
	select {
	case <-datagram:
		return true
	default:
		return false
	}
}

// TestRoutesTo asks a kernel how it reaches addresses.
func TestRoutesTo(t *testing.T) {
	node, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "eth0", "192.0.2.9/24", router, "eth0", "192.0.2.1/24")
	node.Run(t, "ip", "addr", "add", "2001:db8::9/64", "dev", "eth0", "nodad")
	for _, route := range [][]string{
		{"default", "via", "192.0.2.1"}, {"10.1.0.0/24", "via", "192.0.2.7"}, {"unreachable", "10.2.0.0/24"},
		{"blackhole", "10.3.0.0/24"}, {"prohibit", "10.4.0.0/24"}, {"2001:db8:1::/64", "via", "2001:db8::7"},
		{"unreachable", "2001:db8:2::/64"}, {"blackhole", "2001:db8:3::/64"},
	} {
		node.Run(t, "ip", append([]string{"route", "add"}, route...)...)
	}
	want := map[string]lb.RouteKind{"10.1.0.5": lb.RouteOwn, "192.0.2.7": lb.RouteOwn, "10.9.0.1": lb.RouteDefault,
		"10.2.0.1": lb.RouteNone, "10.3.0.1": lb.RouteUnknown, "10.4.0.1": lb.RouteNone, "2001:db8:1::1": lb.RouteOwn,
		"2001:db8:9::1": lb.RouteNone, "2001:db8:2::1": lb.RouteNone, "2001:db8:3::1": lb.RouteUnknown}
	var addrs []netip.Addr
	for addr := range want {
		addrs = append(addrs, netip.MustParseAddr(addr))
	}
	node.Do(t, func() error {
		got, err := RoutesTo(netns.None(), addrs)
		for addr, kind := range got {
			if kind != want[addr.String()] {
				t.Errorf("%s: %d, want %d", addr, kind, want[addr.String()])
			}
		}
		return err
	})
}

// TestNextHops reads the next hops of all routes of a kernel, each once.
func TestNextHops(t *testing.T) {
	node, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "eth0", "192.0.2.9/24", router, "eth0", "192.0.2.1/24")
	node.Run(t, "ip", "addr", "add", "2001:db8::9/64", "dev", "eth0", "nodad")
	for _, route := range [][]string{
		{"default", "via", "192.0.2.1"}, {"198.51.100.0/24", "via", "192.0.2.7"}, {"203.0.113.0/25", "via", "192.0.2.7"},
		{"203.0.113.128/25", "nexthop", "via", "192.0.2.1", "nexthop", "via", "192.0.2.2"},
		{"2001:db8:1::/64", "via", "2001:db8::7"},
	} {
		node.Run(t, "ip", append([]string{"route", "add"}, route...)...)
	}
	var found []Gateway
	node.Do(t, func() (err error) {
		found, err = NextHops(netns.None())
		return err
	})
	var got []string
	for _, hop := range found {
		got = append(got, hop.Addr.String())
	}
	if want := []string{"192.0.2.1", "192.0.2.2", "192.0.2.7", "2001:db8::7"}; !slices.Equal(got, want) {
		t.Errorf("next hops %v, want %v", got, want)
	}
}
