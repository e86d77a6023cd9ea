package neighbors

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestARealKernelAsksAgain has a kernel wait for a Node, and for a next hop, that came to the network
// after it had asked, as when the link was away: it asks only once. After Resolve it knows both.
func TestARealKernelAsksAgain(t *testing.T) {
	for name, c := range map[string]struct {
		family, prefix, bits, routed string
	}{
		"IPv4": {"ipv4", "198.51.100.", "24", "203.0.113.0/24"},
		"IPv6": {"ipv6", "2001:db8::", "64", "2001:db8:1::/64"},
	} {
		t.Run(name, func(t *testing.T) {
			node, others := nstest.New(t), nstest.New(t)
			nstest.Veth(t, node, "eth0", c.prefix+"1/"+c.bits, others, "eth0", "")
			node.Run(t, "sysctl", "-qw", "net."+c.family+".neigh.eth0.mcast_solicit=1",
				"net."+c.family+".neigh.eth0.retrans_time_ms=300000")
			peer, router := netip.MustParseAddr(c.prefix+"2"), netip.MustParseAddr(c.prefix+"3")
			node.Run(t, "ip", "route", "add", c.routed, "via", router.String())
			var index int
			node.Do(t, func() error {
				for _, to := range []netip.Addr{peer, netip.MustParsePrefix(c.routed).Addr().Next()} {
					conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 4242)))
					if err != nil {
						return err
					}
					defer conn.Close()
					if _, err := conn.Write([]byte("x")); err != nil {
						return err
					}
				}
				eth0, err := net.InterfaceByName("eth0")
				if err == nil {
					index = eth0.Index
				}
				return err
			})
			table := func() string { return node.Run(t, "ip", "neigh", "show", "dev", "eth0") }
			if got := table(); strings.Count(got, "INCOMPLETE") != 2 {
				t.Fatalf("before: %s", got)
			}
			for _, addr := range []netip.Addr{peer, router} {
				others.Run(t, "ip", "addr", "add", addr.String()+"/"+c.bits, "dev", "eth0", "nodad")
			}
			var k opened
			node.Do(t, func() (err error) {
				if k.Kernel, err = open(); err == nil {
					k.nextHops, err = k.Kernel.NextHops()
				}
				return err
			})
			defer k.Kernel.Close()
			n := New(Options{Log: slog.New(slog.DiscardHandler), Open: func() (Kernel, error) { return k, nil }})
			n.Set(Desired{Interfaces: []lb.Interface{{Index: index, Name: "eth0", Up: true}},
				Nodes: map[netip.Addr]bool{peer: true}})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- n.Run(ctx) }()
			defer func() {
				cancel()
				<-ended
			}()
			deadline := time.Now().Add(20 * time.Second)
			for <-n.Resolve(); strings.Count(table(), "lladdr") != 2; <-n.Resolve() {
				if time.Now().After(deadline) {
					t.Fatalf("after: %s", table())
				}
			}
		})
	}
}

// opened is a way to the kernel of a network namespace that stays open.
type opened struct {
	Kernel
	nextHops []links.Gateway
}

func (o opened) NextHops() ([]links.Gateway, error) { return o.nextHops, nil }
func (opened) Close()                               {}
