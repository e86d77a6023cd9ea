package relay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// knownWithin is how long a successor waits for the proxy's word on what is relayed before it takes over. Without
// that word it would have to reset new connections, so it takes none of the sockets that accept them: the proxy may
// be of another release, and know the predecessor alone. While the proxy tells of many Services, the successor waits
// for up to toldWithin: it can remember no client of a Service that it does not know. The predecessor waits a little
// longer, for knownWithin and stepWithin. Both are longer in tests, whose machines are busy.
var knownWithin, toldWithin = 5 * time.Second, 9 * time.Second

const (
	// knownFor is how long ago a successor has told the proxy its ports when it takes the proxy to know it.
	knownFor = 2 * wire.Beat
	// lookEvery is how often it looks whether that is so, and whether a predecessor's port is free.
	lookEvery = 20 * time.Millisecond
)

// succession says how far a relay has taken over from its predecessor, and how far its successor from it.
type succession struct {
	// predecessor has agreed to hand over; nil if there is none.
	predecessor *courier
	alone       time.Time     // from when on another process that has the port is taken for none
	settled     chan struct{} // closed once the relay has what the predecessor could hand over
	settleOnce  sync.Once
	said        atomic.Int64 // when the proxy was first told the ports, in nanoseconds of Unix time

	succeeded, orphaned chan struct{} // closed once a successor accepts connections, and once that has ended
}

func newSuccession() succession {
	return succession{settled: make(chan struct{}), succeeded: make(chan struct{}), orphaned: make(chan struct{})}
}

// Settled returns why the relay is not the only one that accepts connections; nil if it is.
func (r *Relay) Settled() error {
	if !isClosed(r.settled) {
		return errors.New("it takes over from its predecessor")
	}
	return nil
}

func (r *Relay) settle() { r.settleOnce.Do(func() { close(r.settled) }) }

func (r *Relay) saidPorts() { r.said.CompareAndSwap(0, r.deps.Now().UnixNano()) }

// ErrNoPredecessor is the error of a relay whose port another process has, which does not hand it over. It may do so in
// a moment: a relay that has just taken over serves successors once it has all, and its own predecessor lets it. One
// that is slow, or has just dropped another successor, answers the next time.
var ErrNoPredecessor = errors.New("another process has the port, and does not hand it over yet")

// HandOverWithin is how long that takes at most, unless a relay hangs.
const HandOverWithin = 30 * time.Second

// mayFollow reports whether another process that has the relay's port of a family may be a predecessor.
func (r *Relay) mayFollow() bool { return r.options.HandOver != "" && r.deps.Now().Before(r.alone) }

// findPredecessor returns the relay that is there and agrees to hand over before ctx ends; nil if there is none. The
// error is why it does not.
func (r *Relay) findPredecessor(ctx context.Context) (*courier, error) {
	if r.options.HandOver == "" {
		return nil, nil
	}
	p, err := meet(r.options.HandOver)
	if p == nil || err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, p.closeRead)()
	answer := letter{}
	if err = p.send(letter{Version: successionVersion}); err == nil {
		answer, _, err = p.receive(stepWithin)
	}
	switch {
	case err != nil:
	case answer.Refused != "":
		err = fmt.Errorf("%w: %s", errOtherVersion, answer.Refused) // there is no other reason
	case answer.Version != successionVersion:
		err = otherVersion(answer.Version)
	default:
		return p, nil
	}
	p.close()
	return nil, err
}

// errNoUDP is why there is no socket of UDP until the port could be opened.
var errNoUDP = errors.New("the relay before had no port of UDP")

// errOtherVersion is the error of a predecessor that will never hand over.
var errOtherVersion = errors.New("it does not understand this relay")

func otherVersion(version int) error {
	return fmt.Errorf("%w: %s", errOtherVersion, versions(version))
}

// versions tells a relay of a version, and is what it is told, why nothing is handed over.
func versions(other int) string {
	return fmt.Sprintf("it hands over by version %d, and this relay by version %d", other, successionVersion)
}

// takeOver takes what the predecessor has, until that has ended or ctx does. Whatever fails, the relay asks again for
// the connections: if it were ready, the predecessor would end with them. It asks again for the sockets while it has
// none, and opens its own port as soon as that is free if the predecessor keeps them. If no
// relay is left that it could ask, it has all that there is.
func (c *crew) takeOver(ctx context.Context) {
	defer c.settle()
	for began := c.deps.Now(); c.mayHear(c.deps.Now().Sub(began)) && wait(ctx, lookEvery); {
	}
	err := c.takeFrom(ctx, c.predecessor)
	for err != nil && c.mayFollow() && wait(ctx, reopenEvery) {
		p, refused := c.findPredecessor(ctx)
		if errors.Is(refused, errOtherVersion) {
			break
		}
		if p != nil {
			c.predecessor = p
			err = c.takeFrom(ctx, p)
		} else if refused == nil && c.nobodyServes() {
			break // it has died, with the connections that it had
		}
	}
	c.openOwn(ctx)
}

// mayHear reports whether a successor that has waited for so long goes on waiting for what is relayed.
func (r *Relay) mayHear(waited time.Duration) bool {
	return r.Ready() != nil && (waited < knownWithin || r.telling.Load() && waited < toldWithin)
}

// openOwn opens the relay's ports, unless it has them.
func (c *crew) openOwn(ctx context.Context) {
	if !c.hasPorts {
		c.hasPorts = true
		c.inherit.Go(func() { c.openPorts(ctx) })
	}
}

// nobodyServes reports whether no relay of the node serves successors.
func (r *Relay) nobodyServes() bool {
	lock, err := lockAt(r.options.HandOver)
	if err == nil {
		lock.Close()
	}
	return err == nil
}

// takeFrom takes what a predecessor has, until that has ended or ctx does, with the sockets that listen unless it has
// got these before, or opens its own. The error is why it did not get all that there was; the predecessor goes on with
// the rest.
func (c *crew) takeFrom(ctx context.Context, p *courier) error {
	stop := context.AfterFunc(ctx, p.closeRead)
	defer stop()
	listeners, err := c.takeSockets(p, !c.hasPorts && c.Ready() == nil)
	switch {
	case len(listeners) > 0:
		c.hasPorts = true
		c.sockets.set(listeners)
		c.begin()
	case err == nil: // the predecessor keeps them
		c.openOwn(ctx)
	}
	taken := 0
	for within := stepWithin; err == nil; {
		var l letter
		var fds []int
		if l, fds, err = p.receive(within); err != nil {
			break
		}
		c.table.rememberHanded(l.Clients)
		if len(l.Connections) > 0 {
			if err = c.takeConnections(p, l.Connections, fds); err == nil {
				taken += len(l.Connections)
			}
		}
		if l.Swept {
			within = 0
			c.settle()
			c.inherit.Go(func() { c.sayReady(ctx, p) })
		}
	}
	if ctx.Err() == nil {
		p.close()
	}
	if !isClosed(c.settled) {
		c.deps.Log.Warn("cannot take over from the relay that is there", "connections", taken, "error", err)
		return err
	}
	c.deps.Log.Info("took over from the relay before", "connections", taken, "end", err)
	return nil
}

// wait waits, and reports whether ctx goes on.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// sayReady tells the predecessor once the proxy knows this relay.
func (c *crew) sayReady(ctx context.Context, p *courier) {
	for {
		if at := c.said.Load(); c.Ready() == nil && at != 0 && c.deps.Now().Sub(time.Unix(0, at)).Abs() >= knownFor {
			_ = p.send(letter{Ready: true})
			return
		}
		if !wait(ctx, lookEvery) {
			return
		}
	}
}

// openPorts opens the relay's ports once no other process has them.
func (c *crew) openPorts(ctx context.Context) {
	failures := loop.Failures{Repeat: time.Hour}
	for {
		err := c.listen()
		failures.Log(c.deps.Log, "cannot open the relay's port; trying again", "opened the relay's port", err)
		if err == nil {
			c.begin()
			return
		}
		if !wait(ctx, reopenEvery) {
			return
		}
	}
}

// takeSockets takes the sockets that listen, if the proxy knows this relay; none if the predecessor keeps them. Before
// them come the clients that session affinity remembers, so that they have their backends from the first connection on.
func (c *crew) takeSockets(p *courier, known bool) (listeners []listener, err error) {
	begin := letter{Begin: true, Port: c.options.Port, NoSockets: !known, WantsClients: c.Ready() == nil}
	if err := p.send(begin); err != nil {
		return nil, err
	}
	l, fds, err := p.receive(stepWithin)
	for err == nil && len(l.Clients) > 0 {
		c.table.rememberHanded(l.Clients)
		l, fds, err = p.receive(stepWithin)
	}
	if err != nil || len(l.Sockets) == 0 {
		closeAll(fds)
		return nil, err
	}
	conns, err := connsOf(fds)
	if err != nil {
		return nil, err
	}
	for i, s := range l.Sockets {
		if s.UDP {
			continue
		}
		addr, err := conns[i].local()
		if err != nil {
			closeConns(conns)
			return nil, err
		}
		listeners = append(listeners, listener{family: s.Family, port: addr.Port(), socket: conns[i]})
	}
	if err := p.send(letter{Took: true}); err != nil {
		closeConns(conns)
		return nil, err
	}
	lacking := errNoUDP
	if c.options.TCPOnly {
		lacking = errTCPOnly
	}
	for _, l := range listeners {
		c.receivers.set(l.family, nil, lacking)
	}
	for i, s := range l.Sockets {
		switch {
		case !s.UDP:
		case c.options.TCPOnly:
			conns[i].Close()
		default:
			c.receivers.set(s.Family, conns[i], nil)
		}
	}
	return listeners, nil
}

// takeConnections takes connections, and passes on their bytes once the predecessor knows that it must not.
func (c *crew) takeConnections(p *courier, handed []handedConnection, fds []int) error {
	var all []*passed
	var conns []*Conn
	drop := func() {
		closeConns(conns)
		closeAll(fds)
		for _, one := range all {
			one.out.drop()
			one.back.drop()
		}
	}
	for _, h := range handed {
		ends, err := connsOf(fds[:2])
		fds = fds[2:]
		if err != nil {
			drop()
			return err
		}
		conns = append(conns, ends...)
		one := &passed{service: &service{id: id{h.Service, lb.TCP}}, from: h.Client, to: h.Frontend, at: h.Backend,
			tried: h.Tried, began: h.Began, inherited: true}
		one.passage = newPassage(nil, ends[0], ends[1])
		one.outEnded, one.backEnded = h.OutEnded, h.BackEnded
		one.out.moved.Store(h.Sent)
		one.back.moved.Store(h.Received)
		one.sentCounted, one.receivedCounted = h.Sent, h.Received // by the predecessor
		for _, half := range []struct {
			*mover
			left int
		}{{one.out, h.Out}, {one.back, h.Back}} {
			if half.left > 0 {
				half.pipe, half.n = &pipe{out: fds[0], in: -1, inherited: true}, half.left
				fds = fds[1:]
			}
		}
		all = append(all, one)
	}
	if err := p.send(letter{Took: true}); err != nil {
		drop()
		return err
	}
	for _, one := range all {
		c.adopt(one)
	}
	return nil
}

// adopt passes on the bytes of a connection of the predecessor.
func (c *crew) adopt(p *passed) {
	p.service = c.table.adopt(p.service.id, p.from.Addr(), p.at)
	if w, ok, _ := c.table.find(target{lb.TCP, p.to}); ok && w.service == p.service {
		c.table.rememberSince(w, p.from.Addr(), p.at, p.began)
	}
	p.out.pipes = c.pipes.of(p.service, p.from.Addr())
	p.back.pipes = p.out.pipes
	if c.open.Add(1) == c.high() {
		c.cross()
	}
	c.connections.Go(func() {
		defer c.release()
		defer p.client.Close()
		defer p.backend.Close()
		c.ended(p, c.carry(c.serving, p))
	})
}

// ended counts and logs the end of a connection. The successor counts what it passes on of one that was handed over.
func (r *Relay) ended(p *passed, end ended) {
	p.service.leave(p.at)
	p.count()
	r.table.close(p.service, p.from.Addr())
	end.backend = p.at
	r.log(lb.TCP, p.service, p.from, p.to, p.tried, end, r.deps.Now().Sub(p.began))
}

// connsOf takes over sockets.
func connsOf(fds []int) (all []*Conn, err error) {
	for i, fd := range fds {
		conn, err := newConn(fd)
		if err != nil {
			closeConns(all)
			closeAll(fds[i+1:])
			return nil, err
		}
		all = append(all, conn)
	}
	return all, nil
}

func closeConns(all []*Conn) {
	for _, c := range all {
		c.Close()
	}
}

// triedOf returns as many of the backends that were tried as are handed over.
func triedOf(tried []netip.AddrPort) []netip.AddrPort {
	return tried[max(0, len(tried)-maxHandedTries):]
}
