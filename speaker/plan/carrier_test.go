package plan

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Whether a link was away is asked of the links on which a node may answer, and not of those of
// pods, whatever their names are.
func TestCarriers(t *testing.T) {
	iface := func(name string, change func(*lb.Interface)) lb.Interface {
		i := lb.Interface{Name: name, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Up: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}
		if change != nil {
			change(&i)
		}
		return i
	}
	down := func(i *lb.Interface) { i.Up = false }
	bare := func(i *lb.Interface) { i.Addresses = nil }
	guest := func(addresses ...string) func(i *lb.Interface) {
		return func(i *lb.Interface) {
			i.Guest, i.Addresses = true, nil
			for _, a := range addresses {
				i.Addresses = append(i.Addresses, netip.MustParsePrefix(a))
			}
		}
	}
	port := func(i *lb.Interface) { i.Enslaved = true }
	for name, c := range map[string]struct {
		interfaces []lb.Interface
		want       []string
		some       bool
	}{
		"up":                            {[]lb.Interface{iface("eth0", nil)}, []string{"eth0"}, true},
		"unplugged":                     {[]lb.Interface{iface("eth0", down)}, nil, true},
		"one of two":                    {[]lb.Interface{iface("eth0", down), iface("eth1", nil)}, []string{"eth1"}, true},
		"a pod's, without address":      {[]lb.Interface{iface("eth0", nil), iface("pod--1", bare)}, []string{"eth0"}, true},
		"a pod's, with its own address": {[]lb.Interface{iface("pod--1", guest("10.244.0.1/32", "fe80::1/64"))}, nil, false},
		"a node in a namespace":         {[]lb.Interface{iface("eth0", guest("192.0.2.1/24"))}, []string{"eth0"}, true},
		"an address without a network": {[]lb.Interface{iface("eth0", func(i *lb.Interface) {
			i.Addresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.1/32")}
		})}, []string{"eth0"}, true},
		"a BGP router's, unnumbered": {[]lb.Interface{iface("eth0", func(i *lb.Interface) {
			i.Addresses = []netip.Prefix{netip.MustParsePrefix("fe80::1/64")}
		})}, []string{"eth0"}, true},
		"a port of a bond":         {[]lb.Interface{iface("bond0", nil), iface("eth0", port)}, []string{"bond0"}, true},
		"named, without address":   {[]lb.Interface{iface("named", bare)}, []string{"named"}, true},
		"only excluded ones":       {[]lb.Interface{iface("veth1", nil)}, nil, false},
		"none that answers at all": {[]lb.Interface{iface("lo", func(i *lb.Interface) { i.Loopback = true })}, nil, false},
		"none":                     {nil, nil, false},
	} {
		ads := map[string]lb.L2Advertisement{"lan": {Interfaces: []string{"named"}}}
		if got, some := Carriers([]string{"veth*"}, ads, c.interfaces); !slices.Equal(got, c.want) || some != c.some {
			t.Errorf("%s: %v, %v, want %v, %v", name, got, some, c.want, c.some)
		}
	}
}

// Pods come and go, and change neither which interfaces may answer nor what the other nodes are
// told, whatever the names of their interfaces.
func TestPodsChangeNothing(t *testing.T) {
	mac := func(n byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, n} }
	lan := []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}
	own := []lb.Interface{
		{Name: "bond0", MAC: mac(1), Up: true, Addresses: lan},
		{Name: "eth0", MAC: mac(2), Up: true, Enslaved: true}, // balance-alb sends with its address
		{Name: "eth1", MAC: mac(3), Up: true, Guest: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.1/16")}},
		{Name: "named", MAC: mac(4), Up: true, Guest: true},
		{Name: "wg0", Up: true, NoARP: true, Addresses: lan},
	}
	pods := []lb.Interface{
		{Name: "cali0123", MAC: mac(10), Up: true, Guest: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("fe80::1/64")}},
		{Name: "coredns--1", MAC: mac(11), Up: true, Guest: true, Enslaved: true},
		{Name: "gke1", MAC: mac(12), Up: true, Guest: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.2.0.1/32")}},
		{Name: "tap7", MAC: mac(13), Up: true, Guest: true, Enslaved: true},
	}
	f := Facts{Interfaces: own, Advertisements: map[string]lb.L2Advertisement{"lan": {Interfaces: []string{"named"}}}}
	macs, candidates := MACs(f), Candidates(f)
	if want := []string{mac(1).String(), mac(3).String(), mac(4).String(), mac(2).String()}; !slices.Equal(macs, want) {
		t.Errorf("addresses %v, want %v", macs, want)
	}
	if len(candidates) != 3 {
		t.Errorf("candidates %+v", candidates)
	}
	f.Interfaces = slices.Concat(own, pods)
	if got := MACs(f); !slices.Equal(got, macs) {
		t.Errorf("with pods it tells the addresses %v", got)
	}
	if got := Candidates(f); !slices.EqualFunc(got, candidates, lb.Interface.Equal) {
		t.Errorf("with pods the candidates are %+v", got)
	}
}
