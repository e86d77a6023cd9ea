package l2

import (
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
