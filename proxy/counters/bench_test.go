package counters

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// counted returns an actor that counts n Services with a VIP, a cluster IP and a node port each.
func counted(b *testing.B, ns *nstest.NS, n int) *Actor {
	b.Helper()
	var k Kernel
	ns.Do(b, func() (err error) {
		k, err = Open()
		return err
	})
	a := New(Deps{Log: slog.New(slog.DiscardHandler), Kernel: k, Families: []lb.Family{lb.IPv4}, Scope: All,
		Now: time.Now})
	b.Cleanup(a.Close)
	all := map[lb.Key]plan.Service{}
	for i := range n {
		s := exampleService(i, plan.ToCluster)
		all[s.Key] = s
	}
	a.Begin(all)
	if _, err := a.step(b.Context()); err != nil {
		b.Fatal(err)
	}
	return a
}

// A scrape reads all counters; explain and the status page those of one Service.
func BenchmarkRead(b *testing.B) {
	for _, n := range []int{1000, 10_000} {
		a := counted(b, nstest.New(b), n)
		b.Run(fmt.Sprint("all of ", n), func(b *testing.B) {
			began := processor()
			for b.Loop() {
				a.fresh = time.Time{}
				if all, err := a.All(); err != nil || len(all) != n {
					b.Fatal(len(all), err)
				}
			}
			b.ReportMetric(float64(processor()-began)/float64(b.N), "cpu-ns/op")
		})
		b.Run(fmt.Sprint("one of ", n), func(b *testing.B) {
			for b.Loop() {
				a.Of(exampleService(7, plan.ToCluster).Key)
			}
		})
	}
}

// A Service changes its node port among many.
func BenchmarkChange(b *testing.B) {
	a := counted(b, nstest.New(b), 10_000)
	i := 0
	for b.Loop() {
		i++
		s := exampleService(7, plan.ToCluster)
		s.Ports[0].Frontends[2].Port = uint16(20000 + i%5000)
		a.Update(map[lb.Key]plan.Service{s.Key: s})
		if _, err := a.step(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// What a packet of a connection to a VIP, and of one to no Service, costs its sender.
func BenchmarkPacket(b *testing.B) {
	for _, to := range []string{"198.51.100.0:80", "10.0.0.2:80"} {
		for _, counting := range []bool{false, true} {
			b.Run(fmt.Sprintf("to %s, counted %t", to, counting), func(b *testing.B) {
				node, peer := nstest.New(b), nstest.New(b)
				nstest.Veth(b, node, "eth0", "10.0.0.1/24", peer, "eth0", "10.0.0.2/24")
				node.Run(b, "ip", "route", "add", "default", "via", "10.0.0.2")
				node.Run(b, "nft", "add table ip test; add chain ip test output { type nat hook output priority -101; }; "+
					"add rule ip test output ip daddr 198.51.100.0 dnat to 10.0.0.2")
				peer.Run(b, "nft", "add table netdev test; add chain netdev test in { type filter hook ingress device eth0 "+
					"priority 0; policy drop; }; add rule netdev test in meta protocol arp accept")
				if counting {
					counted(b, node, 1000)
				}
				var conn net.Conn
				node.Do(b, func() (err error) {
					conn, err = net.Dial("udp", to)
					return err
				})
				defer conn.Close()
				payload := make([]byte, 100)
				began := processor()
				for b.Loop() {
					if _, err := conn.Write(payload); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(processor()-began)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// exampleService is the i-th of many Services with one UDP port.
func exampleService(i int, action plan.Action) plan.Service {
	at := func(a byte) netip.Addr { return netip.AddrFrom4([4]byte{a, 51, 100 + byte(i>>8), byte(i)}) }
	return plan.Service{Key: lb.Key{Namespace: "default", Name: fmt.Sprint("service-", i)}, Ports: []plan.Port{{
		Family: lb.IPv4, Protocol: lb.UDP, External: lb.Cluster, Frontends: []plan.Frontend{
			{Kind: plan.LoadBalancer, Addr: at(198), Port: 80, Action: action},
			{Kind: plan.ClusterIP, Addr: at(10), Port: 80, Action: action},
			{Kind: plan.NodePort, Port: uint16(30000 + i), Action: action},
		},
	}}}
}

// processor returns how much processor time this process has used.
func processor() time.Duration {
	var used unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
