package main

import (
	"encoding/binary"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// A flood of flows with addresses that are not the sender's comes to one Service. The clients of another one are
// answered meanwhile, those that are there and those that come, and the relay gets no more than the rate.
func TestContract11AFloodOfSpoofedFlowsBesideABystander(t *testing.T) {
	const rate, limit = 500, 10_000
	flood := seeds.Of(20_000, 100_000)
	s := newRelaySite(t)
	s.udpRate = rate
	s.node.Run(t, "ip", "route", "add", "100.64.0.0/10", "via", "10.0.0.2")
	s.node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0")
	flooded, endpoints := s.udpObjects(t)
	bystander := flooded
	bystander.Key.Name = "bystander"
	bystander.ClusterIPs, bystander.Ports = []netip.Addr{netip.MustParseAddr("10.96.0.2")}, []lb.ServicePort{{Protocol: lb.UDP, Port: 53}}
	vip := netip.MustParseAddr("198.51.100.2")
	bystander.Ingress = []lb.Ingress{{Addr: vip}}
	others := make([]lb.Slice, len(endpoints))
	for i, slice := range endpoints { // with a backend of its own, as the flood fills the sockets of its Service's
		slice.Key, slice.Service = bystander.Key, bystander.Key
		others[i] = slice
		others[i].Endpoints = endpoints[i].Endpoints[2:]
		endpoints[i].Endpoints = endpoints[i].Endpoints[:2]
	}
	s.echoUDP(t, 2)
	node := plan.Node{Name: "node", Relay: true}
	planned := []plan.Service{plan.New(flooded, endpoints, node), plan.New(bystander, others, node)}
	s.write(t, planned...)
	feed, socket := s.feed(t, planned...)
	r, stop := s.relay(t, feed, socket, limit)
	defer stop()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	began, done := time.Now(), make(chan struct{})
	go func() {
		defer close(done)
		s.client.Do(t, func() error { return spoof(flood, netip.AddrPortFrom(s.vips[lb.IPv4], 53)) })
	}()
	const patient, tries = 10 * time.Second, 6
	to := netip.AddrPortFrom(vip, 53)
	var asked, again, lost atomic.Int64
	ask := func(conn net.Conn) {
		asked.Add(1)
		for range tries {
			if _, err := askUDP(conn, patient); err == nil {
				return
			}
			again.Add(1)
		}
		lost.Add(1)
	}
	var clients sync.WaitGroup
	for range 4 {
		held := s.dialUDP(t, to)
		clients.Go(func() {
			for flooding := true; flooding; {
				select {
				case <-done:
					flooding = false
				default:
				}
				ask(held)
				fresh := s.dialUDP(t, to)
				ask(fresh)
				fresh.Close()
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	clients.Wait()
	took := time.Since(began)
	runtime.GC()
	runtime.ReadMemStats(&after)
	var counts nftables.RelayCounts
	s.node.Do(t, func() error {
		lease, err := nftables.OpenLease()
		if err != nil {
			return err
		}
		defer lease.Close()
		counts, err = lease.Counts(allFamilies[:])
		return err
	})
	sent, received := r.Lost()
	t.Logf("%d flows in %v: asked %d times, %d again; rules: %+v; relay: %+v, refused %d, lost %d and %d, heap %d kB more",
		flood, took, asked.Load(), again.Load(), counts, r.Counts(), r.Refused(), sent, received,
		(int64(after.HeapInuse)-int64(before.HeapInuse))/1024)
	if n := lost.Load(); n > 0 {
		t.Errorf("%d of %d questions got no answer", n, asked.Load())
	}
	most := uint64(rate*(int(took/time.Second)+1) + rate)
	for _, c := range r.Counts() {
		if c.Open > limit || c.Service == flooded.Key && c.Connections > most {
			t.Errorf("%+v, with room for %d, and %d flows in that time", c, limit, most)
		}
	}
}

// spoof sends datagrams, each from an address of its own that is not the sender's.
func spoof(n int, to netip.AddrPort) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	packet := make([]byte, 20+8+1)
	packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_UDP // the kernel fills in lengths and the checksum
	copy(packet[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(packet[20:], 5000)
	binary.BigEndian.PutUint16(packet[22:], to.Port())
	binary.BigEndian.PutUint16(packet[24:], 8+1)
	for i := range n {
		if i%100 == 99 { // or what the links have no room for is lost before it comes to the rules
			time.Sleep(10 * time.Millisecond)
		}
		binary.BigEndian.PutUint32(packet[12:], 100<<24|64<<16+uint32(i))
		if err := unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.Addr().As4()}); err != nil {
			return err
		}
	}
	return nil
}
