package bgp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// What a peer may send wrongly, and the NOTIFICATION that RFC 4271 section 6 asks for. The words
// are those of Status.LastError.
func TestFaultsOfThePeerAreNotified(t *testing.T) {
	marker := frame(bgp.BGP_MSG_KEEPALIVE, nil)
	marker[5] = 0
	long := frame(bgp.BGP_MSG_UPDATE, make([]byte, 5000-headerLength))
	short := frame(bgp.BGP_MSG_UPDATE, nil)
	with := func(change func(*peerOpen)) []byte {
		o := routerOpen()
		change(&o)
		return o.serialize()
	}
	origin := []byte{0, 0, 0, 4, 0x40, 1, 1, 9, 24, 1, 2, 3}
	withdrawnTooLong := []byte{0xff, 0xff, 0, 0}
	for _, test := range []struct {
		name          string
		phase         State // when the peer sends it
		send          []byte
		code, subcode uint8
		words         string
	}{
		{"marker", OpenSent, marker, 1, 1, "Message Header Error/Connection Not Synchronized"},
		{"marker when up", Established, marker, 1, 1, "Message Header Error/Connection Not Synchronized"},
		{"too long", Established, long, 1, 2, "Message Header Error/Bad Message Length"},
		{"too short for its type", Established, short, 1, 2, "Message Header Error/Bad Message Length"},
		{"KEEPALIVE with a body", Established, frame(bgp.BGP_MSG_KEEPALIVE, []byte{1}), 1, 2,
			"Message Header Error/Bad Message Length"},
		{"unknown type", Established, frame(77, nil), 1, 3, "Message Header Error/Bad Message Type"},
		{"version", OpenSent, with(func(o *peerOpen) { o.version = 3 }), 2, 1,
			"OPEN Message Error/Unsupported Version Number"},
		{"other AS", OpenSent, with(func(o *peerOpen) { o.asn = 64999; o.capabilities = o.capabilities[:1] }), 2, 2,
			"OPEN Message Error/Bad Peer AS: the peer says AS 64999, peerASN is 64501"},
		{
			"other AS of four octets", OpenSent,
			with(func(o *peerOpen) { o.capabilities[1] = bgp.NewCapFourOctetASNumber(4200000000) }), 2, 2,
			"Bad Peer AS: the peer says AS 4200000000"},
		{"router ID of zeros", OpenSent, with(func(o *peerOpen) { o.id = "0.0.0.0" }), 2, 3,
			"OPEN Message Error/Bad BGP Identifier"},
		{"hold time of 1 s", OpenSent, with(func(o *peerOpen) { o.hold = 1 }), 2, 6,
			"OPEN Message Error/Unacceptable Hold Time"},
		{
			"no common family", OpenSent,
			with(func(o *peerOpen) { o.capabilities[0] = bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC) }), 2, 7,
			"OPEN Message Error/Unsupported Capability"},
		{"optional parameter", OpenSent, frame(bgp.BGP_MSG_OPEN, []byte{4, 0xfb, 0xf5, 0, 9, 10, 0, 0, 2, 3, 1, 1, 0}), 2, 4,
			"OPEN Message Error/Unsupported Optional Parameter"},
		{"parameters cut short", OpenSent, frame(bgp.BGP_MSG_OPEN, []byte{4, 0xfb, 0xf5, 0, 9, 10, 0, 0, 2, 99, 2}), 2, 0,
			"OPEN Message Error"},
		{"KEEPALIVE for OPEN", OpenSent, keepalive(), 5, 1,
			"Finite State Machine Error/Receive Unexpected Message in OpenSent State"},
		{"UPDATE for KEEPALIVE", OpenConfirm, frame(bgp.BGP_MSG_UPDATE, make([]byte, 4)), 5, 2,
			"Finite State Machine Error/Receive Unexpected Message in OpenConfirm State"},
		{"OPEN when up", Established, routerOpen().serialize(), 5, 3,
			"Finite State Machine Error/Receive Unexpected Message in Established State"},
		{"withdrawn routes beyond the message", Established, frame(bgp.BGP_MSG_UPDATE, withdrawnTooLong), 3, 1,
			"UPDATE Message Error/Malformed Attribute List"},
		{"a route of 33 bits", Established, frame(bgp.BGP_MSG_UPDATE, []byte{0, 0, 0, 0, 33, 192, 0, 2, 0, 0}), 3, 10,
			"UPDATE Message Error/Invalid Network Field: NLRI: a prefix of 33 bits in 5 octets"},
		{"a route that is cut short", Established, frame(bgp.BGP_MSG_UPDATE, []byte{0, 0, 0, 0, 24, 192, 0}), 3, 10,
			"UPDATE Message Error/Invalid Network Field: NLRI: a prefix of 24 bits in 2 octets"},
		{"a withdrawn route of 255 bits", Established,
			frame(bgp.BGP_MSG_UPDATE, append([]byte{0, 33, 255}, make([]byte, 34)...)), 3, 10,
			"UPDATE Message Error/Invalid Network Field: withdrawn routes: a prefix of 255 bits in 32 octets"},
		{"the second withdrawn route is cut short", Established,
			frame(bgp.BGP_MSG_UPDATE, []byte{0, 5, 8, 10, 24, 192, 0, 0, 0}), 3, 10,
			"UPDATE Message Error/Invalid Network Field: withdrawn routes: a prefix of 24 bits in 2 octets"},
		{"attributes beyond the message", Established, frame(bgp.BGP_MSG_UPDATE, []byte{0, 0, 0, 9, 24, 192, 0}), 3, 1,
			"UPDATE Message Error/Malformed Attribute List"},
		{"ROUTE-REFRESH too long", Established, frame(bgp.BGP_MSG_ROUTE_REFRESH, make([]byte, 5)), 7, 1,
			"ROUTE-REFRESH Message Error/Invalid Message Length"},
		{"nothing more after OPEN", OpenConfirm, nil, 4, 0, "Hold Timer Expired"},
		{"nothing at all", OpenSent, nil, 4, 0, "Hold Timer Expired"},
		{"silence when up", Established, nil, 4, 0, "Hold Timer Expired"},
		{"faulty routes concern only themselves", Established, frame(bgp.BGP_MSG_UPDATE, origin), 0, 0, ""},
	} {
		inBubble(t, test.name, func(t *testing.T, p *fakePeer, a *Actor) {
			set(a, external(nil))
			switch test.phase {
			case Established:
				p.establish(routerOpen())
			default:
				p.accept()
				p.want(bgp.BGP_MSG_OPEN)
				if test.phase == OpenConfirm {
					p.write(routerOpen().serialize())
					p.want(bgp.BGP_MSG_KEEPALIVE)
				}
			}
			if test.send != nil {
				go p.conn.Write(test.send) // the actor may close before it has read all
			}
			if test.words == "" {
				p.want(bgp.BGP_MSG_KEEPALIVE)
				if s := status(a); s.State != Established {
					t.Errorf("status %+v", s)
				}
				return
			}
			p.wantNotification(test.code, test.subcode)
			synctest.Wait()
			if s := status(a); s.State == Established || !strings.Contains(s.LastError, test.words) ||
				!strings.HasPrefix(s.LastError, "sent NOTIFICATION ") {
				t.Errorf("state %s, last error %q, want %q", s.State, s.LastError, test.words)
			}
		})
	}
}

func TestWhatThePeerSaysOfItsRefusalIsShown(t *testing.T) {
	refuse := func(name string, up bool, n notification, want string) {
		inBubble(t, name, func(t *testing.T, p *fakePeer, a *Actor) {
			set(a, external(nil))
			if up {
				p.establish(routerOpen())
			} else {
				p.accept()
				p.want(bgp.BGP_MSG_OPEN)
			}
			p.write(n.serialize())
			p.wantClosed()
			synctest.Wait()
			if s := status(a); s.LastError != want || s.Reason != lb.ReasonNotEstablished {
				t.Errorf("last error %q (%s), want %q", s.LastError, s.Reason, want)
			}
		})
	}
	refuse("AS", false, notification{code: 2, subcode: 2}, "received NOTIFICATION OPEN Message Error/Bad Peer AS")
	refuse("shutdown", true, notification{6, 2, shutdownText("maintenance until 6")},
		`received NOTIFICATION Cease/Administrative Shutdown "maintenance until 6"`)
	refuse("unheard of", true, notification{6, 99, nil}, "received NOTIFICATION Cease/subcode 99")
	refuse("rubbish for words", true, notification{6, 2, []byte{200, 'x'}},
		"received NOTIFICATION Cease/Administrative Shutdown")
	inBubble(t, "no word", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(nil))
		p.establish(routerOpen())
		p.conn.Close()
		synctest.Wait()
		if s := status(a); s.LastError != "the peer closed the connection" || s.Flaps != 1 {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, "no connection", func(t *testing.T, p *fakePeer, a *Actor) {
		p.dials <- errors.New("dial tcp 10.0.0.2:179: connection refused")
		set(a, external(nil))
		synctest.Wait()
		if s := status(a); s.LastError != "dial tcp 10.0.0.2:179: connection refused" || s.State != Idle {
			t.Errorf("status %+v", s)
		}
		p.establish(routerOpen())
	})
}

// readUpdates reads the UPDATEs that are there now.
func (p *fakePeer) readUpdates() (updates []*bgp.BGPUpdate, bytes int) {
	p.t.Helper()
	for {
		p.conn.SetReadDeadline(time.Now().Add(time.Second)) // in a bubble: as soon as the actor has nothing to do
		header := make([]byte, headerLength)
		if _, err := p.conn.Read(header); err != nil {
			return updates, bytes
		}
		body := make([]byte, int(binary.BigEndian.Uint16(header[markerLength:]))-headerLength)
		for n := 0; n < len(body); {
			m, err := p.conn.Read(body[n:])
			if err != nil {
				p.t.Fatal(err)
			}
			n += m
		}
		if header[headerLength-1] != bgp.BGP_MSG_UPDATE {
			continue
		}
		u := &bgp.BGPUpdate{}
		if err := u.DecodeFromBytes(body); err != nil {
			p.t.Fatalf("%x: %v", body, err)
		}
		if headerLength+len(body) > maxMessage {
			p.t.Fatalf("an UPDATE of %d bytes", headerLength+len(body))
		}
		updates = append(updates, u)
		bytes += headerLength + len(body)
	}
}

// content lists what UPDATEs announce and withdraw.
func content(updates []*bgp.BGPUpdate) (announced, withdrawn []string) {
	for _, u := range updates {
		for p, r := range learned(u, true) {
			if r.NextHop.IsValid() {
				announced = append(announced, p.String())
			} else {
				withdrawn = append(withdrawn, p.String())
			}
		}
	}
	slices.Sort(announced)
	slices.Sort(withdrawn)
	return announced, withdrawn
}

// vips returns n prefixes of one family, all announced alike.
func vips(n int, v6 bool) map[netip.Prefix]plan.Route {
	m := map[netip.Prefix]plan.Route{}
	for i := range n {
		addr := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		if v6 {
			addr = netip.AddrFrom16([16]byte{0xfd, 1, 14: byte(i >> 8), 15: byte(i)})
		}
		m[netip.PrefixFrom(addr, addr.BitLen())] = plan.Route{LocalPref: plan.DefaultLocalPref}
	}
	return m
}

func dualOpen() peerOpen {
	o := routerOpen()
	o.capabilities = append(o.capabilities, bgp.NewCapMultiProtocol(bgp.RF_IPv6_UC))
	return o
}

// One change is one UPDATE, many changes fill UPDATEs up to 4,096 bytes, and no change is no byte:
// in both families, both on a new session and on one that is up.
func TestUpdatesArePacked(t *testing.T) {
	for _, test := range []struct {
		name       string
		v6         bool
		full       int // UPDATEs for 5,000 routes: 805 or 237 to each, more when withdrawn
		unannounce int
	}{
		{"IPv4", false, 7, 7}, {"IPv6", true, 22, 21},
	} {
		inBubble(t, test.name, func(t *testing.T, p *fakePeer, a *Actor) {
			d := external(func(d *plan.BGPSession) {
				d.Families, d.NextHop6 = []lb.Family{lb.IPv4, lb.IPv6}, netip.MustParseAddr("fd00::1")
				d.Routes = vips(5000, test.v6)
			})
			set(a, d)
			p.establish(dualOpen())
			check := func(step string, updates, announced, withdrawn int) {
				t.Helper()
				got, bytes := p.readUpdates()
				up, down := content(got)
				if len(got) != updates || len(up) != announced || len(down) != withdrawn {
					t.Errorf("%s: %d UPDATEs with %d and %d routes, want %d with %d and %d", step, len(got), len(up), len(down),
						updates, announced, withdrawn)
				}
				if updates == 0 && bytes != 0 {
					t.Errorf("%s: %d bytes", step, bytes)
				}
				if s := status(a); !s.Synced || s.Prefixes != len(d.Routes) {
					t.Errorf("%s: status %+v", step, s)
				}
			}
			check("cold", test.full, 5000, 0)
			d.Routes = vips(5000, test.v6)
			set(a, d)
			check("the same again", 0, 0, 0)
			d.Routes = vips(4999, test.v6)
			set(a, d)
			check("one withdrawn", 1, 0, 1)
			d.Routes = vips(5000, test.v6)
			set(a, d)
			check("one announced", 1, 1, 0)
			d.Routes = vips(5000, test.v6)
			for prefix := range d.Routes {
				d.Routes[prefix] = plan.Route{Communities: []lb.Community{plan.GracefulShutdown}}
			}
			set(a, d)
			check("all changed", test.full, 5000, 0)
			d.Routes = nil
			set(a, d)
			check("all withdrawn", test.unannounce, 0, 5000)
		})
	}
}

// A session is kept where the protocol allows it, and otherwise only that session is reset, with a
// word to the peer.
func TestOptionsChangeInPlaceOrResetOneSession(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*plan.BGPSession)
		reset  string
	}{
		{"connect time", func(d *plan.BGPSession) { d.ConnectTime = time.Minute }, ""},
		{"keepalive time", func(d *plan.BGPSession) { d.KeepaliveTime = time.Second }, ""},
		{"accept routes", func(d *plan.BGPSession) { d.AcceptRoutes = true }, ""},
		{"routes", func(d *plan.BGPSession) { d.Routes = routes("192.0.2.1/32") }, ""},
		{"hold time", func(d *plan.BGPSession) { d.HoldTime = 30 * time.Second }, "configuration changed: hold time"},
		{"password", func(d *plan.BGPSession) { d.Password = "secret" }, "configuration changed: password"},
		{"port", func(d *plan.BGPSession) { d.Port = 1790 }, "configuration changed: peer address"},
		{"families", func(d *plan.BGPSession) { d.Families = []lb.Family{lb.IPv4, lb.IPv6} },
			"configuration changed: address families"},
		{"router ID", func(d *plan.BGPSession) { d.RouterID = netip.MustParseAddr("10.9.9.9") },
			"configuration changed: router ID"},
	} {
		inBubble(t, test.name, func(t *testing.T, p *fakePeer, a *Actor) {
			d := external(nil)
			set(a, d)
			p.establish(routerOpen())
			synctest.Wait()
			test.change(&d)
			set(a, d)
			if test.reset == "" {
				for range 5 {
					if kind, _, closed := p.read(); closed || kind == bgp.BGP_MSG_NOTIFICATION {
						t.Fatalf("the session was reset: %d, %v", kind, status(a).LastError)
					}
					p.write(keepalive())
				}
				return
			}
			p.wantNotification(6, 6)
			began := time.Now()
			p.establish(routerOpen())
			if took := time.Since(began); took > 0 {
				t.Errorf("back after %v", took)
			}
			if s := status(a); s.LastError != test.reset || s.State == Idle {
				t.Errorf("status %+v", s)
			}
			if last := p.targets()[len(p.targets())-1]; last.Password != d.Password || last.Peer.Port() != d.Port {
				t.Errorf("dialed %+v", last)
			}
		})
	}
}

func TestKeepalivesAndHoldTime(t *testing.T) {
	inBubble(t, "the lesser hold time and a third of it", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.HoldTime = 90 * time.Second }))
		p.establish(routerOpen())
		for range 20 { // a minute
			began := time.Now()
			p.want(bgp.BGP_MSG_KEEPALIVE)
			if d := time.Since(began); d != 3*time.Second {
				t.Fatalf("a keepalive after %v", d)
			}
			p.write(keepalive())
		}
		if n := status(a).Negotiated; n == nil || n.HoldTime != 9*time.Second || n.KeepaliveTime != 3*time.Second {
			t.Errorf("negotiated %+v", n)
		}
		// Now the peer only listens.
		began := time.Now()
		p.wantNotification(4, 0)
		if d := time.Since(began); d != 9*time.Second {
			t.Errorf("hold timer after %v", d)
		}
	})
	inBubble(t, "none", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.HoldTime = 0 }))
		p.establish(routerOpen())
		time.Sleep(time.Hour)
		if s := status(a); s.State != Established || s.Counters.MessagesOut != 2 {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, "a peer that does not read", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(nil))
		p.establish(routerOpen())
		go func() {
			for p.conn.SetWriteDeadline(time.Now().Add(time.Minute)) == nil {
				if _, err := p.conn.Write(keepalive()); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		}()
		time.Sleep(13 * time.Second) // until the first keepalive, then the hold time
		if s := status(a); !strings.Contains(s.LastError, "Send Hold Timer Expired") {
			t.Errorf("status %+v", s)
		}
	})
}

func TestBFDDownHoldsTheSessionDown(t *testing.T) {
	inBubble(t, "up", func(t *testing.T, p *fakePeer, a *Actor) {
		d := external(nil)
		set(a, d)
		p.establish(routerOpen())
		d.BFDDown = true
		set(a, d)
		p.wantNotification(6, 10)
		time.Sleep(time.Hour)
		if s := status(a); s.State != Idle || s.Reason != lb.ReasonBFDDown || len(p.targets()) != 1 {
			t.Errorf("after %d dials: %+v", len(p.targets()), s)
		}
		d.BFDDown = false
		set(a, d)
		began := time.Now()
		p.establish(routerOpen())
		if took := time.Since(began); took > 0 {
			t.Errorf("back after %v", took)
		}
	})
	inBubble(t, "from the start", func(t *testing.T, p *fakePeer, a *Actor) {
		d := external(func(d *plan.BGPSession) { d.BFDDown = true })
		set(a, d)
		time.Sleep(time.Hour)
		if len(p.targets()) != 0 {
			t.Errorf("%d dials", len(p.targets()))
		}
		d.BFDDown = false
		set(a, d)
		p.establish(routerOpen())
	})
}

// With graceful restart, an agent that stops says nothing, so that its routes stay; an end for good
// is an end.
func TestGracefulRestart(t *testing.T) {
	open := routerOpen()
	open.capabilities = append(open.capabilities, bgp.NewCapGracefulRestart(false, false, 120, nil))
	graceful := external(func(d *plan.BGPSession) { d.GracefulRestart, d.Routes = true, routes("192.0.2.1/32") })
	capability := func(body []byte) *bgp.CapGracefulRestart {
		m := &bgp.BGPOpen{}
		if err := m.DecodeFromBytes(body); err != nil {
			t.Fatal(err)
		}
		for _, c := range m.OptParams[0].(*bgp.OptionParameterCapability).Capability {
			if gr, ok := c.(*bgp.CapGracefulRestart); ok {
				return gr
			}
		}
		return nil
	}
	synctest.Test(t, func(t *testing.T) {
		p := newFakePeer(t)
		a, stop := p.start()
		set(a, graceful)
		first := capability(p.establish(open))
		if first == nil || first.Flags != 8 || first.Time != 120 || len(first.Tuples) != 1 || first.Tuples[0].Flags != 0x80 {
			t.Fatalf("capability %+v, want restarting and forwarding", first)
		}
		updates, _ := p.readUpdates()
		if up, _ := content(updates); len(updates) != 2 || len(up) != 1 ||
			len(updates[1].NLRI)+len(updates[1].PathAttributes) != 0 {
			t.Fatalf("%d UPDATEs, want the route and the end of the RIB", len(updates))
		}
		p.conn.Close() // the network, not a restart
		second := capability(p.establish(open))
		if second.Flags != 0 || second.Tuples[0].Flags != 0x80 {
			t.Errorf("capability %+v, want only forwarding", second)
		}
		p.readUpdates()
		go stop()
		p.wantClosed()
	})
	inBubble(t, "a change of options is no reason to forget", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, graceful)
		p.establish(open)
		p.readUpdates()
		changed := graceful
		changed.HoldTime = 30 * time.Second
		set(a, changed)
		p.wantClosed()
		p.establish(open)
		p.readUpdates()
		changed.GracefulRestart = false
		set(a, changed)
		p.wantNotification(6, 6)
		p.establish(open)
		p.readUpdates()
		a.Set(nil)
		p.wantNotification(6, 3)
		synctest.Wait()
		if left := a.Statuses(); len(left) != 0 {
			t.Errorf("left: %+v", left)
		}
	})
	inBubble(t, "for good", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, graceful)
		p.establish(open)
		p.readUpdates()
		a.Set(nil)
		p.wantNotification(6, 3)
	})
	synctest.Test(t, func(t *testing.T) {
		p := newFakePeer(t)
		a, stop := p.start()
		set(a, external(nil))
		p.establish(open)
		synctest.Wait()
		go stop()
		p.wantNotification(6, 2)
	})
}

// A peer that is taken away and put back has a new session when the old one has said goodbye. A
// router that keeps the routes of a speaker that stops has seen the end of the session before Run
// returns, and BFD goes down.
func TestGracefulEndWaitsForThePeer(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	a := New(Options{Log: slog.New(slog.DiscardHandler), Dial: func(ctx context.Context, _ Target) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", listener.Addr().String())
	}})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	p := newFakePeer(t)
	open := routerOpen()
	open.capabilities = append(open.capabilities, bgp.NewCapGracefulRestart(false, false, 120, nil))
	set(a, external(func(d *plan.BGPSession) { d.GracefulRestart, d.Routes = true, routes("192.0.2.1/32") }))
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	p.conns <- conn
	p.establish(open)
	for all := false; !all; {
		updates, _ := p.readUpdates()
		all = slices.ContainsFunc(updates, func(u *bgp.BGPUpdate) bool { // End-of-RIB (RFC 4724 section 2)
			return len(u.NLRI)+len(u.WithdrawnRoutes)+len(u.PathAttributes) == 0
		})
	}
	began := time.Now()
	stop()
	p.wantClosed()
	select {
	case err := <-done:
		if took := time.Since(began); took < goodbyeTime || err != nil {
			t.Fatalf("%v after %v: the actor has ended before its peer has closed the session", err, took)
		}
		return // this test got no processor for so long that the actor has given up: it shows nothing
	case <-time.After(goodbyeTime / 10):
	}
	conn.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestPeerGoesAndComesBack(t *testing.T) {
	inBubble(t, "at once", func(t *testing.T, p *fakePeer, a *Actor) {
		d := external(func(d *plan.BGPSession) { d.Routes = routes("192.0.2.1/32") })
		set(a, d)
		p.establish(routerOpen())
		p.readUpdates()
		a.Set(nil)
		synctest.Wait()
		set(a, d)
		if s := status(a); s.Synced {
			t.Errorf("in step with what it was not told yet: %+v", s)
		}
		p.wantNotification(6, 3)
		p.establish(routerOpen())
		if updates, _ := p.readUpdates(); len(updates) != 1 || !status(a).Synced || status(a).Flaps != 0 {
			t.Errorf("%d UPDATEs, %+v", len(updates), status(a))
		}
	})
}

func TestDynamicASN(t *testing.T) {
	for _, test := range []struct {
		dynamic lb.DynamicASN
		asn     uint32
		ok      bool
	}{
		{lb.ExternalASN, 64501, true}, {lb.ExternalASN, 4200000000, true}, {lb.ExternalASN, 64500, false},
		{lb.InternalASN, 64500, true}, {lb.InternalASN, 64501, false},
	} {
		inBubble(t, string(test.dynamic), func(t *testing.T, p *fakePeer, a *Actor) {
			set(a, external(func(d *plan.BGPSession) {
				d.PeerASN, d.Dynamic, d.Routes = 0, test.dynamic, routes("192.0.2.1/32")
			}))
			p.accept()
			p.want(bgp.BGP_MSG_OPEN)
			o := routerOpen()
			o.asn, o.capabilities[1] = test.asn, bgp.NewCapFourOctetASNumber(test.asn)
			p.write(o.serialize())
			if !test.ok {
				p.wantNotification(2, 2)
				return
			}
			p.want(bgp.BGP_MSG_KEEPALIVE)
			p.write(keepalive())
			updates, _ := p.readUpdates()
			if len(updates) != 1 {
				t.Fatalf("%d UPDATEs", len(updates))
			}
			internal := slices.ContainsFunc(updates[0].PathAttributes,
				func(a bgp.PathAttributeInterface) bool { return a.GetType() == bgp.BGP_ATTR_TYPE_LOCAL_PREF })
			if internal != (test.dynamic == lb.InternalASN) {
				t.Errorf("LOCAL_PREF sent: %v", internal)
			}
		})
	}
}

// Attempts come soon, then less often, and at most every ConnectTime.
func TestAttemptsToConnect(t *testing.T) {
	inBubble(t, "refused", func(t *testing.T, p *fakePeer, a *Actor) {
		for range cap(p.dials) {
			p.dials <- errors.New("refused")
		}
		began := time.Now()
		set(a, external(func(d *plan.BGPSession) { d.ConnectTime = 8 * time.Second }))
		p.establish(routerOpen())
		// 0.25 + 0.5 + 1 + 2 + 4 + 8 * 5 seconds, give or take a quarter
		if took := time.Since(began); took < 35*time.Second || took > 60*time.Second || len(p.targets()) != 11 {
			t.Errorf("%d attempts in %v", len(p.targets()), took)
		}
	})
	inBubble(t, "20 flaps in a minute", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.ConnectTime, d.Routes = time.Minute, routes("192.0.2.1/32") }))
		began := time.Now()
		for i := range 21 {
			p.establish(routerOpen())
			if updates, _ := p.readUpdates(); len(updates) != 1 { // takes a second
				t.Fatalf("flap %d: %d UPDATEs", i, len(updates))
			}
			if i < 20 {
				p.conn.Close()
			}
		}
		synctest.Wait()
		if s := status(a); time.Since(began) > time.Minute || s.Flaps != 20 || s.State != Established || !s.Synced {
			t.Errorf("after %v: %+v", time.Since(began), s)
		}
	})
}

func TestRouteRefreshSendsAllAgain(t *testing.T) {
	inBubble(t, "IPv4", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.Routes = vips(1000, false) }))
		p.establish(routerOpen())
		p.readUpdates()
		p.write(routeRefresh(bgp.AFI_IP))
		updates, _ := p.readUpdates()
		if up, down := content(updates); len(up) != 1000 || len(down) != 0 || len(updates) != 2 {
			t.Errorf("%d UPDATEs with %d and %d routes", len(updates), len(up), len(down))
		}
		p.write(routeRefresh(bgp.AFI_IP6))
		p.write(frame(bgp.BGP_MSG_ROUTE_REFRESH, []byte{0, 1, 0, 77}))
		if updates, bytes := p.readUpdates(); bytes != 0 {
			t.Errorf("%d UPDATEs for a family that was not negotiated", len(updates))
		}
	})
}

func TestReceivedRoutesAreShownOnlyWhenAccepted(t *testing.T) {
	announce := func(prefix string) []byte {
		e := encoding{localASN: 64501, fourOctets: true,
			nextHops: map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("10.0.0.2")}}
		route := plan.Route{Communities: []lb.Community{{A: 64501, B: 7}, {Large: true, A: 1, B: 2, C: 3}}}
		return e.outgoing(nil, map[netip.Prefix]plan.Route{netip.MustParsePrefix(prefix): route}).messages[0]
	}
	inBubble(t, "as it is switched", func(t *testing.T, p *fakePeer, a *Actor) {
		d := external(nil)
		set(a, d)
		p.establish(routerOpen())
		p.write(announce("203.0.113.0/24"))
		synctest.Wait()
		if s := status(a); s.Received != 0 || s.Counters.UpdatesIn != 1 {
			t.Errorf("refused: %+v", s)
		}
		d.AcceptRoutes = true
		set(a, d)
		p.want(bgp.BGP_MSG_ROUTE_REFRESH)
		p.write(announce("203.0.113.0/24"))
		p.write(announce("0.0.0.0/0"))
		synctest.Wait()
		s := status(a)
		want := ReceivedRoute{Prefix: netip.MustParsePrefix("0.0.0.0/0"), NextHop: netip.MustParseAddr("10.0.0.2"),
			ASPath: "64501", Communities: []string{"64501:7", "large:1:2:3"}}
		if s.Received != 2 || s.Routes[0].Prefix != want.Prefix || s.Routes[0].NextHop != want.NextHop ||
			s.Routes[0].ASPath != want.ASPath ||
			!slices.Equal(s.Routes[0].Communities, want.Communities) {
			t.Errorf("accepted: %+v", s)
		}
		p.write(withdraw([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}, nil)[0])
		synctest.Wait()
		if s := status(a); s.Received != 1 {
			t.Errorf("one withdrawn: %+v", s)
		}
		d.AcceptRoutes = false
		set(a, d)
		synctest.Wait()
		if s := status(a); s.Received != 0 {
			t.Errorf("refused again: %+v", s)
		}
	})
}

// A peer that announces what was announced from this AS has taken it from another node: it is noted,
// whether or not routes are accepted.
func TestReturnedRoutes(t *testing.T) {
	vip, other := netip.MustParsePrefix("203.0.113.9/32"), netip.MustParsePrefix("203.0.113.10/32")
	announce := func(prefix netip.Prefix, path ...uint32) []byte {
		body, err := bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{
			bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP),
			bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, path)}),
			bgp.NewPathAttributeNextHop("10.0.0.2"),
		}, []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(uint8(prefix.Bits()), prefix.Addr().String())}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return body
	}
	inBubble(t, "by the AS path", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.Routes = routes(vip.String()) }))
		p.establish(routerOpen())
		want := func(what string, returned int, vips ...netip.Prefix) {
			t.Helper()
			synctest.Wait()
			if s := status(a); s.Returned != returned || s.Received != 0 {
				t.Errorf("%s: %d returned, %d received", what, s.Returned, s.Received)
			}
			for _, prefix := range []netip.Prefix{vip, other} {
				if got := len(a.Confirming(prefix)) > 0; got != slices.Contains(vips, prefix) {
					t.Errorf("%s: %s is confirmed: %v", what, prefix, got)
				}
			}
		}
		want("nothing", 0)
		p.write(announce(other, 64501, 645, 4500))
		want("of another AS", 0)
		p.write(announce(vip, 64501, 64500))
		want("of this AS", 1, vip)
		p.write(announce(other, 64501, 64500))
		p.write(announce(vip, 64501, 64502))
		want("one is of another AS now", 1, other)
		p.write(withdraw([]netip.Prefix{other}, nil)[0])
		want("withdrawn", 0)
		p.write(announce(vip, 64501, 64500))
		want("again", 1, vip)
		p.conn.Close()
		want("the session is lost", 0)
	})
}

// A peer may send anything, at any time: the actor neither falls over nor waits for ever, what it
// says in return is a whole message, and afterwards it serves a router that behaves.
func TestHostilePeer(t *testing.T) {
	valid := [][]byte{
		routerOpen().serialize(), keepalive(), routeRefresh(bgp.AFI_IP), endOfRIB(lb.IPv4),
		notification{6, 2, shutdownText("x")}.serialize(),
	}
	e := encoding{localASN: 64501, fourOctets: true,
		nextHops: map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("10.0.0.2"), lb.IPv6: netip.MustParseAddr("fd00::2")}}
	valid = append(valid, e.outgoing(nil, map[netip.Prefix]plan.Route{
		netip.MustParsePrefix("203.0.113.0/24"): {Communities: []lb.Community{{A: 1}, {Large: true}}, HasMED: true},
		netip.MustParsePrefix("fd02::/64"):      {},
	}).messages...)
	inBubble(t, "1,000 connections", func(t *testing.T, p *fakePeer, a *Actor) {
		random := rand.New(rand.NewPCG(1, 2))
		set(a, external(func(d *plan.BGPSession) { d.AcceptRoutes, d.Routes = true, routes("192.0.2.1/32") }))
		for range 1000 {
			p.accept()
			p.want(bgp.BGP_MSG_OPEN)
			if random.IntN(4) > 0 {
				p.write(routerOpen().serialize())
				p.want(bgp.BGP_MSG_KEEPALIVE)
			}
			if random.IntN(4) > 0 {
				p.conn.Write(keepalive())
			}
			drained := make(chan struct{})
			go func() {
				defer close(drained)
				for r := (&reader{from: p.conn}); ; {
					if _, err := r.next(); err != nil {
						var f *protocolError
						if errors.As(err, &f) {
							t.Errorf("the actor sends rubbish: %v", f.why)
						}
						return
					}
				}
			}()
			for range 1 + random.IntN(5) {
				m := slices.Clone(valid[random.IntN(len(valid))])
				for range random.IntN(4) {
					m[random.IntN(len(m))] = byte(random.Uint32())
				}
				if random.IntN(8) == 0 {
					m = m[:random.IntN(len(m))]
				}
				p.conn.SetWriteDeadline(time.Now().Add(time.Minute)) // beyond all that the actor waits for
				if _, err := p.conn.Write(m); errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatal("the actor neither reads nor closes")
				}
			}
			p.conn.Close()
			<-drained
		}
		p.establish(routerOpen())
		if updates, _ := p.readUpdates(); len(updates) != 1 {
			t.Errorf("%d UPDATEs", len(updates))
		}
	})
}

func TestMetricsAndPeerNode(t *testing.T) {
	inBubble(t, "as the session goes", func(t *testing.T, p *fakePeer, a *Actor) {
		value := func(name, label string) string {
			t.Helper()
			return fmt.Sprint(metric(t, a, name, label))
		}
		p.dials <- errors.New("connection refused")
		set(a, external(func(d *plan.BGPSession) {
			d.Families, d.Routes = []lb.Family{lb.IPv4, lb.IPv6}, routes("192.0.2.1/32", "192.0.2.2/32", "fd01::1/128")
		}))
		synctest.Wait()
		if got, want := status(a).PeerNode(),
			(lb.PeerNode{State: "Idle", Reason: lb.ReasonNotEstablished, Message: "connection refused"}); got != want {
			t.Errorf("node %+v, want %+v", got, want)
		}
		if up := value("landfall_bgp_session_up", "tor"); up != "0" {
			t.Errorf("up: %s", up)
		}
		p.establish(dualOpen())
		p.readUpdates()
		if got := status(a).PeerNode(); got.State != "Established" || got.Reason != lb.ReasonNoNextHop {
			t.Errorf("node %+v", got)
		}
		for name, want := range map[string]string{
			"landfall_bgp_session_up": "1", "landfall_bgp_session_flaps_total": "0", "landfall_bgp_prefixes_announced": "2",
			"landfall_bgp_prefixes_received": "0",
		} {
			if got := value(name, "tor"); got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
		if got := value("landfall_bgp_updates_total", "out"); got != "1" {
			t.Errorf("UPDATEs sent: %s", got)
		}
		p.conn.Close()
		synctest.Wait()
		if got := value("landfall_bgp_session_flaps_total", "tor"); got != "1" {
			t.Errorf("flaps: %s", got)
		}
	})
}

// trap is a message that the packet library falls over.
type trap struct{ bgp.BGPBody }

func (trap) DecodeFromBytes([]byte, ...*bgp.MarshallingOption) error { panic("index out of range") }

func TestWhatThePacketLibraryFallsOverIsMalformed(t *testing.T) {
	if err := decode(trap{}, nil); err == nil || !strings.Contains(err.Error(), "index out of range") {
		t.Errorf("%v", err)
	}
}

// TestFailedAttemptsAreLogged checks that a router that is away is logged once, and once more a
// minute if its errors differ, and that another configuration begins anew.
func TestFailedAttemptsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		d := plan.BGPSession{Addr: netip.MustParseAddr("192.0.2.1"), Port: 179, LocalASN: 64500}
		s := newSession("tor", Options{Log: slog.New(slog.NewTextHandler(&out, nil)), Changed: func() {}}, d)
		lines := func() int { return strings.Count(out.String(), "BGP session cannot be established") }
		for i := range 60 {
			s.failed(lb.ReasonNotEstablished, fmt.Errorf("port %d: connection reset", i))
			time.Sleep(time.Second)
		}
		if lines() != 1 {
			t.Errorf("%d lines in the first minute, want 1", lines())
		}
		s.failed(lb.ReasonNotEstablished, errors.New("connection refused"))
		s.failed(lb.ReasonNotEstablished, errors.New("connection reset"))
		if lines() != 2 {
			t.Errorf("%d lines after a minute, want 2", lines())
		}
		d.LocalASN++
		s.set(d)
		s.failed(lb.ReasonNotEstablished, errors.New("connection refused"))
		if lines() != 3 {
			t.Errorf("%d lines after another configuration, want 3", lines())
		}
	})
}
