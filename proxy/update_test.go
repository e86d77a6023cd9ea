package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// spread gives a Service with policy Cluster endpoints, each "address node".
func (b *bench) spread(name, vip string, endpoints ...string) {
	b.put(name, vip)
	svc, _ := b.services.Get(key(name))
	svc.ExternalPolicy = lb.Cluster
	b.services.Set(key(name), svc)
	of, _ := b.slices.Get(key(name))
	slice := of[0]
	for _, e := range endpoints {
		addr, node, _ := strings.Cut(e, " ")
		slice.Endpoints = append(slice.Endpoints,
			lb.Endpoint{Addr: netip.MustParseAddr(addr), Node: node, Ready: true, Serving: true})
	}
	b.slices.Set(key(name), []lb.Slice{slice})
	b.mark(key(name))
}

func (b *bench) expectBackends(name, want string) {
	b.t.Helper()
	var got []string
	for _, backend := range b.rules.wanted[key(name)].Ports[0].Backends.Cluster {
		got = append(got, backend.Addr.Addr().String())
	}
	if strings.Join(got, " ") != want {
		b.t.Errorf("%s is delivered to %v, want %s", name, got, want)
	}
}

// What a dead node has is delivered to no more, at once, and again when the node is back or the
// speaker is gone.
func TestDeadNodesLoseTheirBackends(t *testing.T) {
	b := newBench(t)
	b.spread("web", "192.0.2.1", "10.200.1.2 here", "10.200.2.2 there", "10.200.3.2 far")
	b.spread("other", "192.0.2.2", "10.200.1.3 here", "10.200.3.3 far")
	b.spread("only", "192.0.2.3", "10.200.2.4 there")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.expectBackends("web", "10.200.1.2 10.200.2.2 10.200.3.2")

	b.order = nil
	b.update = lb.FeedUpdate{Dead: []string{"there"}}
	b.run()
	b.expectBackends("web", "10.200.1.2 10.200.3.2")
	b.expectBackends("other", "10.200.1.3 10.200.3.3")
	b.expectBackends("only", "10.200.2.4") // nothing else is left: it may live after all
	if got := fmt.Sprint(b.order); strings.Contains(got, "other") {
		t.Errorf("what has nothing on the node was touched: %s", got)
	}
	// A change of the Service does not bring them back.
	b.spread("web", "192.0.2.1", "10.200.1.2 here", "10.200.2.2 there", "10.200.2.3 there", "10.200.3.2 far")
	b.run()
	b.expectBackends("web", "10.200.1.2 10.200.3.2")

	b.update = lb.FeedUpdate{Dead: []string{"far", "there"}}
	b.run()
	b.expectBackends("web", "10.200.1.2")
	b.expectBackends("other", "10.200.1.3")
	b.update = lb.FeedUpdate{}
	b.run()
	b.expectBackends("web", "10.200.1.2 10.200.2.2 10.200.2.3 10.200.3.2")
	b.expectBackends("other", "10.200.1.3 10.200.3.3")
}

// Without a speaker, packets go where they went, and nobody is dead.
func TestContract7WithoutASpeakerAddressesAreWhereTheyWere(t *testing.T) {
	b := newBench(t)
	b.mute = true
	b.spread("web", "192.0.2.1", "10.200.1.2 here", "10.200.2.2 there")
	b.synced()
	b.run()
	if b.rescue.wanted != nil {
		t.Errorf("nobody has said %v", b.rescue.wanted)
	}
	vip, node := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("172.31.0.2")
	b.update = lb.FeedUpdate{Dead: []string{"there"}, Previous: map[netip.Addr][]netip.Addr{vip: {node}}, Number: 3}
	b.mute = false
	b.run()
	if b.rescue.confirm != 3 {
		t.Errorf("the rescue was asked to confirm update %d, want 3", b.rescue.confirm)
	}
	b.expectBackends("web", "10.200.1.2")
	b.update, b.mute = lb.FeedUpdate{}, true
	b.run()
	b.expectBackends("web", "10.200.1.2 10.200.2.2")
	want := func(previous ...netip.Addr) {
		t.Helper()
		if w := b.rescue.wanted; w == nil || !slices.Equal(w[vip].Previous, previous) {
			t.Errorf("wanted %v", w)
		}
	}
	want(node)
	// The next one does not know where the VIP was, then learns it, and then there is no such VIP.
	b.mute, b.update = false, lb.FeedUpdate{Previous: map[netip.Addr][]netip.Addr{vip: {}}}
	b.run()
	want(node)
	other := netip.MustParseAddr("172.31.0.3")
	b.update = lb.FeedUpdate{Previous: map[netip.Addr][]netip.Addr{vip: {other}}}
	b.run()
	want(other)
	b.update = lb.FeedUpdate{}
	b.run()
	want()
	// It is the same with rings.
	for _, says := range []struct{ says, want map[netip.Addr][]netip.Addr }{
		{map[netip.Addr][]netip.Addr{vip: {node, other}}, map[netip.Addr][]netip.Addr{vip: {node, other}}},
		{map[netip.Addr][]netip.Addr{vip: {}}, map[netip.Addr][]netip.Addr{vip: {node, other}}},
		{map[netip.Addr][]netip.Addr{vip: {other}}, map[netip.Addr][]netip.Addr{vip: {other}}},
		{nil, nil},
	} {
		b.update = lb.FeedUpdate{Ring: says.says}
		b.run()
		if got := b.rescue.wanted[vip].Ring; !slices.Equal(got, says.want[vip]) {
			t.Errorf("%v is said: the ring is %v, want %v", says.says, got, says.want)
		}
	}
}
