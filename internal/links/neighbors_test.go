package links

import (
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestNeighborsAreAskedFor checks that a look has the kernel find a neighbor, and find out that an
// address answers no more; and that it knows addresses behind a router.
func TestNeighborsAreAskedFor(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "198.51.100.1/24", b, "eth0", "198.51.100.2/24")
	a.Run(t, "ip", "addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad")
	b.Run(t, "ip", "addr", "add", "2001:db8::2/64", "dev", "eth0", "nodad")
	a.Run(t, "ip", "route", "add", "default", "via", "198.51.100.2")
	a.Run(t, "ip", "route", "add", "203.0.113.128/25", "via", "inet6", "2001:db8::2", "dev", "eth0")
	var n *Neighbors
	a.Do(t, func() (err error) {
		n, err = OpenNeighbors()
		return err
	})
	defer n.Close()
	look := func(family lb.Family, addr string) Neighbor {
		at := netip.MustParseAddr(addr)
		all, err := n.Look(family, []netip.Addr{at})
		if err != nil {
			t.Fatal(err)
		}
		return all[at]
	}
	wait := func(family lb.Family, addr string, is func(Neighbor) bool) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); !is(look(family, addr)); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("of %s is known %+v", addr, look(family, addr))
			}
		}
	}
	for family, addr := range map[lb.Family]string{lb.IPv4: "198.51.100.2", lb.IPv6: "2001:db8::2"} {
		wait(family, addr, func(n Neighbor) bool { return n.Found && n.MAC != [6]byte{} && !n.Failed })
	}
	wait(lb.IPv4, "198.51.100.3", func(n Neighbor) bool { return n.Failed && !n.Found })
	for _, behind := range []string{"203.0.113.1", "203.0.113.129"} {
		if got := look(lb.IPv4, behind); !got.Routed || got.Found || got.Link == 0 || got.MTU != 1500 {
			t.Errorf("of %s, which is behind a router, is known %+v", behind, got)
		}
	}
}

// TestALinkThatWasAwayFailsNobody takes a link's carrier away for longer than the kernel asks for a
// neighbor: nobody behind it counts as failed, then or after.
func TestALinkThatWasAwayFailsNobody(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "198.51.100.1/24", b, "eth0", "198.51.100.2/24")
	a.Run(t, "ip", "addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad")
	b.Run(t, "sysctl", "-qw", "net.ipv6.conf.eth0.keep_addr_on_down=1",
		"net.ipv6.conf.eth0.accept_dad=0")
	b.Run(t, "ip", "addr", "add", "2001:db8::2/64", "dev", "eth0", "nodad")
	var n *Neighbors
	a.Do(t, func() (err error) {
		n, err = OpenNeighbors()
		return err
	})
	defer n.Close()
	both := map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("198.51.100.2"),
		lb.IPv6: netip.MustParseAddr("2001:db8::2")}
	found := func() (count int) {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			addr := both[family]
			all, err := n.Look(family, []netip.Addr{addr})
			if err != nil {
				t.Fatal(err)
			}
			if all[addr].Failed {
				t.Fatalf("%s counts as failed: %s", addr, a.Run(t, "ip", "neigh")+a.Run(t, "ip", "link"))
			}
			if all[addr].Found {
				count++
			}
		}
		return count
	}
	wait := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); found() != want; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not %d of them are found", want)
			}
		}
	}
	wait(2)
	b.Run(t, "ip", "link", "set", "eth0", "down")
	wait(0)
	// Others ask meanwhile, as gossip does, and the kernel gives up after three seconds.
	a.Run(t, "sh", "-c", "ping -c1 -W4 198.51.100.2 & ping -6 -c1 -W4 2001:db8::2 & wait")
	if found() != 0 {
		t.Error("found without a link")
	}
	for _, addr := range both { // or has given up just now
		a.Run(t, "ip", "neigh", "replace", addr.String(), "dev", "eth0", "nud", "failed")
	}
	b.Run(t, "ip", "link", "set", "eth0", "up")
	wait(2)
}
