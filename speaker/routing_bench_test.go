package main

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// BenchmarkOneClaimEnds ends the claim of one VIP among 5,000 that two peers hear of, and has it
// again. It reports how long it takes from the proxy's word until the BGP actor is told, which then
// needs what BenchmarkOneChange of speaker/bgp reports.
func BenchmarkOneClaimEnds(b *testing.B) {
	const count = 5000
	r := newRig(b)
	n := r.nodes[w178]
	r.api.advertisements.Delete("lan")
	r.api.pools.Set("lan", lb.Pool{Name: "lan",
		Ranges: []lb.Range{{From: netip.MustParseAddr("10.0.0.0"), To: netip.MustParseAddr("10.0.255.255")}}})
	r.api.bgpAds.Set("all", lb.BGPAdvertisement{Name: "all", AggregationLength: 32, AggregationLengthV6: 128})
	for name, addr := range map[string]netip.Addr{"tor-1": tor1, "tor-2": tor2} {
		n.routers.up[name] = true
		r.api.peers.Set(name, lb.Peer{Name: name, LocalASN: 64500, PeerASN: 64501, Addr: addr, Port: 179})
	}
	word := func(i int, refusal *lb.Refusal) lb.Delivery {
		key := lb.Key{Namespace: "default", Name: "s" + string(rune('0'+i%10)) +
			netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()}
		return lb.Delivery{Service: key, VIP: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Policy: lb.Cluster,
			Ready: 2, Refusal: refusal}
	}
	for i := range count {
		d := word(i, nil)
		n.deliveries[d.Key()] = d
		r.api.services.Set(d.Service, lb.Service{Key: d.Service, Type: lb.LoadBalancer,
			Ingress: []lb.Ingress{{Addr: d.VIP}}})
	}
	n.live = true
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- n.runner.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-ended })
	n.changes.markSynced()
	hears := func() int {
		n.routers.mu.Lock()
		defer n.routers.mu.Unlock()
		return min(len(n.routers.desired["tor-1"].Routes), len(n.routers.desired["tor-2"].Routes))
	}
	until := func(want int) {
		for hears() != want {
			time.Sleep(20 * time.Microsecond)
		}
	}
	until(count)
	time.Sleep(100 * time.Millisecond) // until nothing is pending any more
	refusals := []*lb.Refusal{lb.Refuse(lb.ReasonNotProgrammed, "no"), nil}
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		began := time.Now()
		n.deliver(word(77, refusals[i%2]))
		until(count - 1 + i%2)
		took = append(took, time.Since(began))
		b.StopTimer()
		time.Sleep(10 * time.Millisecond)
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
}
