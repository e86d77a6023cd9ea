package bgp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

const (
	// openTime is how long the peer's OPEN may take (RFC 4271 section 8.2.2 suggests 4 minutes; a
	// router that takes half a minute is stuck, and a new connection is the better hope).
	openTime = 30 * time.Second
	// writeTime is how long a write may take when there is no hold time (RFC 9687 has a Send Hold
	// Timer for the like).
	writeTime = 90 * time.Second
	// goodbyeTime is how long a peer may take to read our last message and close.
	goodbyeTime = time.Second
	// writeSize is about how many bytes are given to the kernel at once.
	writeSize = 64 << 10
)

// errClosed says little: what the peer said before it closed, perhaps over a connection before,
// says more.
var errClosed = errors.New("the peer closed the connection")

// connection is one TCP connection and the session on it.
type connection struct {
	s           *session
	conn        net.Conn
	d           plan.BGPSession // as the connection was made for
	from        reader
	local, peer netip.AddrPort
	n           Negotiated
	endOfRIB    bool // the peer wants to know when it has heard all
	refresh     wishes
	closing     atomic.Bool   // what is still received is of no interest
	received    chan struct{} // closed when receive has returned; nil before it is started
	failed      chan error    // what receive has returned
	broken      bool          // a write has failed, perhaps within a message, or nobody is there to read
	accepting   bool          // routes of the peer are kept

	incoming   bool                    // the peer has opened it
	restarting bool                    // no session was established yet since the speaker started
	cancel     context.CancelCauseFunc // ends it, with errCollision or errReplaced
	asks       chan<- *connection      // takes it when it asks for leave to go on to its next state
	leave      chan struct{}           // gives leave
}

func newConnection(s *session, conn net.Conn, d plan.BGPSession) *connection {
	return &connection{
		s: s, conn: conn, d: d, from: reader{from: bufio.NewReaderSize(pacedReader{conn, &s.pace}, readSize)},
		refresh: newWishes(), failed: make(chan error, 1),
		accepting: d.AcceptRoutes,
		leave:     make(chan struct{}, 1),
		local:     addrPort(conn.LocalAddr()), peer: addrPort(conn.RemoteAddr()),
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	if tcp, ok := a.(*net.TCPAddr); ok {
		ap := tcp.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.AddrPort{}
}

// run has the session from the handshake to the goodbye. It returns how long it was established,
// and why it ended.
func (c *connection) run(ctx context.Context) (up time.Duration, err error) {
	interrupted := make(chan struct{})
	unlink := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = c.conn.SetReadDeadline(time.Unix(1, 0))
		_ = c.conn.SetWriteDeadline(time.Now().Add(goodbyeTime))
	})
	err = c.handshake(ctx)
	if err == nil {
		err = c.ask(ctx)
	}
	if err == nil {
		err = c.rest(ctx)
	}
	if err == nil {
		began := time.Now()
		c.s.established(c)
		err = c.serve(ctx)
		up = max(time.Since(began), 1)
		err = c.better(err)
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if !unlink() {
		<-interrupted // its deadlines are not for the goodbye
	}
	c.broken = c.broken || errors.Is(err, errReplaced)
	c.goodbye(c.lastWord(err))
	return up, err
}

// ask waits for leave to go on.
func (c *connection) ask(ctx context.Context) error {
	select {
	case c.asks <- c:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case <-c.leave:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// handshake exchanges OPEN messages and their confirmations.
func (c *connection) handshake(ctx context.Context) error {
	v6 := c.local.Addr().Is6()
	if err := c.write(open(c.d, c.s.opts.Hostname, c.restarting, v6)); err != nil {
		return err
	}
	m, err := c.expect(ctx, bgp.BGP_MSG_OPEN, openTime, subUnexpectedOpenSent)
	if err != nil {
		return err
	}
	n, refusal := negotiate(c.d, m.body, v6)
	if refusal != nil {
		return refusal
	}
	c.n, c.n.Local, c.n.Peer, c.n.Incoming = n, c.local, c.peer, c.incoming
	c.endOfRIB = n.GracefulRestart
	if err := patience(c.conn, n.HoldTime); err != nil {
		return err
	}
	if err := c.ask(ctx); err != nil {
		return err
	}
	if err := c.write(keepalive()); err != nil {
		return err
	}
	_, err = c.expect(ctx, bgp.BGP_MSG_KEEPALIVE, n.HoldTime, subUnexpectedConfirm)
	return err
}

// expect reads one message, which must be of that kind.
func (c *connection) expect(ctx context.Context, kind uint8, limit time.Duration, unexpected uint8) (message, error) {
	c.deadline(limit)
	if ctx.Err() != nil { // its end may have come before the deadline was set
		return message{}, context.Cause(ctx)
	}
	m, err := c.next()
	switch {
	case err != nil:
		return message{}, err
	case m.kind == bgp.BGP_MSG_NOTIFICATION:
		return message{}, received(m.body)
	case m.kind != kind:
		return message{},
			fault(bgp.BGP_ERROR_FSM_ERROR, unexpected, []byte{m.kind}, "the peer sends a message of type %d", m.kind)
	}
	return m, nil
}

// deadline limits how long the next message may take; 0 does not.
func (c *connection) deadline(limit time.Duration) {
	var at time.Time
	if limit > 0 {
		at = time.Now().Add(limit)
	}
	_ = c.conn.SetReadDeadline(at)
}

// next reads a message. Silence for longer than the deadline is the end of the hold time.
func (c *connection) next() (message, error) {
	m, err := c.from.next()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return m, fault(bgp.BGP_ERROR_HOLD_TIMER_EXPIRED, 0, nil, "nothing heard for the hold time")
	}
	if errors.Is(err, syscall.ETIMEDOUT) {
		return m, notTaken(c.n.HoldTime)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
		return m, errClosed
	}
	err = plain(err)
	if err == nil {
		c.s.count(func(n *Counters) {
			n.MessagesIn++
			n.BytesIn += uint64(headerLength + len(m.body))
		})
	}
	return m, err
}

// serve keeps an established session until it fails or ctx ends.
func (c *connection) serve(ctx context.Context) error {
	c.received = make(chan struct{})
	go func() {
		defer close(c.received)
		c.failed <- c.receive()
	}()
	var alive *time.Ticker
	var tick <-chan time.Time
	if c.n.KeepaliveTime > 0 {
		alive = time.NewTicker(c.n.KeepaliveTime)
		defer alive.Stop()
		tick = alive.C
	}
	preparing := c.s.opts.Prepare()
	first := true
	refresh, rested := c.refresh, (<-chan time.Time)(nil)
	again := func(family lb.Family) {
		c.s.forget(family)
		if wait := c.s.pace.took(&c.s.pace.refreshes); wait > 0 {
			refresh, rested = nil, time.After(wait)
		}
	}
	for {
		d := c.s.want()
		if t := keepaliveTime(d, c.n.HoldTime); alive != nil && t != c.n.KeepaliveTime {
			alive.Reset(t)
			c.n.KeepaliveTime = t
			c.s.renegotiated(c.n)
		}
		if err := c.accept(d.AcceptRoutes); err != nil {
			return err
		}
		if preparing == nil {
			if err := c.announce(first); err != nil {
				return err
			}
			first = false
		}
		select {
		case <-preparing:
			preparing = nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-c.failed:
			return err
		case <-tick:
			if err := c.write(keepalive()); err != nil {
				return err
			}
		case <-c.s.routes:
		case <-refresh[lb.IPv4]:
			again(lb.IPv4)
		case <-refresh[lb.IPv6]:
			again(lb.IPv6)
		case <-rested:
			refresh, rested = c.refresh, nil
		}
	}
}

// announce makes the peer hear what it shall. The first time, it says then that this was all.
func (c *connection) announce(first bool) error {
	if err := c.flush(); err != nil || !first || !c.endOfRIB {
		return err
	}
	return c.endOfRIBs()
}

// flush makes the peer hear what it shall.
func (c *connection) flush() error {
	d, version := c.s.wantVersion()
	e := encoding{
		internal: d.Internal(c.n.PeerASN), localASN: d.LocalASN, fourOctets: c.n.FourOctetASN, nextHops: nextHops(d, c.n),
	}
	end := c.s.opts.pulses.Begin()
	out := e.outgoing(c.s.heard, d.Routes)
	end()
	var batch []byte
	for i, m := range out.messages {
		batch = append(batch, m...)
		if len(batch) >= writeSize || i == len(out.messages)-1 {
			if err := c.write(batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	c.s.flushed(out, version, c.refusals(d, out.held))
	return nil
}

// plain leaves addresses out of an error: their ports differ each time, and the peer is known.
func plain(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return fmt.Errorf("%s: %w", op.Op, op.Err)
	}
	return err
}

func (c *connection) endOfRIBs() error {
	var all []byte
	for _, f := range c.n.Families {
		all = append(all, endOfRIB(f)...)
	}
	return c.write(all)
}

// write sends whole messages.
func (c *connection) write(b []byte) error {
	limit := c.n.HoldTime
	if limit == 0 {
		limit = writeTime
	}
	_ = c.conn.SetWriteDeadline(time.Now().Add(limit))
	if _, err := c.conn.Write(b); err != nil {
		c.broken = true
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, syscall.ETIMEDOUT) {
			return notTaken(limit)
		}
		return plain(err)
	}
	messages, updates := countMessages(b)
	c.s.count(func(n *Counters) {
		n.MessagesOut += messages
		n.UpdatesOut += updates
		n.BytesOut += uint64(len(b))
	})
	return nil
}

// better waits a moment for what the peer has said, where a write has failed only because the peer
// has closed the connection.
func (c *connection) better(err error) error {
	var f *protocolError
	if !c.broken || errors.As(err, &f) {
		return err
	}
	select {
	case said := <-c.failed:
		if said != nil {
			return said
		}
	case <-time.After(goodbyeTime):
	}
	return err
}

// lastWord returns what the peer shall be told of the end, or nil when it has said so itself or
// shall keep our routes.
func (c *connection) lastWord(err error) *notification {
	var f *protocolError
	var change *changeError
	switch {
	case errors.As(err, &f):
		return &f.notification
	case errors.Is(err, errDeconfigured):
		return &notification{code: bgp.BGP_ERROR_CEASE, subcode: subPeerDeconfigured}
	case errors.Is(err, errBFDDown):
		return &notification{code: bgp.BGP_ERROR_CEASE, subcode: subBFDDown}
	case errors.Is(err, errStopping) && !c.n.GracefulRestart:
		return &notification{code: bgp.BGP_ERROR_CEASE, subcode: subAdministrativeStop,
			data: shutdownText("the speaker on this node is stopping")}
	case errors.As(err, &change) && (change.foreign || !c.n.GracefulRestart):
		return &notification{code: bgp.BGP_ERROR_CEASE, subcode: subConfigurationChange}
	}
	return nil
}

// goodbye closes the connection, after a last message if there is one. The peer gets time to read
// it and to close its own side: a connection that is closed while it holds unread data is reset,
// and the word would be lost. Without a word, to a peer that keeps our routes, it has noticed by
// then: one that hears of our end by BFD first drops them.
func (c *connection) goodbye(n *notification) {
	c.closing.Store(true)
	if established := c.received != nil; !c.broken && (n != nil || established) {
		_ = c.conn.SetWriteDeadline(time.Now().Add(goodbyeTime))
		var err error
		if n != nil {
			_, err = c.conn.Write(n.serialize())
		}
		if half, ok := c.conn.(interface{ CloseWrite() error }); ok && err == nil && half.CloseWrite() == nil {
			_ = c.conn.SetReadDeadline(time.Unix(1, 0)) // receive is to end, and this to read on
			c.wait()
			_ = c.conn.SetReadDeadline(time.Now().Add(goodbyeTime))
			io.Copy(io.Discard, c.from.from) //nolint:errcheck // how the peer goes does not matter any more
		}
	}
	c.conn.Close()
	c.wait()
}

func (c *connection) wait() {
	if c.received != nil {
		<-c.received
	}
}
