package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// inVRF gives the node a VRF with a port on the same subnet as eth0, and has tor-1 in it.
func inVRF(w *bgpWorld) {
	w.facts.Interfaces = append(w.facts.Interfaces,
		lb.Interface{Index: 7, Name: "red", VRF: "red", Table: 100, Addresses: []netip.Prefix{netip.MustParsePrefix("fd09::1/128")}},
		lb.Interface{Name: "up0", VRF: "red", Enslaved: true, Addresses: []netip.Prefix{
			netip.MustParsePrefix("10.0.0.9/24"), netip.MustParsePrefix("fd09:1::9/64")}})
	w.bgp.Peers = map[string]lb.Peer{"tor-1": bgpPeer("tor-1", "10.0.0.2", func(p *lb.Peer) { p.VRF = "red" })}
	w.bgp.VRFs = map[string]string{"red": ""}
}

func peer(change func(*lb.Peer)) func(*bgpWorld) {
	return func(w *bgpWorld) {
		p := w.bgp.Peers["tor-1"]
		change(&p)
		w.bgp.Peers["tor-1"] = p
	}
}

// A session in a VRF has its next hops there, and there is none without the VRF.
func TestSessionsInVRFs(t *testing.T) {
	for _, test := range []struct {
		name    string
		change  func(*bgpWorld)
		hop     string
		refusal lb.Reason
	}{
		{"plain", func(*bgpWorld) {}, "", ""},
		{"both families: the next hop is on the link to the peer in the VRF",
			peer(func(p *lb.Peer) { p.DualStack = true }), "fd09:1::9", ""},
		{"a router elsewhere: it is the VRF's own address",
			peer(func(p *lb.Peer) { p.DualStack, p.Addr = true, addr("172.16.0.2") }), "fd09::1", ""},
		{"a VRF without IPv6 has no next hop, even if the node has one", func(w *bgpWorld) {
			peer(func(p *lb.Peer) { p.DualStack = true })(w)
			w.facts.Interfaces[1].Addresses, w.facts.Interfaces[2].Addresses = nil, w.facts.Interfaces[2].Addresses[:1]
		}, "", ""},
		{"no VRF of the name", peer(func(p *lb.Peer) { p.VRF = "blue" }), "", lb.ReasonVRFMissing},
		{"an interface of the name that is no VRF", peer(func(p *lb.Peer) { p.VRF = "eth0" }), "", lb.ReasonVRFMissing},
		{"unnumbered", peer(func(p *lb.Peer) { p.Addr, p.Interface = netip.Addr{}, "up0" }), "", ""},
		{"unnumbered, on an interface that is not in the VRF",
			peer(func(p *lb.Peer) { p.Addr, p.Interface = netip.Addr{}, "eth0" }), "", lb.ReasonInterfaceMissing},
	} {
		w := newBGPWorld(inVRF, test.change)
		d := w.decide()
		var refusal lb.Reason
		if r := d.Peers["tor-1"].Refusal; r != nil {
			refusal = r.Reason
		}
		session, has := d.Sessions["tor-1"]
		if refusal != test.refusal || has == (refusal != "") || has && session.VRF != "red" {
			t.Errorf("%s: %q, %+v, want %q", test.name, refusal, session, test.refusal)
		}
		if hop := session.NextHop6; test.hop != "" && hop != addr(test.hop) || test.hop == "" && hop.IsValid() {
			t.Errorf("%s: next hop %v, want %q", test.name, hop, test.hop)
		}
	}
}

// Connections that two routers at one address open cannot be told apart by their ports.
func TestPeersOfOneAddressThatConnect(t *testing.T) {
	source := func(text string) func(*lb.Peer) { return func(p *lb.Peer) { p.Source = addr(text) } }
	none := func(*lb.Peer) {}
	for _, test := range []struct {
		name         string
		listens      bool
		older, other func(*lb.Peer)
		refused      bool
	}{
		{"the speaker connects", false, none, none, false},
		{"they connect", true, none, none, true},
		{"to two addresses", true, source("10.0.0.1"), source("10.0.0.9"), false},
		{"to one address", true, source("10.0.0.1"), source("10.0.0.1"), true},
		{"to any address and to one", true, none, source("10.0.0.1"), true},
		{"with two passwords", true, source("10.0.0.1"), func(p *lb.Peer) { p.Source, p.Password = addr("10.0.0.9"), "x" },
			true},
		{"in another VRF", true, none, func(p *lb.Peer) { p.VRF = "red" }, false},
	} {
		w := newBGPWorld(inVRF)
		w.bgp.Listening = test.listens
		w.bgp.Peers = map[string]lb.Peer{"older": bgpPeer("older", "10.0.0.2", test.older),
			"other": bgpPeer("other", "10.0.0.2", test.other, func(p *lb.Peer) { p.Port = 1790 })}
		d := w.decide()
		refusal := d.Peers["other"].Refusal
		switch {
		case (refusal != nil) != test.refused || (len(d.Sessions) == 1) != test.refused:
			t.Errorf("%s: %v, sessions %v", test.name, refusal, d.Sessions)
		case refusal == nil:
		case refusal.Reason != lb.ReasonPeerDuplicate || !strings.HasPrefix(refusal.Message, "BGPPeer older (port 179) and "+
			"other (port 1790) have one address"):
			t.Errorf("%s: %v", test.name, refusal)
		}
	}
}

// Sockets of a session stay in the VRF that they were opened in: in another of its name the session is another one.
func TestVRFMadeAnew(t *testing.T) {
	w := newBGPWorld(inVRF)
	before := w.decide().Sessions["tor-1"]
	w.facts.Interfaces[1].Index = 9
	if after := w.decide().Sessions["tor-1"]; before.VRFIndex != 7 || after.VRFIndex != 9 {
		t.Errorf("in the interface %d, then in %d", before.VRFIndex, after.VRFIndex)
	}
	w = newBGPWorld()
	if s := w.decide().Sessions["tor-1"]; s.VRFIndex != 0 {
		t.Errorf("outside of VRFs: in the interface %d", s.VRFIndex)
	}
}

// One address stands for another router in each VRF, and an address in the VRF is no next hop outside.
func TestPeersOfOneAddress(t *testing.T) {
	w := newBGPWorld(inVRF)
	w.bgp.Peers["main"] = bgpPeer("main", "10.0.0.2", func(p *lb.Peer) { p.DualStack = true })
	w.bgp.Peers["twice"] = bgpPeer("twice", "10.0.0.2", func(p *lb.Peer) { p.VRF = "red" })
	d := w.decide()
	if len(d.Sessions) != 2 || d.Peers["twice"].Refusal == nil || d.Peers["twice"].Refusal.Reason != lb.ReasonPeerDuplicate {
		t.Errorf("sessions %v, decisions %v", d.Sessions, d.Peers)
	}
	if hop := d.Sessions["main"].NextHop6; hop != addr("fd00::7") {
		t.Errorf("the next hop outside of the VRF is %s", hop)
	}
}

// TestContract1HoldsForVRFs has a peer in a VRF hear of a VIP only while the proxy says that the kernel delivers what
// comes in there; others hear of it all the same.
func TestContract1HoldsForVRFs(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*bgpWorld)
		want   string
		says   string
	}{
		{"delivered", func(*bgpWorld) {}, "main: 192.0.2.1/32; tor-1: 192.0.2.1/32", ""},
		{"a proxy that says nothing", func(w *bgpWorld) { w.bgp.VRFs = nil }, "main: 192.0.2.1/32; tor-1: ", "does not say"},
		{"undelivered", func(w *bgpWorld) { w.bgp.VRFs["red"] = "the VRF is down" }, "main: 192.0.2.1/32; tor-1: ",
			"the VRF is down"},
		{"no proxy of ours", func(w *bgpWorld) { w.bgp.VRFs, w.bgp.TrustVRFs = nil, true },
			"main: 192.0.2.1/32; tor-1: 192.0.2.1/32", ""},
	} {
		w := newBGPWorld(inVRF, test.change)
		w.bgp.Peers["main"] = bgpPeer("main", "10.0.0.3")
		d := w.decide()
		if got := heard(d); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
		obstacles := d.VIPs[addr("192.0.2.1")].Obstacles
		if test.says == "" {
			if len(obstacles) > 0 {
				t.Errorf("%s: %v", test.name, obstacles)
			}
			continue
		}
		if len(obstacles) != 1 || obstacles[0].Reason != lb.ReasonVRFUndelivered || obstacles[0].Peer != "tor-1" ||
			!strings.Contains(obstacles[0].Message, test.says) {
			t.Errorf("%s: %v", test.name, obstacles)
		}
		delete(w.bgp.Peers, "main")
		if r := w.decide().VIPs[addr("192.0.2.1")].Refusal; r == nil || r.Reason != lb.ReasonVRFUndelivered {
			t.Errorf("%s, and no other peer: %v", test.name, r)
		}
	}
}

// No packet comes in at a VRF itself: what is so of it says nothing of the way from a router in it.
func TestAVRFIsNoUplink(t *testing.T) {
	own := addr("10.99.0.1")
	i := lb.Interface{Name: "red", VRF: "red", Table: 100, Addresses: []netip.Prefix{netip.PrefixFrom(own, 32)}}
	if isUplink(i, "red", "", addr("172.31.0.2"), own) {
		t.Error("a VRF leads to a router that is not near")
	}
	if i.Table = 0; !isUplink(i, "red", "", addr("172.31.0.2"), own) {
		t.Error("a port of the VRF with the session's address does not")
	}
}
