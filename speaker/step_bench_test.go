package main

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// BenchmarkStep has the proxy say something new of one VIP among many, and plans it, with
// everything that the actors are told.
func BenchmarkStep(b *testing.B) {
	for _, count := range []int{100, 10000} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			r := newRig(b)
			n := r.nodes[w178]
			r.api.pools.Set("lan", lb.Pool{Name: "lan",
				Ranges: []lb.Range{{From: netip.MustParseAddr("172.26.0.0"), To: netip.MustParseAddr("172.26.200.255")}}})
			word := func(i int, refusal *lb.Refusal) lb.Delivery {
				key := lb.Key{Namespace: "default", Name: fmt.Sprint("s", i)}
				return lb.Delivery{Service: key, VIP: netip.AddrFrom4([4]byte{172, 26, byte(i >> 8), byte(i)}), Policy: lb.Cluster,
					Ready: 2, Refusal: refusal}
			}
			for i := range count {
				d := word(i, nil)
				n.deliveries[d.Key()] = d
				r.api.services.Set(d.Service, lb.Service{Key: d.Service, Type: lb.LoadBalancer,
					Ingress: []lb.Ingress{{Addr: d.VIP}}})
			}
			n.live = true
			now := time.Now()
			n.changes.markSynced()
			for range 3 { // until the addresses are fresh no more
				n.step(now)
				now = now.Add(time.Minute)
			}
			refusals := []*lb.Refusal{lb.Refuse(lb.ReasonNotProgrammed, "no"), nil}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				n.deliver(word(77, refusals[i%2]))
				n.step(now)
			}
		})
	}
}
