package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// No tenant takes a port of the node at an address that its Node does not show. What others put on interfaces for
// Services is served.
func TestContract11ATenantTakesNoPortOfTheNode(t *testing.T) {
	at := func(words string) (all []netip.Prefix) {
		for word := range strings.FieldsSeq(words) {
			all = append(all, netip.MustParsePrefix(word))
		}
		return all
	}
	b := newBench(t)
	pokes := 0
	changed := ifAddressesChange(func() { pokes++ })
	secondary := netip.MustParseAddr("10.0.0.7")
	b.own = []lb.Interface{
		{Name: "dummy0", Up: true, NoARP: true, Addresses: at("10.0.3.7/24")},
		{Name: "eth1", Up: true, Addresses: at("10.0.0.5/24 10.0.0.6/32 10.0.0.7/24 fd00:1::5/64 fd00:1::6/128 fd00:1::7/64"),
			Secondary: []netip.Addr{secondary, netip.MustParseAddr("fd00:1::7")}},
		{Name: "eth2", Disabled: true, Addresses: at("10.0.2.7/24")},
		{Name: "kube-ipvs0", Up: true, Addresses: at("10.0.4.7/24")},
		{Name: "lo", Up: true, Loopback: true, Addresses: at("10.0.5.7/24 127.0.0.1/8")},
		{Name: "nodelocaldns", Up: true, Addresses: at("10.0.6.7/24")},
	}
	changed(b.own)
	addresses := []string{"10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.2.7", "10.0.3.7", "10.0.4.7", "10.0.5.7", "10.0.6.7",
		"10.0.7.7", "fd00:1::5", "fd00:1::6", "fd00:1::7"}
	b.list("x", time.Time{}, 22, addresses...)
	b.dualStack("x")
	b.synced()
	refused := func(what string, want ...string) {
		t.Helper()
		b.markFacts()
		b.run()
		var got []string
		for _, addr := range addresses {
			if !b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(addr), 22) {
				got = append(got, addr)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: refused at %v, want %v", what, got, want)
		}
	}
	refused("at first", "10.0.0.5", "fd00:1::5")
	if said := strings.Join(b.warnings, "\n"); !strings.Contains(said, "ExternalIPRefused here: spec.externalIPs: 10.0.0.5 "+
		"is an address of the node, of its interface eth1; the proxy's flag --external-ips can allow it") {
		t.Errorf("Events %v", b.warnings)
	}
	b.own = slices.Clone(b.own)
	b.own[1].Secondary = b.own[1].Secondary[1:]
	b.own[1].Addresses = at("10.0.0.7/24 fd00:1::5/64 fd00:1::6/128 fd00:1::7/64")
	if changed(b.own); pokes != 2 {
		t.Errorf("%d pokes, want 2", pokes)
	}
	refused("the first one has gone", "10.0.0.7", "fd00:1::5")
	was := b.own
	b.own = slices.Clone(was)
	b.own[1].Secondary = nil
	if changed(b.own); pokes != 3 {
		t.Errorf("%d pokes, want 3", pokes)
	}
	refused("no longer deprecated", "10.0.0.7", "fd00:1::5", "fd00:1::7")
}

// An administrator may have addresses of the node served.
func TestExternalIPsOfTheNodeThatAreAllowed(t *testing.T) {
	b := newBench(t, func(s *settings) {
		s.externalIPs = plan.ExternalIPs{Deny: true, Allowed: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}
	})
	b.own = []lb.Interface{{Name: "eth1", Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.5/24")}}}
	b.list("x", time.Time{}, 22, "10.0.0.5")
	b.synced()
	b.run()
	if !b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr("10.0.0.5"), 22) {
		t.Errorf("not served; Events %v", b.warnings)
	}
}
