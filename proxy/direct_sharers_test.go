package main

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/across"
)

// countedAcross counts how often it is told of nodes.
type countedAcross struct {
	fakeAcross
	told int
}

func (f *countedAcross) Set(nodes across.Nodes) { f.told++; f.fakeAcross.Set(nodes) }

// sharing has so many Services share the VIP of one that is forwarded directly, each with a port of its own.
func (b *bench) sharing(n int) (keys []lb.Key) {
	svc, _ := b.services.Get(key("web"))
	slices, _ := b.slices.Get(key("web"))
	for i := range n {
		name := fmt.Sprint("sharer-", i)
		svc.Key, svc.UID, svc.ClusterIPs = key(name), name, []netip.Addr{clusterIP(name)}
		svc.Ports = []lb.ServicePort{{Protocol: lb.TCP, Port: uint16(1000 + i)}}
		svc.HealthCheckNodePort = 0
		b.services.Set(key(name), svc)
		b.slices.Set(key(name), slices)
		b.mark(key(name))
		keys = append(keys, key(name))
	}
	b.update = lb.FeedUpdate{Number: 1,
		Previous: map[netip.Addr][]netip.Addr{netip.MustParseAddr("198.51.100.1"): {}}}
	return keys
}

// lose takes the endpoints after the first ones from Services.
func (b *bench) lose(keys []lb.Key, left int) {
	for _, key := range keys {
		all, _ := b.slices.Get(key)
		slice := all[0]
		slice.Endpoints = slice.Endpoints[:left]
		b.slices.Set(key, []lb.Slice{slice})
		b.mark(key)
	}
}

// Contract clause 11: what the Services that share a VIP change in one step is told once.
func TestContract11SharersOfAVIPAreToldOfOnce(t *testing.T) {
	b := newDirectBench(t)
	asking := &countedAcross{}
	b.to.across = asking
	keys := append(b.sharing(100), key("web"))
	b.run()
	b.wantRing("at first", "172.31.0.2 172.31.0.3 172.32.0.4")
	told := func(what string, updates, times int) {
		t.Helper()
		b.rescue.updates, asking.told = 0, 0
		b.runAlone()
		if b.rescue.updates != updates || asking.told != times {
			t.Errorf("%s: the rescue was told %d times, want %d, and the tunnel %d times, want %d", what,
				b.rescue.updates, updates, asking.told, times)
		}
	}
	told("nothing changes", 0, 0)
	b.lose(keys, 3)
	told("a node behind a router goes", 1, 1)
	b.wantRing("for an hour", "172.31.0.2 172.31.0.3 172.32.0.4")
	if len(asking.nodes.Others) > 0 {
		t.Errorf("asked are still %v", asking.nodes.Others)
	}
	b.clock = b.clock.Add(lb.FlowMemory)
	told("an hour later", 1, 1)
	b.wantRing("an hour later", "172.31.0.2 172.31.0.3")
	b.lose(keys[1:], 2)
	told("all but one lose another node", 1, 1)
	b.clock = b.clock.Add(lb.FlowMemory)
	told("an hour later", 1, 1)
	b.wantRing("one still has it", "172.31.0.2 172.31.0.3")
	for _, key := range keys[:50] {
		svc, _ := b.services.Get(key)
		svc.Forwarding = ""
		b.services.Set(key, svc)
		b.mark(key)
	}
	told("half of them are not forwarded directly any more", 1, 1)
	b.clock = b.clock.Add(lb.FlowMemory)
	told("an hour later", 1, 1)
	b.wantRing("nobody has it", "172.31.0.2")
	for _, key := range keys {
		b.services.Delete(key)
		b.slices.Delete(key)
		b.mark(key)
	}
	told("all go", 1, 1)
	d := b.proxy.direct
	if n := len(d.holders) + len(d.counts) + len(d.asks) + len(d.asked) + len(d.held) + len(d.due); n > 0 {
		t.Errorf("nobody is left, and %+v", d)
	}
}

// BenchmarkDirectSharers has Services that share a VIP, and are forwarded directly, lose a node with endpoints and get
// it again: all of them in one step, or one.
// go test -run '^$' -bench DirectSharers ./proxy
func BenchmarkDirectSharers(b *testing.B) {
	for _, n := range []int{100, 1000} {
		for what, changing := range map[string]int{"all": n, "one": 1} {
			b.Run(fmt.Sprintf("sharers=%d/changing=%s", n, what), func(b *testing.B) {
				s := newDirectBench(&testing.T{})
				keys := s.sharing(n)
				step := func() {
					s.factsChanged.Store(false)
					if _, err := s.step(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				s.markFacts()
				for range 2 {
					step()
				}
				whole, _ := s.slices.Get(keys[0])
				for i := 0; b.Loop(); i++ {
					if i%2 == 0 {
						s.lose(keys[:changing], 3)
					} else {
						for _, key := range keys[:changing] {
							s.slices.Set(key, whole)
							s.mark(key)
						}
					}
					s.clock = s.clock.Add(time.Millisecond)
					step()
				}
			})
		}
	}
}
