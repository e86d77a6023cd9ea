package bgp

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// pipe is one end of a connection in memory that says it is TCP.
type pipe struct {
	net.Conn
	local, remote net.Addr
}

func (p pipe) LocalAddr() net.Addr  { return p.local }
func (p pipe) RemoteAddr() net.Addr { return p.remote }

// deaf is one whose far end has gone without a word, as in a power failure: what is sent is lost,
// and no end ever comes.
type deaf struct{ pipe }

func (deaf) CloseWrite() error { return nil }

// fakePeer is the far end of sessions: the test plays the router.
type fakePeer struct {
	t     *testing.T
	conns chan net.Conn // connections that the actor has opened
	dials chan error    // what dialing answers; a nil error connects. None: it connects.
	conn  net.Conn
	deaf  bool // the connections that the actor opens are

	mu    sync.Mutex
	asked []Target
}

func newFakePeer(t *testing.T) *fakePeer {
	return &fakePeer{t: t, conns: make(chan net.Conn, 1), dials: make(chan error, 10)}
}

func (p *fakePeer) dial(ctx context.Context, target Target) (net.Conn, error) {
	p.mu.Lock()
	p.asked = append(p.asked, target)
	p.mu.Unlock()
	select {
	case err := <-p.dials:
		if err != nil {
			return nil, err
		}
	default:
	}
	near, far := net.Pipe()
	addr := func(s string) net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }
	local := "10.0.0.1:40000"
	if target.Peer.Addr().Is6() {
		local = "[fd00::1]:40000"
	}
	select {
	case p.conns <- far:
		conn := pipe{near, addr(local), net.TCPAddrFromAddrPort(target.Peer)}
		if p.deaf {
			return deaf{conn}, nil
		}
		return conn, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// targets are those that the actor has dialed.
func (p *fakePeer) targets() []Target {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

// start runs an actor against the fake peer; stop ends it.
func (p *fakePeer) start() (a *Actor, stop func()) {
	a = New(Options{Log: slog.New(slog.DiscardHandler), Dial: p.dial})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	return a, func() {
		cancel()
		if err := <-done; err != nil {
			p.t.Errorf("Run: %v", err)
		}
	}
}

// calls opens a connection to the actor, from the router's own address. It returns the router's
// end, as a peer of its own.
func (p *fakePeer) calls(a *Actor) *fakePeer {
	p.t.Helper()
	far, taken := p.callsFrom(a, "10.0.0.2:50000", "10.0.0.1:179")
	if !taken {
		p.t.Fatal("the connection is not taken")
	}
	return &fakePeer{t: p.t, conn: far}
}

func (p *fakePeer) callsFrom(a *Actor, from, to string) (far net.Conn, taken bool) {
	near, far := net.Pipe()
	addr := func(s string) net.Addr { return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s)) }
	return far, a.offer(pipe{near, addr(to), addr(from)})
}

// accept takes the next connection of the actor.
func (p *fakePeer) accept() {
	p.t.Helper()
	select {
	case p.conn = <-p.conns:
	case <-time.After(time.Minute):
		p.t.Fatal("no connection")
	}
}

// read returns the next message, and closed if there is none any more.
func (p *fakePeer) read() (kind uint8, body []byte, closed bool) {
	p.t.Helper()
	header := make([]byte, headerLength)
	p.conn.SetReadDeadline(time.Now().Add(10 * time.Minute))
	if _, err := io.ReadFull(p.conn, header); err != nil {
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
			p.t.Fatalf("read: %v", err)
		}
		return 0, nil, true
	}
	length := binary.BigEndian.Uint16(header[markerLength:])
	if length > maxMessage {
		p.t.Fatalf("a message of %d bytes", length)
	}
	body = make([]byte, length-headerLength)
	if _, err := io.ReadFull(p.conn, body); err != nil {
		p.t.Fatal(err)
	}
	return header[headerLength-1], body, false
}

// want reads a message of that kind.
func (p *fakePeer) want(kind uint8) []byte {
	p.t.Helper()
	got, body, closed := p.read()
	if closed || got != kind {
		p.t.Fatalf("message of type %d (closed %v, %x), want type %d", got, closed, body, kind)
	}
	return body
}

// wantNotification reads a NOTIFICATION, and then the end of the connection.
func (p *fakePeer) wantNotification(code, subcode uint8) {
	p.t.Helper()
	for {
		kind, body, closed := p.read()
		switch {
		case closed:
			p.t.Fatalf("closed without NOTIFICATION %d/%d", code, subcode)
		case kind == bgp.BGP_MSG_KEEPALIVE:
			continue
		case kind != bgp.BGP_MSG_NOTIFICATION || body[0] != code || body[1] != subcode:
			p.t.Fatalf("message %d %x, want NOTIFICATION %d/%d", kind, body, code, subcode)
		}
		p.wantClosed()
		return
	}
}

func (p *fakePeer) wantClosed() {
	p.t.Helper()
	if kind, body, closed := p.read(); !closed {
		p.t.Fatalf("message %d %x, want the end", kind, body)
	}
}

func (p *fakePeer) write(b []byte) {
	p.t.Helper()
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatalf("write: %v", err)
	}
}

func frame(kind uint8, body []byte) []byte {
	b := make([]byte, headerLength, headerLength+len(body))
	for i := range markerLength {
		b[i] = 0xff
	}
	binary.BigEndian.PutUint16(b[markerLength:], uint16(headerLength+len(body)))
	b[headerLength-1] = kind
	return append(b, body...)
}

// peerOpen is the router's OPEN.
type peerOpen struct {
	version      uint8
	asn          uint32
	hold         uint16
	id           string
	capabilities []bgp.ParameterCapabilityInterface
}

func routerOpen() peerOpen {
	return peerOpen{4, 64501, 9, "10.0.0.2", []bgp.ParameterCapabilityInterface{
		bgp.NewCapMultiProtocol(bgp.RF_IPv4_UC), bgp.NewCapFourOctetASNumber(64501), bgp.NewCapRouteRefresh(),
	}}
}

func (o peerOpen) serialize() []byte {
	m := bgp.NewBGPOpenMessage(twoOctets(o.asn), o.hold, o.id,
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(o.capabilities)})
	m.Body.(*bgp.BGPOpen).Version = o.version
	return update(m)
}

// establish plays the router's part of the handshake on the next connection and returns the actor's
// OPEN.
func (p *fakePeer) establish(o peerOpen) []byte {
	p.t.Helper()
	p.accept()
	open := p.want(bgp.BGP_MSG_OPEN)
	p.write(o.serialize())
	p.want(bgp.BGP_MSG_KEEPALIVE)
	p.write(keepalive())
	return open
}

// inBubble runs a test in time that passes only when nobody has anything to do.
func inBubble(t *testing.T, name string, f func(t *testing.T, p *fakePeer, a *Actor)) {
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newFakePeer(t)
			a, stop := p.start()
			defer func() {
				if p.conn != nil {
					p.conn.Close()
				}
				stop()
			}()
			f(t, p, a)
		})
	})
}

func status(a *Actor) Status { return a.Statuses()["tor"] }

var _ = lb.IPv4
