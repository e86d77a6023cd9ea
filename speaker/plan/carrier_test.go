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
	port := func(i *lb.Interface) { i.Enslaved = true }
	for name, c := range map[string]struct {
		interfaces []lb.Interface
		want       []string
		some       bool
	}{
		"up":                       {[]lb.Interface{iface("eth0", nil)}, []string{"eth0"}, true},
		"unplugged":                {[]lb.Interface{iface("eth0", down)}, nil, true},
		"one of two":               {[]lb.Interface{iface("eth0", down), iface("eth1", nil)}, []string{"eth1"}, true},
		"a pod's, without address": {[]lb.Interface{iface("eth0", nil), iface("pod--1", bare)}, []string{"eth0"}, true},
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
