package bgp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"golang.org/x/net/ipv6"

	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// A router that sends without end is read no faster than its pace allows, and its session stays.
func TestFloodOfMessagesIsReadAtItsPace(t *testing.T) {
	inBubble(t, "keepalives", func(t *testing.T, p *fakePeer, a *Actor) {
		set(a, external(nil))
		p.establish(routerOpen())
		go io.Copy(io.Discard, p.conn)
		began, reads := time.Now(), newPace().reads
		const seconds = 20
		for range reads.Burst + seconds*int(time.Second/reads.Every) {
			p.write(keepalive()) // each is one read
		}
		if took := time.Since(began); took < (seconds-1)*time.Second {
			t.Errorf("all is read after %v", took)
		}
		if s := status(a); s.State != Established {
			t.Errorf("%+v", s)
		}
	})
}

// A router that asks again and again gets its routes once a second, and a change at once.
func TestFloodOfRouteRefreshes(t *testing.T) {
	inBubble(t, "IPv4", func(t *testing.T, p *fakePeer, a *Actor) {
		d := external(func(d *plan.BGPSession) { d.Routes = vips(1, false) })
		set(a, d)
		p.establish(routerOpen())
		p.readUpdates()
		went := make(chan struct{})
		go func() {
			defer close(went)
			for range 1000 {
				p.write(routeRefresh(bgp.AFI_IP))
				time.Sleep(10 * time.Millisecond)
			}
		}()
		updates := func() (n uint64) { return status(a).Counters.UpdatesOut }
		p.conn.SetReadDeadline(time.Time{})
		go io.Copy(io.Discard, p.conn)
		time.Sleep(5500 * time.Millisecond)
		before := updates()
		d.Routes = vips(2, false)
		set(a, d)
		synctest.Wait()
		if n := updates() - before; n != 1 {
			t.Errorf("%d UPDATEs for a change", n)
		}
		<-went
		time.Sleep(5 * time.Second)
		if n := updates(); n < 10 || n > 40 {
			t.Errorf("%d UPDATEs in 10 s", n)
		}
	})
}

// Wishes of one family do not crowd out those of the other.
func TestRouteRefreshesOfBothFamilies(t *testing.T) {
	c := &connection{refresh: newWishes()}
	for range 20 {
		if err := c.heardRefresh([]byte{0, bgp.AFI_IP, 0, bgp.SAFI_UNICAST}); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.heardRefresh([]byte{0, bgp.AFI_IP6, 0, bgp.SAFI_UNICAST}); err != nil {
		t.Fatal(err)
	}
	if v4, v6 := len(c.refresh[lb.IPv4]), len(c.refresh[lb.IPv6]); v4 != 1 || v6 != 1 {
		t.Errorf("%d and %d wishes wait", v4, v6)
	}
}

// A router whose sessions end as soon as they are up has one every two seconds, whoever connects.
func TestSessionThatFlapsComesUpSeldom(t *testing.T) {
	for name, open := range map[string]peerOpen{"plain": routerOpen(), "with graceful restart": gracefulOpen()} {
		inBubble(t, name, func(t *testing.T, p *fakePeer, a *Actor) {
			p.refuseDials()
			set(a, external(func(d *plan.BGPSession) {
				d.ConnectTime, d.GracefulRestart, d.Routes = time.Hour, open.hasGracefulRestart(), vips(1, false)
			}))
			synctest.Wait()
			const flaps = 30
			began := time.Now()
			for range flaps {
				far := p.calls(a)
				far.handshakes(open)
				go io.Copy(io.Discard, far.conn)
				for status(a).State != Established {
					time.Sleep(time.Millisecond)
				}
				far.conn.Close()
				synctest.Wait()
			}
			ups := newPace().ups
			if took := time.Since(began); took < time.Duration(flaps-ups.Burst-1)*ups.Every {
				t.Errorf("%d times up after %v", flaps, took)
			}
		})
	}
}

// A router with the least hold time hears of us within it, also while a session that has flapped waits to come up.
func TestSessionThatFlapsStaysWithTheLeastHoldTime(t *testing.T) {
	inBubble(t, "3 s", func(t *testing.T, p *fakePeer, a *Actor) {
		p.refuseDials()
		set(a, external(func(d *plan.BGPSession) { d.ConnectTime = time.Hour }))
		synctest.Wait()
		open := routerOpen()
		open.hold = 3
		for range newPace().ups.Burst - 1 {
			far := p.calls(a)
			far.handshakes(open)
			synctest.Wait()
			far.conn.Close()
			synctest.Wait()
		}
		far := p.calls(a)
		far.handshakes(open)
		synctest.Wait()
		if s := status(a); s.State == Established {
			t.Error("it does not wait: the test shows nothing")
		}
		for range 3 {
			heard := time.Now()
			far.want(bgp.BGP_MSG_KEEPALIVE)
			if silence := time.Since(heard); silence >= 3*time.Second {
				t.Errorf("nothing heard for %v", silence)
			}
			far.write(keepalive())
		}
		if s := status(a); s.State != Established {
			t.Errorf("%+v", s)
		}
		far.conn.Close()
	})
}

func (o peerOpen) hasGracefulRestart() bool {
	return len(o.capabilities) > len(routerOpen().capabilities)
}

// Connections of a router that it does not close are few.
func TestConnectionsOfAPeerAreBounded(t *testing.T) {
	inBubble(t, "that wait for the end", func(t *testing.T, p *fakePeer, a *Actor) {
		p.refuseDials()
		set(a, external(nil))
		synctest.Wait()
		var open int
		var all []net.Conn
		for range 100 {
			far := p.calls(a).conn
			all = append(all, far)
			synctest.Wait()
		}
		for _, far := range all {
			far.SetReadDeadline(time.Now())
			if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				open++
			}
		}
		if open != maxConnections {
			t.Errorf("%d connections are open, want %d", open, maxConnections)
		}
		time.Sleep(time.Minute)
		far := p.calls(a)
		far.handshakes(routerOpen())
		synctest.Wait()
		if s := status(a); s.State != Established {
			t.Errorf("the next one: %+v", s)
		}
		far.conn.Close()
	})
}

// A router that goes on sending, but reads nothing, has a small session end though the kernel's buffer has room for
// all of it.
func TestPeerThatDoesNotRead(t *testing.T) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		conn.(*net.TCPConn).SetReadBuffer(2048)
		r := &reader{from: conn}
		if _, err := r.next(); err != nil {
			return
		}
		o := routerOpen()
		o.hold = 3
		conn.Write(append(o.serialize(), keepalive()...))
		for {
			time.Sleep(time.Second)
			if _, err := conn.Write(keepalive()); err != nil {
				return
			}
		}
	}()
	a := New(Options{Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	defer func() { stop(); <-done }()
	set(a, external(func(d *plan.BGPSession) {
		d.Addr, d.Port = netip.MustParseAddr("127.0.0.1"), uint16(listener.Addr().(*net.TCPAddr).Port)
		d.Routes, d.ConnectTime = vips(30000, false), time.Hour
	}))
	eventually(t, a, "the session", func(s Status) bool { return s.Flaps > 0 || s.State == Established })
	// The kernel looks at the time when it probes the router, which it does less and less often.
	routertest.Eventually(t, "the end", 2*time.Minute, func() error {
		if s := status(a); s.Flaps != 1 || !strings.HasSuffix(s.LastError, "the peer has not taken what was sent for 3s") {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
}

// endless is where a flood comes from; it ends after so many.
type endless struct {
	left    int
	message []byte
}

func (e *endless) next() error {
	if e.left--; e.left < 0 {
		return os.ErrDeadlineExceeded
	}
	return nil
}

func (e *endless) ReadRaw(b []byte) (int, *ipv6.ControlMessage, netip.Addr, error) {
	return copy(b, e.message), &ipv6.ControlMessage{HopLimit: ndp.HopLimit}, netip.MustParseAddr("fe80::2"), e.next()
}

func (e *endless) Accept() (net.Conn, error) { near, _ := net.Pipe(); return near, e.next() }
func (e *endless) Close() error              { return nil }
func (e *endless) Addr() net.Addr            { return nil }

// Floods of router advertisements and of connections are heeded at their pace.
func TestFloodsOfStrangersHaveAPace(t *testing.T) {
	const many = 10_000
	for name, flood := range map[string]func(e *endless){
		"router advertisements": func(e *endless) {
			e.message = append([]byte{134}, make([]byte, 39)...)
			found := 0
			listen(e, netip.Addr{}, "eth0", nil, func(netip.Addr) { found++ })
			if found != many {
				t.Errorf("%d of them count", found)
			}
		},
		"what is no message": func(e *endless) {
			e.message = []byte{134, 0, 0, 0}
			listen(e, netip.Addr{}, "eth0", nil, func(netip.Addr) { t.Error("it counts") })
		},
		"connections": func(e *endless) {
			accepted := make(chan net.Conn, many)
			accept(context.Background(), e, accepted)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				flood(&endless{left: many})
				if took := time.Since(began); took < 9*time.Second || took > 11*time.Second {
					t.Errorf("%d of them after %v", many, took)
				}
			})
		})
	}
}
