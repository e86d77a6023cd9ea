package links

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

func device(index int, name string, flags uint32, tweak ...func(*netlink.LinkAttrs)) netlink.Link {
	attrs := netlink.LinkAttrs{Index: index, Name: name, RawFlags: flags,
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(index)}}
	for _, t := range tweak {
		t(&attrs)
	}
	return &netlink.Device{LinkAttrs: attrs}
}

func address(t *testing.T, index int, cidr string) netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(cidr)
	if err != nil {
		t.Fatal(err)
	}
	a.LinkIndex = index
	return *a
}

func flagged(t *testing.T, index int, cidr string, flags int) netlink.Addr {
	t.Helper()
	a := address(t, index, cidr)
	a.Flags = flags
	return a
}

// TestSecondary asks a real kernel which of an interface's addresses are secondary.
func TestSecondary(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "10.0.0.5/24", b, "eth0", "10.0.0.1/24")
	for _, words := range []string{"10.0.0.3/24", "10.0.0.6/32", "10.0.1.7/24", "fd00::5/64 nodad",
		"fd00::6/64 nodad", "fd00::7/64 nodad preferred_lft 0"} {
		a.Run(t, "ip", append([]string{"addr", "add", "dev", "eth0"}, strings.Fields(words)...)...)
	}
	handle, err := netns.GetFromName(a.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	interfaces, err := list(handle)
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(interfaces, func(i lb.Interface) bool { return i.Name == "eth0" })
	want := []netip.Addr{netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("fd00::7")}
	if got := interfaces[at].Secondary; !slices.Equal(got, want) {
		t.Errorf("secondary are %v, want %v", got, want)
	}
}

func TestTranslate(t *testing.T) {
	const running = unix.IFF_UP | unix.IFF_RUNNING
	got := translate([]netlink.Link{
		device(4, "wg0", running|unix.IFF_NOARP, func(a *netlink.LinkAttrs) { a.HardwareAddr = nil }),
		device(2, "eth0", running),
		device(3, "eth1", unix.IFF_UP, func(a *netlink.LinkAttrs) { a.MasterIndex = 7 }),
		&netlink.Vrf{LinkAttrs: netlink.LinkAttrs{Index: 8, Name: "red", RawFlags: running | unix.IFF_NOARP}, Table: 100},
		device(9, "up0", running, func(a *netlink.LinkAttrs) { a.MasterIndex = 8 }),
		&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: 5, Name: "kube-ipvs0", RawFlags: unix.IFF_NOARP}},
		device(1, "lo", running|unix.IFF_LOOPBACK, func(a *netlink.LinkAttrs) { a.HardwareAddr = nil }),
	}, []netlink.Addr{
		address(t, 2, "2001:db8::2/64"), address(t, 2, "172.26.236.178/24"), address(t, 1, "127.0.0.1/8"),
		flagged(t, 2, "172.26.236.9/24", unix.IFA_F_SECONDARY), flagged(t, 2, "172.26.236.8/24", unix.IFA_F_SECONDARY),
		flagged(t, 2, "2001:db8::3/64", unix.IFA_F_TEMPORARY), flagged(t, 2, "2001:db8::4/64", unix.IFA_F_DEPRECATED),
		{LinkIndex: 2}, // an address that we cannot read is left out
		{LinkIndex: 2, IPNet: &net.IPNet{IP: net.IPv4(10, 0, 0, 1), Mask: net.IPMask{255, 0, 255, 0}}},
	})
	want := []lb.Interface{
		{Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, Up: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("172.26.236.8/24"), netip.MustParsePrefix("172.26.236.9/24"),
				netip.MustParsePrefix("172.26.236.178/24"), netip.MustParsePrefix("2001:db8::2/64"),
				netip.MustParsePrefix("2001:db8::3/64"), netip.MustParsePrefix("2001:db8::4/64")},
			Secondary: []netip.Addr{netip.MustParseAddr("172.26.236.8"), netip.MustParseAddr("172.26.236.9"),
				netip.MustParseAddr("2001:db8::4")}},
		{Index: 3, Name: "eth1", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 3}, Enslaved: true},
		{Index: 5, Name: "kube-ipvs0", Disabled: true, NoARP: true, Dummy: true},
		{Index: 1, Name: "lo", Up: true, Loopback: true, Addresses: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
		{Index: 8, Name: "red", Up: true, NoARP: true, VRF: "red", Table: 100},
		{Index: 9, Name: "up0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}, Up: true, Enslaved: true, VRF: "red"},
		{Index: 4, Name: "wg0", Up: true, NoARP: true},
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmpopts.EquateEmpty()); d != "" {
		t.Error(d)
	}
}

func TestActivePort(t *testing.T) {
	on := func(kind string, index, parent, master int) netlink.Link {
		return &netlink.GenericLink{LinkType: kind, LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprint(kind, index), Index: index,
			ParentIndex: parent, MasterIndex: master}}
	}
	bond := func(index, active, master int) netlink.Link {
		b := netlink.NewLinkBond(netlink.LinkAttrs{Name: fmt.Sprint("bond", index), Index: index, MasterIndex: master})
		b.ActiveSlave = active
		return b
	}
	const none = -1 // as netlink says it
	all := []netlink.Link{
		device(1, "eth0", 0), device(2, "eth1", 0),
		bond(10, 2, 0), on("vlan", 11, 10, 0), on("macvlan", 12, 11, 0), // a bond, and what lies on it
		bond(20, 1, 21), device(22, "tap0", 0, func(a *netlink.LinkAttrs) { a.MasterIndex = 21 }), on("bridge", 21, 0, 0),
		on("vlan", 23, 21, 0),
		bond(30, none, 0), on("vlan", 31, 30, 0), // of another mode
		on("vlan", 40, 1, 0), on("bridge", 41, 0, 0),
		on("veth", 50, 10, 0), // ParentIndex is of another network namespace
		on("vlan", 60, 61, 0), on("vlan", 61, 60, 0),
	}
	got := map[int]int{}
	for _, i := range translate(all, nil) {
		if i.Port != 0 {
			got[i.Index] = i.Port
		}
	}
	if d := cmp.Diff(map[int]int{10: 2, 11: 2, 12: 2, 20: 1, 21: 1, 23: 1}, got); d != "" {
		t.Error(d)
	}
}

// Contract clause 7: a netlink dump cut short is not believed.
func TestContract7InterruptedDumpIsRepeatedNeverBelieved(t *testing.T) {
	calls := 0
	got, err := complete(func() ([]int, error) {
		if calls++; calls < 3 {
			return []int{1}, netlink.ErrDumpInterrupted
		}
		return []int{1, 2, 3}, nil
	})
	if err != nil || len(got) != 3 {
		t.Errorf("got %v, %v after %d calls", got, err, calls)
	}
	if got, err := complete(func() ([]int, error) { return []int{1}, netlink.ErrDumpInterrupted }); err == nil ||
		got != nil {
		t.Errorf("a dump that is interrupted each time gave %v, %v", got, err)
	}
	calls = 0
	if _, err := complete(func() ([]int, error) { calls++; return nil, unix.EPERM }); !errors.Is(err, unix.EPERM) ||
		calls != 1 {
		t.Errorf("got %v after %d calls", err, calls)
	}
}

// Contract clause 7: what is known stays when the kernel cannot be asked.
func TestContract7KnownInterfacesStayWhenListingFails(t *testing.T) {
	changes := 0
	w := New(Options{Log: slog.New(slog.DiscardHandler), Changed: func() { changes++ }})
	if _, known := w.All(); known {
		t.Error("interfaces are known before the kernel was asked")
	}
	w.list = func() ([]lb.Interface, error) { return []lb.Interface{{Name: "eth0", Index: 2}}, nil }
	for range 2 {
		if _, err := w.refresh(); err != nil {
			t.Fatal(err)
		}
	}
	w.list = func() ([]lb.Interface, error) { return nil, unix.ENOBUFS }
	if _, err := w.refresh(); err == nil {
		t.Error("a failed listing was not reported")
	}
	if all, known := w.All(); !known || len(all) != 1 || changes != 1 {
		t.Errorf("got %v, known %v, %d changes; want eth0, known, 1 change", all, known, changes)
	}
}

func TestWatcherFollowsTheKernel(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	handle, err := netns.GetFromName(a.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	changed := make(chan struct{}, 1)
	w := New(Options{Namespace: handle, Log: slog.New(slog.DiscardHandler), Changed: func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	eth0 := func() lb.Interface {
		all, _ := w.All()
		for _, i := range all {
			if i.Name == "eth0" {
				return i
			}
		}
		return lb.Interface{}
	}
	until := func(what string, cond func(lb.Interface) bool) {
		t.Helper()
		deadline := time.After(20 * time.Second)
		for !cond(eth0()) {
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("%s: still %+v", what, eth0())
			}
		}
	}
	until("loopback only", func(lb.Interface) bool {
		all, known := w.All()
		return known && len(all) == 1 &&
			all[0].Loopback
	})
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	until("the other end is elsewhere", func(i lb.Interface) bool { return i.Guest })
	until("cable plugged in", func(i lb.Interface) bool {
		_, ok := i.Subnet(netip.MustParseAddr("192.0.2.9"))
		return i.Up && ok && len(i.MAC) == 6
	})
	b.Run(t, "ip", "link", "set", "eth0", "down")
	until("carrier lost", func(i lb.Interface) bool { return i.Name == "eth0" && !i.Up })
	b.Run(t, "ip", "link", "set", "eth0", "up")
	until("carrier back", func(i lb.Interface) bool { return i.Up })
	a.Run(t, "ip", "addr", "add", "198.51.100.1/24", "dev", "eth0")
	until("address added", func(i lb.Interface) bool { _, ok := i.Subnet(netip.MustParseAddr("198.51.100.7")); return ok })
	a.Run(t, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:99")
	until("MAC changed", func(i lb.Interface) bool { return i.MAC.String() == "02:00:00:00:00:99" })
	a.Run(t, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
	until("it forwards IPv4", func(i lb.Interface) bool { return i.Forwards(lb.IPv4) && !i.Forwards(lb.IPv6) })
	a.Run(t, "sysctl", "-q", "-w", "net.ipv6.conf.all.forwarding=1")
	until("it forwards IPv6", func(i lb.Interface) bool { return i.Forwards(lb.IPv6) })
	if nstest.ForcesForwarding() {
		a.Run(t, "sysctl", "-q", "-w", "net.ipv6.conf.all.forwarding=0")
		until("it forwards no IPv6", func(i lb.Interface) bool { return !i.Forwards(lb.IPv6) })
		a.Run(t, "sysctl", "-q", "-w", "net.ipv6.conf.eth0.force_forwarding=1")
		until("it alone forwards IPv6", func(i lb.Interface) bool { return i.Forwards(lb.IPv6) })
	}
	a.Run(t, "sysctl", "-q", "-w", "net.ipv4.conf.eth0.forwarding=0")
	until("it alone does not forward IPv4", func(i lb.Interface) bool { return !i.Forwards(lb.IPv4) })
	a.Run(t, "ip", "link", "del", "eth0")
	until("gone", func(i lb.Interface) bool { return i.Name == "" })
	a.Run(t, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
	until("both ends are here", func(i lb.Interface) bool { return i.Name != "" && !i.Guest })
	a.Run(t, "ip", "link", "del", "eth0")
	until("gone", func(i lb.Interface) bool { return i.Name == "" })
}
