package main

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What is counted of a VIP on an interface ends when the node answers for it there no longer.
func TestPacketsOfAWithdrawnVIP(t *testing.T) {
	registry := prometheus.NewRegistry()
	p := newPackets(registry)
	gone, stays := netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("2001:db8::9")
	for _, vip := range []netip.Addr{gone, stays} {
		p.Request("eth0", vip)
		p.Reply("eth0", vip)
		p.Gratuitous("eth0", vip)
	}
	p.Withdrawn("eth0", gone)
	p.Withdrawn("eth1", stays)
	if n, err := testutil.GatherAndCount(registry); err != nil || n != 3 {
		t.Errorf("%d series are left (%v), want 3 of the VIP that is answered for", n, err)
	}
}

// TestMTUs lists the subnets of Nodes, and not those of bridges that all nodes have.
func TestMTUs(t *testing.T) {
	nodes := map[string]lb.Node{}
	for name, addr := range map[string]string{"n1": "192.0.2.1", "n2": "192.0.2.2", "n3": "2001:db8::3"} {
		nodes[name] = lb.Node{Name: name, Addresses: []netip.Addr{netip.MustParseAddr(addr)}}
	}
	i := func(name string, up bool, addrs ...string) lb.Interface {
		one := lb.Interface{Name: name, Up: up, MTU: 1500}
		for _, addr := range addrs {
			one.Addresses = append(one.Addresses, netip.MustParsePrefix(addr))
		}
		return one
	}
	got := mtus([]lb.Interface{
		i("eth0", true, "192.0.2.1/24", "192.0.2.7/24", "2001:db8::1/64", "fe80::1/64"), i("eth1", false, "192.0.2.8/24"),
		i("docker0", true, "172.17.0.1/16"), i("lo", true, "127.0.0.1/8"), i("own", true, "192.0.2.1/32"),
	}, nodes)
	want := []subnetMTU{{netip.MustParsePrefix("192.0.2.0/24"), "eth0", 1500},
		{netip.MustParsePrefix("2001:db8::/64"), "eth0", 1500}}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
