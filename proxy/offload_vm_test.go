//go:build vm

package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// way is an established connection through a node, both of whose ends this process has.
type way struct{ client, pod net.Conn }

// roundTrips sends a byte there and back, again and again.
func (w way) roundTrips(n int) error {
	one := make([]byte, 1)
	for range n {
		for _, ends := range [][2]net.Conn{{w.client, w.pod}, {w.pod, w.client}} {
			if _, err := ends[0].Write(one); err != nil {
				return err
			}
			if _, err := io.ReadFull(ends[1], one); err != nil {
				return err
			}
		}
	}
	return nil
}

// bulk sends much from the pod to the client, in pieces that the sockets have room for.
func (w way) bulk(n int) error {
	piece := make([]byte, 64<<10)
	for range n {
		if _, err := w.pod.Write(piece); err != nil {
			return err
		}
		if _, err := io.ReadFull(w.client, piece); err != nil {
			return err
		}
	}
	return nil
}

// TestOffloadCost measures established connections through three nodes in turn: one that only forwards, one with
// Landfall's rules, and one that offloads. The clock of an emulated machine counts instructions. What it finds is
// logged.
func TestOffloadCost(t *testing.T) {
	config := offloading(t)
	s := directSite{vips: map[lb.Family]netip.Addr{
		lb.IPv4: netip.MustParseAddr("198.51.100.1"), lb.IPv6: netip.MustParseAddr("2001:db8::1")}}
	var clients, pods []*nstest.NS
	for i := 1; i <= 3; i++ {
		client, node, pod := nstest.New(t), nstest.New(t), nstest.New(t)
		nstest.Veth(t, client, "eth0", fmt.Sprintf("10.0.%d.2/24", i), node, "eth0", fmt.Sprintf("10.0.%d.1/24", i))
		nstest.Veth(t, node, "pod", fmt.Sprintf("10.1.%d.1/24", i), pod, "eth0", fmt.Sprintf("10.1.%d.2/24", i))
		client.Run(t, "ip", "addr", "add", fmt.Sprintf("fd00:%d::2/64", i), "dev", "eth0", "nodad")
		node.Run(t, "ip", "addr", "add", fmt.Sprintf("fd00:%d::1/64", i), "dev", "eth0", "nodad")
		node.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::1/64", i), "dev", "pod", "nodad")
		pod.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::2/64", i), "dev", "eth0", "nodad")
		node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
		client.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.0.%d.1", i))
		client.Run(t, "ip", "-6", "route", "add", "default", "via", fmt.Sprintf("fd00:%d::1", i))
		pod.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.1.%d.1", i))
		pod.Run(t, "ip", "-6", "route", "add", "default", "via", fmt.Sprintf("fd01:%d::1", i))
		clients, s.nodes, pods = append(clients, client), append(s.nodes, node), append(pods, pod)
	}
	s.programAs(t, 2, s.planWith(2, 2), siteConfig())
	s.programAs(t, 3, s.planWith(3, 3), config)
	s.devices(t, 3, "eth0", "pod")
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		var ways []way
		for i := range s.nodes {
			to := netip.AddrPortFrom(s.vips[family], 80)
			if i == 0 {
				to = netip.MustParseAddrPort(map[lb.Family]string{lb.IPv4: "10.1.1.2:8080", lb.IPv6: "[fd01:1::2]:8080"}[family])
			}
			ways = append(ways, connect(t, clients[i], pods[i], to))
		}
		if err := ways[2].roundTrips(20); err != nil {
			t.Fatal(err)
		}
		if !s.isOffloaded(t, 3, flow{conn: ways[2].client}) {
			t.Fatal("the connection is not offloaded")
		}
		for what, measure := range map[string]func(way) error{
			"round trips": func(w way) error { return w.roundTrips(100) },
			"bulk":        func(w way) error { return w.bulk(20) },
		} {
			var took [3][]time.Duration
			for range 41 {
				for i, w := range ways {
					started := time.Now()
					if err := measure(w); err != nil {
						t.Fatal(err)
					}
					took[i] = append(took[i], time.Since(started))
				}
			}
			var median [3]float64
			for i := range took {
				slices.Sort(took[i])
				median[i] = took[i][len(took[i])/2].Seconds()
			}
			t.Logf("%s %s: bare %.3g s; Landfall %.3f of it, offloaded %.3f", family, what, median[0], median[0]/median[1],
				median[0]/median[2])
		}
	}
}

// connect opens a connection to a pod and returns both ends.
func connect(t *testing.T, client, pod *nstest.NS, to netip.AddrPort) (w way) {
	t.Helper()
	var at net.Listener
	pod.Do(t, func() (err error) {
		at, err = net.Listen("tcp", ":8080")
		return err
	})
	defer at.Close()
	client.Do(t, func() (err error) {
		w.client, err = net.DialTimeout("tcp", to.String(), time.Minute)
		return err
	})
	var err error
	if w.pod, err = at.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.client.Close()
		w.pod.Close()
	})
	return w
}
