package bgp

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// attempt is one try to have the session: over the connection that we open, or over one that the
// peer opens meanwhile. The session's goroutine owns it. Each connection has a goroutine of its
// own, which asks for leave to enter OpenConfirm and Established.
type attempt struct {
	s      *session
	d      plan.BGPSession
	target Target
	// states are those of the connections that have not ended; Idle for one that was told to.
	states map[*connection]State
	// current has the leave to be the session. next is to take its place when it has ended.
	current, next *connection
	stopDialing   context.CancelFunc
	asked         chan *connection
	ended         chan ending
	up            time.Duration // how long the last one was established
	err           error         // why the last one ended
}

// ending says how a connection ended.
type ending struct {
	c   *connection
	up  time.Duration
	err error
}

// dialed is the result of our attempt to connect.
type dialed struct {
	conn net.Conn
	err  error
}

// What ends a connection in favour of another one, as the cause of its context. A peer that opens a
// connection although it was to keep our routes over a restart has forgotten the old one (RFC 4724
// section 5): there is no peer to tell.
var (
	errCollision error = fault(bgp.BGP_ERROR_CEASE, subCollision, nil, "another connection with the peer is the session")
	errReplaced        = errors.New("the peer has opened a new connection, as after a restart")
)

// maxConnections bounds those of one session, most of which are saying goodbye.
const maxConnections = 8

func newAttempt(s *session, d plan.BGPSession, target Target) *attempt {
	return &attempt{
		s: s, d: d, target: target, states: map[*connection]State{}, asked: make(chan *connection), ended: make(chan ending),
	}
}

// run goes on until all connections have ended. It begins with the one that the peer has opened, or
// else opens one.
func (a *attempt) run(ctx context.Context, incoming net.Conn) (up time.Duration, err error) {
	dialing, stop := context.WithCancel(ctx)
	defer stop()
	a.stopDialing = stop
	var opened chan dialed
	if incoming == nil || !a.arrived(ctx, incoming) {
		opened = make(chan dialed, 1)
		go func() {
			conn, err := a.s.opts.Dial(dialing, a.target)
			opened <- dialed{conn, err}
		}()
	}
	for opened != nil || len(a.states) > 0 {
		a.show()
		select {
		case d := <-opened:
			opened = nil
			a.connected(ctx, d)
		case conn := <-a.s.incoming:
			a.arrived(ctx, conn)
		case c := <-a.asked:
			switch a.states[c] {
			case OpenSent:
				a.opened(c)
			case OpenConfirm:
				a.confirmed(c)
			}
		case e := <-a.ended:
			a.gone(e)
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		a.err = cause
	}
	if a.s.state() != Idle {
		a.s.failed(reasonOf(a.err), a.err)
	}
	return a.up, a.err
}

// show records the furthest state of the connections while none is established.
func (a *attempt) show() {
	furthest := Idle
	for _, state := range a.states {
		if state == OpenConfirm || state == OpenSent && furthest == Idle {
			furthest = state
		}
	}
	if a.current == nil && furthest != Idle {
		a.s.enter(furthest)
	}
}

// connected takes the connection that we have opened, or the reason why there is none.
func (a *attempt) connected(ctx context.Context, d dialed) {
	switch {
	case d.err == nil && (a.current != nil || a.next != nil):
		d.conn.Close()
	case d.err == nil:
		a.begin(ctx, d.conn, false)
	case a.err == nil: // what was heard over a connection says more
		a.err = d.err
	}
}

// arrived takes a connection that the peer has opened, if it is good for anything.
func (a *attempt) arrived(ctx context.Context, conn net.Conn) bool {
	err := context.Cause(ctx)
	if err == nil && len(a.states) >= maxConnections {
		err = errors.New("others of the peer are still to end")
	}
	if err == nil && !a.target.admits(conn) {
		err = errors.New("it is not between the addresses of the session")
	}
	if err == nil {
		err = a.target.adopt(conn)
	}
	if err != nil {
		a.s.log.Debug("a connection of the peer was closed", "from", conn.RemoteAddr(), "error", err)
		conn.Close()
		return false
	}
	for c, state := range a.states {
		if c.incoming && state != Established {
			a.drop(c, errCollision) // the peer has given it up; and so there are never many
		}
	}
	a.begin(ctx, conn, true)
	return true
}

func (a *attempt) begin(ctx context.Context, conn net.Conn, incoming bool) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := newConnection(a.s, conn, a.d)
	c.incoming, c.restarting, c.cancel, c.asks = incoming, !a.s.restarted, cancel, a.asked
	if len(a.states) == 0 {
		a.s.meets(c.local.Addr())
	}
	a.states[c] = OpenSent
	go func() {
		up, err := c.run(ctx)
		cancel(nil)
		a.ended <- ending{c, up, err}
	}()
}

// drop ends a connection. It is of no account from now on, though it may take a moment to say
// goodbye.
func (a *attempt) drop(c *connection, cause error) {
	a.states[c] = Idle
	c.cancel(cause)
}

// opened lets a connection go on whose peer has sent its OPEN message, or ends it in favour of
// another one (RFC 4271 section 6.8). An established session without graceful restart stays. With
// it, the new connection must first come as far (RFC 4724 section 5).
func (a *attempt) opened(c *connection) {
	if a.current != nil && !a.current.n.GracefulRestart {
		a.drop(c, errCollision)
		return
	}
	for o, state := range a.states {
		switch {
		case state != OpenConfirm:
		case c.incoming == oursSurvives(a.d.RouterID, c.n.PeerID, a.d.LocalASN, c.n.PeerASN):
			a.drop(c, errCollision)
			return
		default:
			a.drop(o, errCollision)
		}
	}
	a.states[c] = OpenConfirm
	c.leave <- struct{}{}
}

// oursSurvives tells which of two connections survives a collision, by the identifiers and AS
// numbers of both ends: the one that we have opened, or the peer's. It is that of the greater
// identifier, or AS number where these are equal (RFC 6286 section 2.3).
func oursSurvives(own, peer netip.Addr, ownASN, peerASN uint32) bool {
	if own == peer {
		return ownASN > peerASN
	}
	return peer.Less(own)
}

// confirmed makes a connection the session and ends all others.
func (a *attempt) confirmed(c *connection) {
	a.stopDialing()
	for o := range a.states {
		switch o {
		case c:
		case a.current:
			a.drop(o, errReplaced)
		default:
			a.drop(o, errCollision)
		}
	}
	a.next = c
	a.grant()
}

// grant lets the next connection be the session once there is no other.
func (a *attempt) grant() {
	if a.next == nil || a.current != nil {
		return
	}
	a.current, a.next = a.next, nil
	a.states[a.current] = Established
	a.s.restarted = true
	a.current.leave <- struct{}{}
}

// gone takes the end of a connection.
func (a *attempt) gone(e ending) {
	delete(a.states, e.c)
	if a.err == nil || !errors.Is(e.err, errCollision) {
		a.err = e.err
	}
	if e.up > 0 {
		a.up = e.up
		a.s.lost(e.err)
	}
	switch e.c {
	case a.next:
		a.next = nil
	case a.current:
		a.current = nil
		a.grant()
	}
}
