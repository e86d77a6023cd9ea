package routes

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

func TestPathTo(t *testing.T) {
	tor1, tor2 := netip.MustParseAddr("172.26.236.2"), netip.MustParseAddr("172.26.236.3")
	interfaces := []lb.Interface{{Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("172.26.236.177/24")}}}
	far := netip.MustParseAddr("10.9.9.9")
	direct := &watch{path: Path{Peer: tor1}}
	for what, c := range map[string]struct {
		session    plan.BGPSession
		before     *watch
		interfaces []lb.Interface
		want       Path
	}{
		"on the link": {plan.BGPSession{Addr: tor1}, nil, interfaces, Path{Peer: tor1}},
		"multihop asked for": {plan.BGPSession{Addr: tor1, MultiHop: true}, nil, interfaces,
			Path{Peer: tor1, Multihop: true}},
		"internal, behind a router": {plan.BGPSession{Addr: far}, nil, interfaces, Path{Peer: far, Multihop: true}},
		"with a source": {plan.BGPSession{Addr: tor1, Source: tor2}, nil, interfaces,
			Path{Peer: tor1, Local: tor2}},
		"in a VRF, on the link there": {plan.BGPSession{Addr: far, VRF: "red"}, nil, append(interfaces,
			lb.Interface{Name: "up0", VRF: "red", Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.9.1/24")}}),
			Path{Peer: far, VRF: "red"}},
		"in a VRF, on a link that is elsewhere": {plan.BGPSession{Addr: tor1, VRF: "red"}, nil, interfaces,
			Path{Peer: tor1, VRF: "red", Multihop: true}},
		"unnumbered, known in another VRF": {plan.BGPSession{Interface: "eth1", VRF: "red"},
			&watch{path: Path{Peer: netip.MustParseAddr("fe80::1%eth1")}}, nil, Path{}},
		"in a VRF that was made anew": {plan.BGPSession{Interface: "eth1", VRF: "red", VRFIndex: 9},
			&watch{path: Path{Peer: netip.MustParseAddr("fe80::1%eth1"), VRF: "red", VRFIndex: 7}}, nil, Path{}},
		"in that VRF": {plan.BGPSession{Addr: tor1, VRF: "red", VRFIndex: 9},
			&watch{path: Path{Peer: tor1, VRF: "red", VRFIndex: 7}}, nil,
			Path{Peer: tor1, VRF: "red", VRFIndex: 9, Multihop: true}},
		"the interface is gone":       {plan.BGPSession{Addr: tor1}, direct, nil, Path{Peer: tor1}},
		"unnumbered, not known yet":   {plan.BGPSession{Interface: "eth1"}, nil, interfaces, Path{}},
		"unnumbered, of another link": {plan.BGPSession{Interface: "eth1"}, direct, interfaces, Path{}},
		"unnumbered, known for a time": {plan.BGPSession{Interface: "eth1"},
			&watch{path: Path{Peer: netip.MustParseAddr("fe80::1%eth1")}}, nil,
			Path{Peer: netip.MustParseAddr("fe80::1%eth1")}},
	} {
		got, ok := pathTo(c.session, netip.Addr{}, c.before, c.interfaces)
		if got != c.want || ok != (c.want != Path{}) {
			t.Errorf("%s: %v, want %v", what, got, c.want)
		}
	}
}
