package path

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// TestContract1FollowsTheKernel has a network plugin come up, break and come back in a real kernel.
func TestContract1FollowsTheKernel(t *testing.T) {
	node, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, node, "eth0", "192.0.2.1/24", router, "eth0", "192.0.2.2/24")
	ip := func(commands ...string) {
		t.Helper()
		for _, c := range commands {
			node.Run(t, "ip", strings.Fields(c)...)
		}
	}
	node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	ip("route add default via 192.0.2.2")
	handle, err := netns.GetFromName(node.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	fib, err := links.OpenFIB(handle)
	if err != nil {
		t.Fatal(err)
	}
	defer fib.Close()
	var actor *Actor
	watcher := links.New(links.Options{Namespace: handle, Log: slog.New(slog.DiscardHandler),
		Changed: func() { actor.Poke() }})
	changed := make(chan struct{}, 1)
	actor = New(Deps{Log: slog.New(slog.DiscardHandler), Now: time.Now, Node: "here", Look: fib.Way,
		Interfaces: watcher.All, Conntrack: func() (int, int) { return 0, 0 },
		Addresses: func() []netip.Addr { return []netip.Addr{netip.MustParseAddr("192.0.2.1")} },
		Watch: func(ctx context.Context, changed func([]links.RouteChange)) error {
			return links.WatchRoutes(ctx, handle, changed)
		},
		Changed: func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		}})
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- watcher.Run(ctx) }()
	go func() { ended <- actor.Run(ctx) }()
	defer func() {
		end()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}()
	actor.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2", "10.2.0.2")})
	lost := map[string]lb.Reason{}
	until := func(what string, own, other lb.Reason) {
		t.Helper()
		for deadline := time.After(30 * time.Second); ; {
			news, known := actor.Take()
			for addr, why := range news.Lost {
				lost[addr.String()] = ""
				if why != nil {
					lost[addr.String()] = why.Reason
				}
			}
			if known && lost["10.1.0.2"] == own && lost["10.2.0.2"] == other {
				return
			}
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("%s: still %v", what, lost)
			}
		}
	}
	const none = lb.ReasonPodRouteMissing
	cni := []string{"link add cni0 type bridge", "link set cni0 up", "addr add 10.1.0.1/24 dev cni0"}
	until("before the CNI", none, none)
	ip(cni...)
	until("the bridge", "", none)
	ip("route add 10.2.0.0/24 via 192.0.2.2")
	until("the route", "", "")
	ip("link del cni0")
	until("without the bridge", none, "")
	ip("route del 10.2.0.0/24")
	until("without the route", none, none)
	ip(append(cni, "route add 10.2.0.0/24 via 192.0.2.2")...)
	until("both are back", "", "")
	ip("link set cni0 down")
	until("the bridge is down", none, "")
	ip("link set cni0 up")
	until("the bridge is up", "", "")
	node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=0")
	until("no forwarding", lb.ReasonForwardingOff, lb.ReasonForwardingOff)
	node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	until("forwarding", "", "")
}
