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
	t.Run("IPv4", func(t *testing.T) {
		followsTheKernel(t, kernelCase{node: "192.0.2.1/24", router: "192.0.2.2", everywhere: "default",
			bridge: "10.1.0.1/24", own: "10.1.0.2", there: "10.2.0.0/24", other: "10.2.0.2", forwarding: "net.ipv4.ip_forward"})
	})
	t.Run("IPv6", func(t *testing.T) {
		followsTheKernel(t, kernelCase{node: "2001:db8::1/64", router: "2001:db8::2", everywhere: "::/0",
			bridge: "fd00:1::1/64", own: "fd00:1::2", there: "fd00:2::/64", other: "fd00:2::2",
			forwarding: "net.ipv6.conf.all.forwarding"})
	})
}

// kernelCase are the addresses of one family: those of the node and its router, of the pods' bridge and a pod on it, and
// of the pods on another node. forwarding is the kernel parameter that has the node forward packets.
type kernelCase struct{ node, router, everywhere, bridge, own, there, other, forwarding string }

func followsTheKernel(t *testing.T, c kernelCase) {
	node, router := nstest.New(t), nstest.New(t)
	self := netip.MustParsePrefix(c.node)
	nstest.Veth(t, node, "eth0", c.node, router, "eth0", netip.PrefixFrom(netip.MustParseAddr(c.router), self.Bits()).String())
	ip := func(commands ...string) {
		t.Helper()
		for _, c := range commands {
			node.Run(t, "ip", strings.Fields(c)...)
		}
	}
	node.Run(t, "sysctl", "-qw", c.forwarding+"=1")
	ip("route add " + c.everywhere + " via " + c.router)
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
		Addresses: func() []netip.Addr { return []netip.Addr{self.Addr()} },
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
	actor.Begin(map[lb.Key][]plan.Target{key: targets(c.own, c.other)})
	lost := map[string]lb.Reason{}
	until := func(what string, own, other lb.Reason) {
		t.Helper()
		for deadline := time.After(30 * time.Second); ; {
			news, known := actor.Take()
			for target, why := range news.Lost {
				lost[target.Addr.String()] = ""
				if why != nil {
					lost[target.Addr.String()] = why.Reason
				}
			}
			if known && lost[c.own] == own && lost[c.other] == other {
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
	cni := []string{"link add cni0 type bridge", "link set cni0 up", "addr add " + c.bridge + " dev cni0"}
	if !self.Addr().Is4() {
		cni[2] += " nodad"
	}
	until("before the CNI", none, none)
	ip(cni...)
	until("the bridge", "", none)
	ip("route add " + c.there + " via " + c.router)
	until("the route", "", "")
	ip("link del cni0")
	until("without the bridge", none, "")
	ip("route del " + c.there)
	until("without the route", none, none)
	ip(append(cni, "route add "+c.there+" via "+c.router)...)
	until("both are back", "", "")
	if !self.Addr().Is4() {
		node.Run(t, "sysctl", "-qw", "net.ipv6.conf.cni0.keep_addr_on_down=1")
	}
	ip("link set cni0 down")
	until("the bridge is down", none, "")
	ip("link set cni0 up")
	until("the bridge is up", "", "")
	node.Run(t, "sysctl", "-qw", c.forwarding+"=0")
	until("no forwarding", lb.ReasonForwardingOff, lb.ReasonForwardingOff)
	if !self.Addr().Is4() && nstest.ForcesForwarding() {
		node.Run(t, "sysctl", "-qw", "net.ipv6.conf.eth0.force_forwarding=1")
		until("forwarding at the uplink, where the others' pods are", lb.ReasonForwardingOff, "")
		node.Run(t, "sysctl", "-qw", "net.ipv6.conf.cni0.force_forwarding=1")
		until("and at the bridge", "", "")
		node.Run(t, "sysctl", "-qw", "net.ipv6.conf.eth0.force_forwarding=0")
		until("at the bridge alone", lb.ReasonForwardingOff, lb.ReasonForwardingOff)
	}
	node.Run(t, "sysctl", "-qw", c.forwarding+"=1")
	until("forwarding", "", "")
}
