package kube

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// sameAddr compares addresses, whose fields cmp does not see.
var sameAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func TestConvertBGPPeer(t *testing.T) {
	plain := lb.Peer{
		Name: "tor", LocalASN: 64500, PeerASN: 4200000000, Addr: netip.MustParseAddr("192.0.2.1"), Port: 179,
		HoldTime: 90 * time.Second, ConnectTime: 10 * time.Second,
	}
	type row struct {
		name   string
		change func(*v1beta1.BGPPeerSpec)
		want   func(*lb.Peer)
	}
	nobody := func(addr, what string) row {
		return row{addr, func(s *v1beta1.BGPPeerSpec) { s.PeerAddress = addr }, func(p *lb.Peer) {
			p.Addr, p.Problem = netip.MustParseAddr(addr), lb.Refuse(lb.ReasonPeerInvalid,
				"spec.peerAddress: %s is %s; it must be an address of the router", addr, what)
		}}
	}
	for _, test := range []row{
		{"plain", func(*v1beta1.BGPPeerSpec) {}, func(*lb.Peer) {}},
		{"all", func(s *v1beta1.BGPPeerSpec) {
			s.VRF = "red"
			s.LocalASN, s.PeerPort, s.SourceAddress, s.RouterID, s.Password, s.BFDProfile = new(int64(64499)), 1790, "192.0.2.7",
				"1.2.3.4", "p", "fast"
			s.HoldTime, s.KeepaliveTime, s.ConnectTime = &metav1.Duration{}, &metav1.Duration{Duration: time.Second},
				&metav1.Duration{Duration: time.Minute}
			s.EnableGracefulRestart, s.EBGPMultiHop, s.DualStackAddressFamily, s.AcceptRoutes = true, true, true, true
		}, func(p *lb.Peer) {
			p.VRF = "red"
			p.LocalASN, p.Port, p.Source, p.RouterID, p.Password, p.BFDProfile = 64499, 1790, netip.MustParseAddr("192.0.2.7"),
				netip.MustParseAddr("1.2.3.4"), "p", "fast"
			p.HoldTime, p.KeepaliveTime, p.ConnectTime = 0, time.Second, time.Minute
			p.GracefulRestart, p.MultiHop, p.DualStack, p.AcceptRoutes = true, true, true, true
		}},
		{"unnumbered, Secret", func(s *v1beta1.BGPPeerSpec) {
			s.PeerAddress, s.Interface, s.PeerASN, s.DynamicASN, s.PasswordSecret = "", "eth1", nil, "external",
				&v1beta1.PasswordSecret{Name: "s"}
		}, func(p *lb.Peer) {
			p.Addr, p.Interface, p.PeerASN, p.Dynamic, p.PasswordSecret = netip.Addr{}, "eth1", 0, lb.ExternalASN,
				&lb.Key{Name: "s"}
		}},
		{"the hold time follows the keepalive time",
			func(s *v1beta1.BGPPeerSpec) { s.KeepaliveTime = &metav1.Duration{Duration: 5 * time.Second} },
			func(p *lb.Peer) { p.KeepaliveTime, p.HoldTime = 5*time.Second, 15*time.Second }},
		{"an address that an older schema let pass", func(s *v1beta1.BGPPeerSpec) { s.PeerAddress = "tor.example" },
			func(p *lb.Peer) {
				p.Addr, p.Problem = netip.Addr{},
					lb.Refuse(lb.ReasonPeerInvalid, `spec.peerAddress: "tor.example" is not an IP address`)
			}},
		nobody("0.0.0.0", "the unspecified address"), nobody("::", "the unspecified address"),
		nobody("224.0.0.5", "a multicast address"), nobody("ff02::5", "a multicast address"),
		nobody("255.255.255.255", "the broadcast address"),
		{"a router on the node itself", func(s *v1beta1.BGPPeerSpec) { s.PeerAddress = "127.0.0.1" },
			func(p *lb.Peer) { p.Addr = netip.MustParseAddr("127.0.0.1") }},
	} {
		o := &v1beta1.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "tor"},
			Spec: v1beta1.BGPPeerSpec{MyASN: 64500, PeerASN: new(int64(4200000000)), PeerAddress: "192.0.2.1"}}
		test.change(&o.Spec)
		want := plain
		test.want(&want)
		if _, got := convertBGPPeer(o); !cmp.Equal(got, want, sameAddr) {
			t.Errorf("%s (-want +got):\n%s", test.name, cmp.Diff(want, got, sameAddr))
		}
	}
}

func TestConvertBGPAdvertisement(t *testing.T) {
	_, a := convertBGPAdvertisement(&v1beta1.BGPAdvertisement{})
	if a.AggregationLength != 32 || a.AggregationLengthV6 != 128 || a.LocalPref != nil || a.MED != nil {
		t.Errorf("empty: %+v", a)
	}
	_, a = convertBGPAdvertisement(&v1beta1.BGPAdvertisement{Spec: v1beta1.BGPAdvertisementSpec{
		AggregationLength: new(int32(24)), AggregationLengthV6: new(int32(64)), LocalPref: new(int64(4294967295)),
		MED: new(int64(0)), ASPathPrepend: 2,
		Communities:      []v1beta1.CommunityReference{"no-export"},
		ServiceSelectors: []metav1.LabelSelector{{MatchLabels: map[string]string{"a": "b"}}},
	}})
	if a.AggregationLength != 24 || a.AggregationLengthV6 != 64 || *a.LocalPref != 4294967295 || *a.MED != 0 ||
		a.Prepend != 2 ||
		a.Communities[0] != "no-export" || len(a.ServiceSelectors) != 1 {
		t.Errorf("full: %+v", a)
	}
}

func TestConvertBFDProfileAndCommunity(t *testing.T) {
	_, p := convertBFDProfile(&v1beta1.BFDProfile{ObjectMeta: metav1.ObjectMeta{Name: "d"}})
	if want := (lb.BFDProfile{Name: "d", Receive: 300 * time.Millisecond, Transmit: 300 * time.Millisecond, Multiplier: 3,
		MinimumTTL: 254}); p != want {
		t.Errorf("defaults: %+v", p)
	}
	_, p = convertBFDProfile(
		&v1beta1.BFDProfile{Spec: v1beta1.BFDProfileSpec{ReceiveInterval: new(int32(10)), TransmitInterval: new(int32(60000)),
			DetectMultiplier: new(int32(255)), PassiveMode: true, MinimumTTL: new(int32(1))}})
	if want := (lb.BFDProfile{Receive: 10 * time.Millisecond, Transmit: time.Minute, Multiplier: 255, Passive: true,
		MinimumTTL: 1}); p != want {
		t.Errorf("full: %+v", p)
	}
	_, c := convertCommunity(
		&v1beta1.Community{
			Spec: v1beta1.CommunitySpec{Communities: []v1beta1.CommunityAlias{{Name: "a", Value: "1:2"},
				{Name: "b", Value: "large:1:2:3"}, {Name: "c", Value: "x"}}}})
	if len(c.Values) != 2 || c.Values["b"] != (lb.Community{Large: true, A: 1, B: 2, C: 3}) || c.Problem == nil {
		t.Errorf("community: %+v", c)
	}
}
