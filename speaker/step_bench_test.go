package main

import (
	"fmt"
	"net/netip"
	"strings"
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

// BenchmarkStepShared has the proxy say something new of one of n Services that share as many addresses as a
// Service may have, and plans it.
func BenchmarkStepShared(b *testing.B) {
	for _, count := range []int{10, 100, 1000} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			r := newRig(b)
			n := r.nodes[w178]
			r.api.pools.Set("lan", lb.Pool{Name: "lan",
				Ranges: []lb.Range{{From: netip.MustParseAddr("172.26.0.0"), To: netip.MustParseAddr("172.26.200.255")}}})
			deliver := func(i int, refusal *lb.Refusal) {
				for _, vip := range sharedVIPs() {
					d := lb.Delivery{Service: sharer(i).Key, VIP: vip, Policy: lb.Cluster, Ready: 2, Refusal: refusal}
					n.deliveries[d.Key()] = d
					n.changes.markVIPs([]netip.Addr{vip})
				}
			}
			for i := range count {
				s := sharer(i)
				r.api.services.Set(s.Key, s)
				deliver(i, nil)
			}
			n.live = true
			now := time.Now()
			n.changes.markSynced()
			for range 3 {
				n.step(now)
				now = now.Add(time.Minute)
			}
			refusals := []*lb.Refusal{lb.Refuse(lb.ReasonNotProgrammed, "no"), nil}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				deliver(7, refusals[i%2])
				n.step(now)
			}
		})
	}
}

func sharedVIPs() (vips []netip.Addr) {
	for i := range lb.MaxAddresses {
		vips = append(vips, netip.AddrFrom4([4]byte{172, 26, 1, byte(i)}))
	}
	return vips
}

// sharer returns one of many Services that share all of sharedVIPs.
func sharer(i int) lb.Service {
	key := func(i int) lb.Key { return lb.Key{Namespace: "default", Name: fmt.Sprint("s", i)} }
	s := lb.Service{Key: key(i), Type: lb.LoadBalancer, Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: uint16(i + 1)}},
		Request: lb.Request{Share: "k"}}
	var holds []string
	after := map[netip.Addr]lb.Key{}
	for _, vip := range sharedVIPs() {
		s.Ingress = append(s.Ingress, lb.Ingress{Addr: vip})
		holds = append(holds, vip.String()+lb.FromPool+"lan")
		if i > 0 {
			after[vip] = key(0)
		}
	}
	s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned,
		Message: strings.Join(holds, ", ") + lb.FormatSharing(lb.SharingTerms(&s), after)}}
	return s
}
