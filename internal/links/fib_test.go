package links

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestWays asks a real kernel for routes of all kinds.
func TestWays(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	for _, command := range [][]string{
		{"addr", "add", "2001:db8::1/64", "dev", "eth0", "nodad"},
		{"link", "add", "cni0", "type", "bridge"}, {"link", "set", "cni0", "up"},
		{"link", "add", "eth1", "type", "veth", "peer", "name", "eth2"}, {"link", "set", "eth1", "up"},
		{"addr", "add", "10.7.0.1/24", "dev", "eth1"}, // the other end is down
		{"addr", "add", "10.1.0.1/24", "dev", "cni0"},
		{"route", "add", "default", "via", "192.0.2.2"},
		{"route", "add", "10.2.0.0/24", "via", "192.0.2.3"},
		{"route", "add", "blackhole", "10.3.0.0/24"}, {"route", "add", "10.3.0.2", "via", "192.0.2.2"},
		{"route", "add", "unreachable", "10.4.0.0/24"},
		{"route", "add", "10.5.0.0/24", "nexthop", "via", "192.0.2.2", "nexthop", "via", "192.0.2.3"},
		{"route", "add", "10.6.0.0/24", "via", "192.0.2.2", "table", "77"}, {"rule", "add", "to", "10.6.0.0/24", "table", "77"},
		{"-6", "route", "add", "blackhole", "fd00:3::/64"}, {"-6", "route", "add", "fd00:2::/64", "via", "2001:db8::2"},
	} {
		a.Run(t, "ip", command...)
	}
	handle, err := netns.GetFromName(a.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	fib, err := OpenFIB(handle)
	if err != nil {
		t.Fatal(err)
	}
	defer fib.Close()
	for _, tt := range []struct {
		to   string
		kind lb.RouteKind
		also string
	}{
		{"198.51.100.1", lb.RouteDefault, ""}, {"10.2.0.9", lb.RouteOwn, ""}, {"10.3.0.9", lb.RouteNone, ""},
		{"10.3.0.2", lb.RouteOwn, ""}, {"10.4.0.9", lb.RouteNone, ""}, {"10.5.0.9", lb.RouteOwn, "several"},
		{"10.6.0.9", lb.RouteOwn, ""}, {"192.0.2.1", lb.RouteOwn, "local"}, {"192.0.2.7", lb.RouteOwn, ""},
		{"10.1.0.9", lb.RouteOwn, ""}, {"10.7.0.9", lb.RouteOwn, "down"},
		{"fd00:1::9", lb.RouteNone, ""}, {"fd00:2::9", lb.RouteOwn, ""}, {"fd00:3::9", lb.RouteNone, ""},
		{"2001:db8::1", lb.RouteOwn, "local"},
	} {
		way, err := fib.Way(netip.MustParseAddr(tt.to))
		if err != nil {
			t.Error(err)
			continue
		}
		several := way.Kind != lb.RouteNone && way.Link == 0
		if way.Kind != tt.kind || way.Local != (tt.also == "local") || several != (tt.also == "several") ||
			way.Down != (tt.also == "down") {
			t.Errorf("%s: %+v, want %d %s", tt.to, way, tt.kind, tt.also)
		}
	}
}

// TestRouteChanges hears of what a real kernel changes.
func TestRouteChanges(t *testing.T) {
	a, b := nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	handle, err := netns.GetFromName(a.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	ctx, cancel := context.WithCancel(t.Context())
	heard, ended := make(chan []RouteChange, 100), make(chan error, 1)
	go func() { ended <- WatchRoutes(ctx, handle, func(c []RouteChange) { heard <- c }) }()
	hear := func(what string, want RouteChange) {
		t.Helper()
		for deadline := time.After(20 * time.Second); ; {
			select {
			case c := <-heard:
				if slices.Contains(c, want) {
					return
				}
			case <-deadline:
				t.Fatalf("%s: heard nothing of %+v", what, want)
			}
		}
	}
	hear("at first", RouteChange{All: true})
	index := 0
	fib, err := OpenFIB(handle)
	if err != nil {
		t.Fatal(err)
	}
	defer fib.Close()
	if way, err := fib.Way(netip.MustParseAddr("192.0.2.2")); err == nil {
		index = way.Link
	}
	prefix := netip.MustParsePrefix
	for _, tt := range []struct {
		command []string
		want    RouteChange
	}{
		{[]string{"route", "add", "10.2.0.0/24", "via", "192.0.2.2"}, RouteChange{Prefix: prefix("10.2.0.0/24")}},
		{[]string{"route", "del", "10.2.0.0/24"}, RouteChange{Prefix: prefix("10.2.0.0/24")}},
		{[]string{"route", "add", "default", "via", "192.0.2.2"}, RouteChange{Prefix: prefix("0.0.0.0/0")}},
		{[]string{"-6", "route", "add", "blackhole", "fd00::/64"}, RouteChange{Prefix: prefix("fd00::/64")}},
		{[]string{"-6", "route", "add", "blackhole", "default"}, RouteChange{Prefix: prefix("::/0")}},
		{[]string{"rule", "add", "to", "10.6.0.0/24", "table", "77"}, RouteChange{All: true}},
		{[]string{"link", "set", "eth0", "down"}, RouteChange{Link: index}},
	} {
		a.Run(t, "ip", tt.command...)
		hear(tt.command[0]+" "+tt.command[1], tt.want)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func FuzzRouteChange(f *testing.F) {
	f.Add(uint16(24), []byte{2, 24, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0, 8, 0, 1, 0, 10, 2, 0, 0})
	f.Add(uint16(16), []byte{0, 0, 0, 0, 7, 0, 0, 0})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		c, ok := changeOf(kind, data)
		if ok && !c.All && c.Link == 0 && !c.Prefix.IsValid() && len(data) >= 8 && data[4]|data[5]|data[6]|data[7] != 0 {
			t.Errorf("message %d % x changes nothing", kind, data)
		}
		if c.Prefix.IsValid() && c.Prefix != c.Prefix.Masked() {
			t.Errorf("prefix %s has an address of its own", c.Prefix)
		}
	})
}
