package bgp

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// RFC 4271 section 6.8, with identifiers as numbers without a sign, and RFC 6286 section 2.3.
func TestCollisionRule(t *testing.T) {
	for _, test := range []struct {
		own, peer       string
		ownASN, peerASN uint32
		ours            bool
	}{
		{"10.0.0.2", "10.0.0.1", 1, 2, true},
		{"10.0.0.1", "10.0.0.2", 2, 1, false},
		{"200.0.0.1", "100.0.0.1", 1, 2, true},
		{"9.0.0.1", "10.0.0.1", 2, 1, false},
		{"10.0.0.1", "10.0.0.1", 64501, 64500, true},
		{"10.0.0.1", "10.0.0.1", 64500, 4200000000, false},
	} {
		own, peer := netip.MustParseAddr(test.own), netip.MustParseAddr(test.peer)
		if got := oursSurvives(own, peer, test.ownASN, test.peerASN); got != test.ours {
			t.Errorf("%+v: %v", test, got)
		}
		// Both ends must come to the same end.
		if got := oursSurvives(peer, own, test.peerASN, test.ownASN); got == test.ours {
			t.Errorf("%+v: the peer keeps the other one", test)
		}
	}
}

// refuseDials makes the next attempts of the actor to connect fail.
func (p *fakePeer) refuseDials() {
	for range cap(p.dials) {
		p.dials <- errors.New("connection refused")
	}
}

// handshakes plays the router's part on a connection that it has opened.
func (p *fakePeer) handshakes(o peerOpen) {
	p.t.Helper()
	p.want(bgp.BGP_MSG_OPEN)
	p.write(o.serialize())
	p.want(bgp.BGP_MSG_KEEPALIVE)
	p.write(keepalive())
}

// The node's address of a connection is known before the peer hears anything, and is that of the session.
func TestTheAddressOfASessionIsKnownBeforeItIsUp(t *testing.T) {
	inBubble(t, "of one that we open", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(nil))
		p.accept()
		synctest.Wait()
		if s := status(a); s.State != OpenSent || s.Local.String() != "10.0.0.1" {
			t.Errorf("not yet up: %s from %v", s.State, s.Local)
		}
		far, taken := p.callsFrom(a, "10.0.0.2:50000", "10.0.0.9:179")
		if !taken {
			t.Fatal("the connection is not taken")
		}
		other := &fakePeer{t: p.t, conn: far}
		defer far.Close()
		synctest.Wait()
		if s := status(a); s.Local.String() != "10.0.0.1" {
			t.Errorf("a second connection that may be none: from %v", s.Local)
		}
		other.handshakes(routerOpen())
		synctest.Wait()
		if s := status(a); s.State != Established || s.Local.String() != "10.0.0.9" {
			t.Errorf("up: %s from %v", s.State, s.Local)
		}
		far.Close()
		synctest.Wait()
		if s := status(a); s.State == Established || !s.Local.IsValid() {
			t.Errorf("lost: %s from %v", s.State, s.Local)
		}
	})
}

func gracefulOpen() peerOpen {
	o := routerOpen()
	o.capabilities = append(o.capabilities, bgp.NewCapGracefulRestart(false, false, 120, nil))
	return o
}

func TestPeerThatCannotBeDialedConnects(t *testing.T) {
	inBubble(t, "at once", func(t *testing.T, p *fakePeer, a *Actor) {
		p.refuseDials()
		set(a, external(func(d *plan.BGPSession) { d.Routes, d.ConnectTime = routes("192.0.2.1/32"), time.Hour }))
		time.Sleep(time.Minute) // the next attempt is far away
		dials := len(p.targets())
		began := time.Now()
		far := p.calls(a)
		defer far.conn.Close()
		far.handshakes(routerOpen())
		if took := time.Since(began); took > 0 {
			t.Errorf("up after %v", took)
		}
		if updates, _ := far.readUpdates(); len(updates) != 1 {
			t.Errorf("%d UPDATEs", len(updates))
		}
		if s := status(a); !s.Synced || !s.Negotiated.Incoming || s.Negotiated.Local.String() != "10.0.0.1:179" ||
			len(p.targets()) != dials {
			t.Errorf("after %d dials: %+v, %+v", len(p.targets())-dials, s, s.Negotiated)
		}
		far.conn.Close()
		synctest.Wait()
		if s := status(a); s.Flaps != 1 || s.State == Established {
			t.Errorf("lost: %+v", s)
		}
		far = p.calls(a)
		defer far.conn.Close()
		far.handshakes(routerOpen())
	})
	inBubble(t, "while we wait for an answer", func(t *testing.T, p *fakePeer, a *Actor) {
		p.conns <- nil // so that dialing blocks
		set(a, external(nil))
		synctest.Wait()
		far := p.calls(a)
		defer far.conn.Close()
		far.handshakes(routerOpen())
		synctest.Wait()
		<-p.conns // what the dialing waited for
		synctest.Wait()
		if s := status(a); s.State != Established || !s.Negotiated.Incoming || len(p.conns) > 0 {
			t.Errorf("%d more connections, %+v", len(p.conns), s)
		}
	})
	inBubble(t, "and fails, which does not keep us from dialing", func(t *testing.T, p *fakePeer, a *Actor) {
		p.refuseDials()
		set(a, external(func(d *plan.BGPSession) { d.ConnectTime = time.Second }))
		synctest.Wait()
		wrong := routerOpen()
		wrong.capabilities[1] = bgp.NewCapFourOctetASNumber(64999)
		for range 50 {
			far := p.calls(a)
			far.want(bgp.BGP_MSG_OPEN)
			far.write(wrong.serialize())
			far.wantNotification(2, 2)
			far.conn.Close()
			time.Sleep(200 * time.Millisecond)
		}
		if s := status(a); len(p.targets()) < 8 || !strings.Contains(s.LastError, "Bad Peer AS") &&
			s.LastError != "connection refused" {
			t.Errorf("%d dials in 10 s: %+v", len(p.targets()), s)
		}
	})
}

// Both ends connect at once, and whichever OPEN comes first, the connection of the greater
// identifier stays.
func TestCollision(t *testing.T) {
	for _, test := range []struct {
		name, id    string
		theirsFirst bool
		incoming    bool
	}{
		{"the peer's is greater, ours is first", "10.0.0.2", false, true},
		{"the peer's is greater and first", "10.0.0.2", true, true},
		{"ours is greater and first", "9.0.0.2", false, false},
		{"ours is greater, the peer's is first", "9.0.0.2", true, false},
	} {
		inBubble(t, test.name, func(t *testing.T, p *fakePeer, a *Actor) {
			set(a, external(func(d *plan.BGPSession) { d.Routes = routes("192.0.2.1/32") }))
			p.accept()
			theirs := p.calls(a)
			defer theirs.conn.Close()
			p.want(bgp.BGP_MSG_OPEN)
			theirs.want(bgp.BGP_MSG_OPEN)
			o := routerOpen()
			o.id = test.id
			first, second := p, theirs
			if test.theirsFirst {
				first, second = theirs, p
			}
			first.write(o.serialize())
			first.want(bgp.BGP_MSG_KEEPALIVE)
			synctest.Wait()
			if s := status(a); s.State != OpenConfirm {
				t.Errorf("status %+v", s)
			}
			second.write(o.serialize())
			stays, goes := p, theirs
			if test.incoming {
				stays, goes = theirs, p
			}
			if stays == second {
				stays.want(bgp.BGP_MSG_KEEPALIVE)
			}
			goes.wantNotification(6, 7)
			goes.conn.Close()
			stays.write(keepalive())
			updates, _ := stays.readUpdates()
			if s := status(a); len(updates) != 1 || s.State != Established || s.Negotiated.Incoming != test.incoming ||
				s.Flaps != 0 || s.LastError != "" {
				t.Errorf("%d UPDATEs, %+v", len(updates), s)
			}
		})
	}
	// What does not answer is no reason to refuse what does.
	inBubble(t, "only one answers", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.RouterID = netip.MustParseAddr("10.0.0.9") }))
		p.accept()
		p.want(bgp.BGP_MSG_OPEN)
		theirs := p.calls(a)
		defer theirs.conn.Close()
		theirs.handshakes(routerOpen())
		p.wantNotification(6, 7)
		synctest.Wait()
		if s := status(a); s.State != Established || !s.Negotiated.Incoming {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, "the peer connects again", func(t *testing.T, p *fakePeer, a *Actor) {
		p.refuseDials()
		set(a, external(nil))
		synctest.Wait()
		first := p.calls(a)
		first.want(bgp.BGP_MSG_OPEN)
		second := p.calls(a)
		defer second.conn.Close()
		first.wantNotification(6, 7)
		first.conn.Close()
		second.handshakes(routerOpen())
		synctest.Wait()
		if s := status(a); s.State != Established {
			t.Errorf("status %+v", s)
		}
	})
}

// The peer opens another connection while the session is up.
func TestPeerConnectsAgainWhenEstablished(t *testing.T) {
	up := func(a *Actor, p *fakePeer, o peerOpen) {
		set(a, external(func(d *plan.BGPSession) { d.GracefulRestart, d.Routes = true, routes("192.0.2.1/32") }))
		p.establish(o)
		p.readUpdates()
	}
	inBubble(t, "without graceful restart", func(t *testing.T, p *fakePeer, a *Actor) {
		up(a, p, routerOpen())
		again := p.calls(a)
		defer again.conn.Close()
		again.want(bgp.BGP_MSG_OPEN)
		again.write(routerOpen().serialize())
		again.wantNotification(6, 7)
		p.write(keepalive())
		p.want(bgp.BGP_MSG_KEEPALIVE)
		if s := status(a); s.State != Established || s.Flaps != 0 || s.LastError != "" || s.Negotiated.Incoming {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, "with graceful restart", func(t *testing.T, p *fakePeer, a *Actor) {
		p.deaf = true // the old connection must not hold up the new one
		up(a, p, gracefulOpen())
		again := p.calls(a)
		defer again.conn.Close()
		began := time.Now()
		again.handshakes(gracefulOpen())
		synctest.Wait()
		if s := status(a); s.State != Established || time.Since(began) > 0 {
			t.Errorf("after %v: %+v", time.Since(began), s)
		}
		updates, _ := again.readUpdates()
		if announced, _ := content(updates); len(announced) != 1 || len(updates) != 2 {
			t.Errorf("%d UPDATEs with %v, want the route and the end of the RIB", len(updates), announced)
		}
		if kind, body, closed := p.read(); !closed && kind == bgp.BGP_MSG_NOTIFICATION {
			t.Errorf("the peer of the old connection is told %x", body)
		}
		if s := status(a); !s.Synced || !s.Negotiated.Incoming || s.Flaps != 1 || s.LastError != errReplaced.Error() {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, "with graceful restart, and says nothing", func(t *testing.T, p *fakePeer, a *Actor) {
		up(a, p, gracefulOpen())
		again := p.calls(a)
		defer again.conn.Close()
		again.want(bgp.BGP_MSG_OPEN)
		for range 5 {
			p.write(keepalive())
			p.want(bgp.BGP_MSG_KEEPALIVE)
		}
		if s := status(a); s.State != Established || s.Flaps != 0 {
			t.Errorf("status %+v", s)
		}
	})
}

func TestConnectionsThatAreRefused(t *testing.T) {
	refused := func(t *testing.T, p *fakePeer, a *Actor, from, to string) {
		t.Helper()
		if far, taken := p.callsFrom(a, from, to); taken {
			t.Errorf("taken: from %s to %s", from, to)
		} else {
			far.Close()
		}
	}
	inBubble(t, "addresses", func(t *testing.T, p *fakePeer, a *Actor) {
		p.refuseDials()
		refused(t, p, a, "10.0.0.2:50000", "10.0.0.1:179") // nothing is configured yet
		set(a, external(func(d *plan.BGPSession) { d.Source = netip.MustParseAddr("10.0.0.7") }))
		synctest.Wait()
		refused(t, p, a, "10.0.0.3:50000", "10.0.0.7:179")
		refused(t, p, a, "10.0.0.2:50000", "10.0.0.1:179")
		refused(t, p, a, "[fe80::2%eth0]:50000", "[fe80::1%eth0]:179")
		far, taken := p.callsFrom(a, "10.0.0.2:50000", "10.0.0.7:179")
		if !taken {
			t.Fatal("not taken")
		}
		p.conn = far
		p.handshakes(routerOpen())
		a.Set(nil)
		p.wantNotification(6, 3)
		synctest.Wait()
		refused(t, p, a, "10.0.0.2:50000", "10.0.0.7:179")
	})
	inBubble(t, "BFD says down", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(func(d *plan.BGPSession) { d.BFDDown = true }))
		synctest.Wait()
		p.calls(a).wantClosed()
		if s := status(a); s.Reason != lb.ReasonBFDDown || s.State != Idle {
			t.Errorf("status %+v", s)
		}
	})
	inBubble(t, "a session that ends closes all", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(nil))
		p.accept()
		p.want(bgp.BGP_MSG_OPEN)
		theirs := p.calls(a)
		theirs.want(bgp.BGP_MSG_OPEN)
		a.Set(nil)
		p.wantNotification(6, 3)
		theirs.wantNotification(6, 3)
		synctest.Wait()
		if left := a.Statuses(); len(left) != 0 {
			t.Errorf("left: %+v", left)
		}
	})
}

// The router on an interface is known by its link-local address and the interface.
func TestUnnumberedPeerConnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakePeer(t)
		p.refuseDials()
		a := New(Options{Log: slog.New(slog.DiscardHandler), Dial: p.dial,
			Discover: func(ctx context.Context, _ string, found func(netip.Addr)) error {
				found(netip.MustParseAddr("fe80::2%eth0"))
				<-ctx.Done()
				return nil
			}})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		set(a, external(func(d *plan.BGPSession) {
			d.Addr, d.Interface, d.Families, d.Password = netip.Addr{}, "eth0", []lb.Family{lb.IPv4, lb.IPv6}, "secret"
		}))
		synctest.Wait()
		if passwords := a.passwords(""); len(passwords) != 1 || passwords[netip.MustParseAddr("fe80::2")] != "secret" {
			t.Errorf("passwords %v", passwords)
		}
		if far, taken := p.callsFrom(a, "[fe80::2%eth1]:50000", "[fe80::1%eth1]:179"); taken {
			t.Error("taken from another link")
		} else {
			far.Close()
		}
		far, taken := p.callsFrom(a, "[fe80::2%eth0]:50000", "[fe80::1%eth0]:179")
		if !taken {
			t.Fatal("not taken")
		}
		p.conn = far
		p.handshakes(dualOpen())
		synctest.Wait()
		if s := status(a); s.State != Established || !s.Negotiated.Incoming {
			t.Errorf("status %+v", s)
		}
		far.Close()
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Whoever is on the link can advertise itself as a router. It ends no session with the one that was found first, and
// does not take its place while that one advertises itself.
func TestAnotherRouterAdvertisesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		router, other := netip.MustParseAddr("fe80::2%eth0"), netip.MustParseAddr("fe80::bad%eth0")
		advertised := make(chan netip.Addr)
		p := newFakePeer(t)
		a := New(Options{Log: slog.New(slog.DiscardHandler), Dial: p.dial,
			Discover: func(ctx context.Context, _ string, found func(netip.Addr)) error {
				for {
					select {
					case addr := <-advertised:
						found(addr)
					case <-ctx.Done():
						return nil
					}
				}
			}})
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		set(a, external(func(d *plan.BGPSession) { d.Addr, d.Interface = netip.Addr{}, "eth0" }))
		advertised <- router
		p.accept()
		for range 100 { // while the session comes up
			advertised <- other
		}
		open := routerOpen()
		open.hold = 0 // no keepalives
		p.handshakes(open)
		for range 100 {
			time.Sleep(time.Second)
			advertised <- other
		}
		advertised <- router
		synctest.Wait()
		if s := status(a); s.State != Established || s.Flaps != 0 {
			t.Errorf("another router advertises itself: %+v", s)
		}
		p.conn.Close()
		advertised <- other
		p.accept() // the speaker calls again
		for _, target := range p.targets() {
			if target.Peer.Addr() != router {
				t.Errorf("it has called %s", target.Peer)
			}
		}
		// The first one is gone, and the other one does not advertise itself again.
		time.Sleep(routerLasts)
		p.accept()
		targets := p.targets()
		if last := targets[len(targets)-1]; last.Peer.Addr() != other {
			t.Errorf("it calls %s, which is gone", last.Peer)
		}
		p.conn.Close()
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
