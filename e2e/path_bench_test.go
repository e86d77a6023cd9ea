package e2e

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/packet"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// BenchmarkPathLost takes the way to pods of a family from one of the nodes behind a router, again and again. It reports how
// long it took from the command that does so, and from the kernel's first and last message about it, until the
// withdrawal was on the wire. From then until the router's kernel sends nothing to the node any more is the router's
// own time, and a few milliseconds to ask it: go test -run '^$' -bench PathLost/ -benchtime 15x -timeout 30m ./e2e
func BenchmarkPathLost(b *testing.B) {
	b.Run("IPv4", func(b *testing.B) { pathLost(b, lb.IPv4, bgpVIP.Addr()) })
	b.Run("IPv6", func(b *testing.B) { pathLost(b, lb.IPv6, bgpVIP6.Addr()) })
}

func pathLost(b *testing.B, family lb.Family, vip netip.Addr) {
	for _, fault := range pathLosses(b, family) {
		b.Run(fault.name, func(b *testing.B) {
			l := startBGP(b, lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500}, family == lb.IPv6, "")
			nodes := workers(l)
			if fault.local {
				setLocal(b, l)
				nodes = []string{bootNode, "k8s-worker-179"} // which have a pod
			}
			var command, first, last, router []time.Duration
			for i := 0; b.Loop(); i++ {
				node := nodes[i%len(nodes)]
				wantRouted(b, l, vip, nodes...)
				time.Sleep(300 * time.Millisecond) // whatever rests after the fault before has rested
				seen := overhear(b, l, node, family)
				began := time.Now()
				mend := fault.make(l, node)
				for routed(b, l, host(vip), without(nodes, []string{node})...) != nil {
					if time.Since(began) > patience {
						b.Fatalf("%s is still routed to", node)
					}
				}
				gone := time.Now()
				said, withdrawn := seen()
				command, router = append(command, withdrawn.Sub(began)), append(router, gone.Sub(withdrawn))
				first = append(first, withdrawn.Sub(said[0]))
				last = append(last, withdrawn.Sub(said[len(said)-1]))
				mend()
			}
			for _, m := range []struct {
				name string
				of   []time.Duration
			}{{"command", command}, {"first", first}, {"last", last}, {"router", router}} {
				slices.Sort(m.of)
				b.ReportMetric(milliseconds(m.of[(len(m.of)-1)/2]), "ms-"+m.name+"-p50")
				b.ReportMetric(milliseconds(m.of[len(m.of)-1]), "ms-"+m.name+"-max")
			}
		})
	}
}

// BenchmarkPathLostL2 takes the way to pods from the node that answers ARP, again and again, and reports how long it
// took from the command that does so until another node's announcement reached a client:
// go test -run '^$' -bench PathLostL2 -benchtime 15x -timeout 30m ./e2e
func BenchmarkPathLostL2(b *testing.B) {
	for _, fault := range pathLosses(b, lb.IPv4) {
		if fault.local {
			continue // the other faults take all pods
		}
		b.Run(fault.name, func(b *testing.B) {
			boot := bootsOverL2(b)
			var took []time.Duration
			for b.Loop() {
				boot.served(b)
				time.Sleep(time.Second)
				own := nodeMAC(b, boot.Lab, bootNode)
				announced := sniff(b, boot.Lab, lab.ClientName, patience, func(frame []byte) bool {
					mac, addr, ok := arpOf(frame)
					return ok && addr == seedVIP.Addr() && !slices.Equal(mac, own)
				})
				began := time.Now()
				mend := fault.make(boot.Lab, bootNode)
				at := <-announced
				if at.IsZero() {
					b.Fatal("no other node announces the address")
				}
				took = append(took, at.Sub(began))
				mend()
			}
			reportGaps(b, took)
		})
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// pathLoss takes the way to pods from a node, and returns what gives it back.
type pathLoss struct {
	name string
	make func(l *lab.Lab, node string) (mend func())
	// local is set for one that needs the policy Local.
	local bool
}

func pathLosses(b *testing.B, family lb.Family) []pathLoss {
	do := func(l *lab.Lab, node string, argv ...string) string {
		out, err := l.Exec(b.Context(), node, argv...)
		if err != nil {
			b.Fatal(err)
		}
		return out
	}
	cni := func(f func(context.Context, string) error, node string) {
		if err := f(b.Context(), node); err != nil {
			b.Fatal(err)
		}
	}
	parameter, ip := "net.ipv4.ip_forward", []string{"ip", "-4", "route"}
	if family == lb.IPv6 {
		parameter, ip = "net.ipv6.conf.all.forwarding", []string{"ip", "-6", "route"}
	}
	forward := func(to string) []string { return []string{"sysctl", "-qw", parameter + "=" + to} }
	return []pathLoss{
		{"forwarding", func(l *lab.Lab, node string) func() {
			do(l, node, forward("0")...)
			return func() { do(l, node, forward("1")...) }
		}, false},
		{"routes", func(l *lab.Lab, node string) func() {
			pods := l.Cluster().PodNetwork
			if family == lb.IPv6 {
				pods = lab.TwinPrefix(pods)
			}
			routes := func(words ...string) string { return do(l, node, slices.Concat(ip, words)...) }
			was := strings.Split(strings.TrimSpace(routes("show", "root", pods.String())), "\n")
			routes("flush", "root", pods.String())
			return func() {
				for _, route := range was {
					routes(append([]string{"add"}, strings.Fields(route)...)...)
				}
			}
		}, false},
		{"cni0 and routes", func(l *lab.Lab, node string) func() {
			cni(l.StopCNI, node)
			return func() { cni(l.StartCNI, node) }
		}, false},
		{"cni0 down", func(l *lab.Lab, node string) func() {
			do(l, node, "ip", "link", "set", lab.PodBridge, "down")
			return func() {
				do(l, node, "ip", "link", "set", lab.PodBridge, "up")
				if family == lb.IPv6 { // the address went with the link
					at := slices.IndexFunc(l.Cluster().Nodes, func(n lab.Node) bool { return n.Name == node })
					n := l.Cluster().Nodes[at]
					own := netip.PrefixFrom(lab.Twin(n.Gateway()), lab.TwinPrefix(n.PodNetwork).Bits())
					do(l, node, "ip", "addr", "add", own.String(), "nodad", "dev", lab.PodBridge)
				}
			}
		}, true},
	}
}

// overhear listens to a node's kernel and to its uplink. The function that it returns ends that, and says when the node
// first withdrew a route, and when before that the kernel told of changes of interfaces, routes or parameters.
func overhear(b *testing.B, l *lab.Lab, node string, family lb.Family,
) (heard func() (said []time.Time, withdrawn time.Time)) {
	groups, gone := []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_NETCONF}, withdraws
	if family == lb.IPv6 {
		groups, gone = []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_NETCONF}, withdraws6
	}
	var socket *nl.NetlinkSocket
	if err := l.In(node, func() (err error) {
		socket, err = nl.Subscribe(unix.NETLINK_ROUTE, groups...)
		return err
	}); err != nil {
		b.Fatal(err)
	}
	var listening sync.WaitGroup
	var said []time.Time
	listening.Go(func() {
		for {
			if _, _, err := socket.Receive(); err != nil {
				return
			}
			said = append(said, time.Now())
		}
	})
	sent := sniff(b, l, node, patience, gone)
	return func() ([]time.Time, time.Time) {
		withdrawn := <-sent
		socket.Close()
		listening.Wait()
		if len(said) == 0 || withdrawn.IsZero() {
			b.Fatal("the kernel said nothing of the fault, or the node did not withdraw")
		}
		return saidUntil(said, withdrawn), withdrawn
	}
}

// saidUntil returns when messages were heard until the withdrawal that they caused. On a busy machine even the first
// may be heard after it.
func saidUntil(said []time.Time, withdrawn time.Time) []time.Time {
	before := slices.DeleteFunc(slices.Clone(said), func(at time.Time) bool { return at.After(withdrawn) })
	if len(before) == 0 {
		return []time.Time{withdrawn}
	}
	return before
}

func TestSaidUntil(t *testing.T) {
	withdrawn := time.Unix(100, 0)
	early, late := withdrawn.Add(-time.Millisecond), withdrawn.Add(time.Millisecond)
	for _, c := range []struct{ said, want []time.Time }{
		{[]time.Time{early, withdrawn, late}, []time.Time{early, withdrawn}},
		{[]time.Time{late, late}, []time.Time{withdrawn}},
	} {
		if got := saidUntil(c.said, withdrawn); !slices.Equal(got, c.want) {
			t.Errorf("%v until %v: %v, want %v", c.said, withdrawn, got, c.want)
		}
	}
}

// sniff listens to a host's uplink, and returns a channel with the time of the first frame that is as sought; the zero
// time if there is none for so long.
func sniff(b *testing.B, l *lab.Lab, host string, patience time.Duration, sought func(frame []byte) bool,
) (at <-chan time.Time) {
	var cable *packet.Conn
	if err := l.In(host, func() (err error) {
		uplink, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		cable, err = packet.Listen(uplink, packet.Raw, unix.ETH_P_ALL, nil)
		return err
	}); err != nil {
		b.Fatal(err)
	}
	if err := cable.SetReadDeadline(time.Now().Add(patience)); err != nil {
		b.Fatal(err)
	}
	found := make(chan time.Time, 1)
	go func() {
		defer close(found)
		defer cable.Close()
		frame := make([]byte, 1<<16)
		for {
			n, _, err := cable.ReadFrom(frame)
			if err != nil {
				return
			}
			if sought(frame[:n]) {
				found <- time.Now()
				return
			}
		}
	}()
	return found
}

// withdraws reports whether a frame has an UPDATE that withdraws a route of IPv4 (RFC 4271 section 4.3).
func withdraws(frame []byte) bool {
	message := updateIn(frame)
	return len(message) >= 2 && message[0]|message[1] > 0
}

// withdraws6 reports whether a frame has an UPDATE that withdraws a route of IPv6: its first attribute is
// MP_UNREACH_NLRI (RFC 4760 section 4) with a route, and not the end of the routes.
func withdraws6(frame []byte) bool {
	message := updateIn(frame)
	const attribute, unreachable, extended = 4, 15, 0x10
	if len(message) < attribute+4 || message[attribute+1] != unreachable {
		return false
	}
	size := int(message[attribute+2])
	if message[attribute]&extended != 0 {
		size = int(message[attribute+2])<<8 | int(message[attribute+3])
	}
	return size > len("AFI")
}

// arpOf returns who says in an ARP packet that it has an address (RFC 826).
func arpOf(frame []byte) (mac net.HardwareAddr, addr netip.Addr, ok bool) {
	const ethernet, sender, size = 14, 8, 28
	if len(frame) < ethernet+size || frame[12] != 8 || frame[13] != 6 {
		return nil, addr, false
	}
	said := frame[ethernet+sender:]
	return net.HardwareAddr(said[:6]), netip.AddrFrom4([4]byte(said[6:10])), true
}

// updateIn returns what follows the header of the UPDATE with which a frame's BGP messages begin; nil if there is none.
func updateIn(frame []byte) []byte {
	const header, update = 19, 2
	at := bytes.Index(frame, bytes.Repeat([]byte{0xff}, 16))
	if at < 0 || len(frame) < at+header || frame[at+header-1] != update {
		return nil
	}
	return frame[at+header:]
}
