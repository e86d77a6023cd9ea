package offload

import (
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestDevices(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	many := func(n int, guest bool) (all []lb.Interface) {
		for i := range n {
			all = append(all, lb.Interface{Index: i + 10, Name: fmt.Sprint("cali", i), MAC: mac, Guest: guest})
		}
		return all
	}
	for name, test := range map[string]struct {
		interfaces []lb.Interface
		want       []string
		left       int
	}{
		"nothing": {},
		"uplink and bridge, without what is none": {interfaces: []lb.Interface{
			{Index: 1, Name: "lo", MAC: make([]byte, 6), Loopback: true}, {Index: 3, Name: "cni0", MAC: mac},
			{Index: 2, Name: "eth0", MAC: mac}, {Index: 4, Name: "veth1", MAC: mac, Enslaved: true, Guest: true},
			{Index: 5, Name: "wg0", NoARP: true}, {Index: 6, Name: "tunl0", MAC: net.HardwareAddr{10, 0, 0, 1}},
			{Index: 7, Name: "dummy0", MAC: mac, NoARP: true}, {Index: 8, Name: "eth1", MAC: mac, Disabled: true},
			{Index: 9, Name: lb.TunnelName(lb.IPv4), MAC: mac}, {Index: 10, Name: "flannel.1", MAC: mac},
			{Index: 11, Name: "eth2", MAC: mac, Enslaved: true},
		}, want: []string{"eth0", "cni0", "flannel.1", "veth1"}},
		"a VRF and its port": {interfaces: []lb.Interface{{Index: 2, Name: "red", MAC: mac, VRF: "red", Table: 10},
			{Index: 3, Name: "eth1", MAC: mac, VRF: "red", Enslaved: true}, {Index: 4, Name: "eth0", MAC: mac}},
			want: []string{"eth0"}},
		"pods come last": {interfaces: []lb.Interface{{Index: 2, Name: "cali2", MAC: mac, Guest: true},
			{Index: 3, Name: "cali1", MAC: mac, Guest: true}, {Index: 4, Name: "eth0", MAC: mac}},
			want: []string{"eth0", "cali2", "cali1"}},
	} {
		got, left := Devices(test.interfaces)
		if !slices.Equal(got, test.want) || left != test.left {
			t.Errorf("%s: %v and %d left out, want %v and %d", name, got, left, test.want, test.left)
		}
	}
	got, left := Devices(append(many(maxDevices+7, true), lb.Interface{Index: 9999, Name: "eth0", MAC: mac}))
	if len(got) != maxDevices || left != 8 || got[0] != "eth0" {
		t.Errorf("of too many: %d with %s first, %d left out", len(got), got[0], left)
	}
}
