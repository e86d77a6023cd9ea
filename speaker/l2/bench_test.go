package l2

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// BenchmarkLook is one look of the actor at a node while Services come: it answers for 170 addresses,
// and knows of 300 more that nobody uses them.
func BenchmarkLook(b *testing.B) {
	a := New(Options{Self: "self", AheadRate: 100, Log: newTestActor(nil, nil).opts.Log, Stats: noStats{},
		Listen: newSegment().Listen})
	defer stopServing(a)
	d := desire([]lb.Interface{iface("eth0", 2, 1)}, map[netip.Addr]Answer{})
	d.Ahead = map[netip.Addr]plan.Scout{}
	addr := netip.MustParseAddr("172.26.240.0")
	for range 170 {
		addr = addr.Next()
		d.Answers[addr] = Answer{On: []string{"eth0"}, Owned: true}
	}
	for range 300 {
		addr = addr.Next()
		d.Ahead[addr] = plan.Scout{On: []string{"eth0"}, Rank: -1}
	}
	a.Set(d)
	now := time.Now()
	for i := range burst {
		a.apply(now.Add(burst[i])) // sends the announcements
	}
	now = now.Add(burst[len(burst)-1])
	for addr := range d.Ahead {
		a.overhear(place{"eth0", lb.IPv4}, addr, "other")
	}
	a.apply(now)
	if n := len(a.Outcome().Scouted); n != 300 {
		b.Fatalf("%d addresses are known", n)
	}
	b.ReportAllocs()
	for b.Loop() {
		a.apply(now)
	}
}

// BenchmarkNewService is what the actor does for a new Service: of 512 addresses that are probed ahead one
// is desired as an answer, and another one is probed in its place. The node answers for 170.
func BenchmarkNewService(b *testing.B) {
	a := New(Options{Self: "self", AheadRate: 100, Log: newTestActor(nil, nil).opts.Log, Stats: noStats{},
		Listen: func(lb.Interface) (net.PacketConn, error) { return sink{make(chan struct{})}, nil }})
	defer stopServing(a)
	addrs, addr := make([]netip.Addr, 1024), netip.MustParseAddr("172.26.240.0")
	for i := range addrs {
		addrs[i], addr = addr, addr.Next()
	}
	on := []string{"eth0"}
	desired := func(n int) Desired {
		d := desire([]lb.Interface{iface("eth0", 2, 1)}, map[netip.Addr]Answer{})
		d.Ahead = map[netip.Addr]plan.Scout{}
		for i := range 170 {
			d.Answers[addrs[(n+i)%len(addrs)]] = Answer{On: on, Owned: true}
		}
		for i := range 512 {
			d.Ahead[addrs[(n+170+i)%len(addrs)]] = plan.Scout{On: on, Rank: 1}
		}
		return d
	}
	now := time.Now()
	all := make([]Desired, len(addrs))
	for n := range all {
		all[n] = desired(n)
	}
	n := 0
	step := func() {
		d := all[n%len(all)]
		a.Set(d)
		a.overhear(place{"eth0", lb.IPv4}, addrs[(n+170+511)%len(addrs)], "other")
		a.apply(now)
		n++
		now = now.Add(50 * time.Millisecond)
	}
	for range all {
		step()
	}
	if n := len(a.Outcome().Scouted); n != 512 {
		b.Fatalf("%d addresses are known", n)
	}
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
}

// sink is a socket that receives nothing and takes whatever is sent.
type sink struct{ closed chan struct{} }

func (s sink) ReadFrom([]byte) (int, net.Addr, error) {
	<-s.closed
	return 0, nil, net.ErrClosed
}

func (s sink) WriteTo(b []byte, _ net.Addr) (int, error) { return len(b), nil }

func (s sink) Close() error {
	close(s.closed)
	return nil
}

func (s sink) LocalAddr() net.Addr { return nil }

func (s sink) SetDeadline(time.Time) error { return nil }

func (s sink) SetReadDeadline(time.Time) error { return nil }

func (s sink) SetWriteDeadline(time.Time) error { return nil }
