package relay

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

const (
	// readyWithin is how long a relay whose successor accepts connections waits until the proxy knows that one.
	readyWithin = 10 * time.Second
	// sweepEvery is how often it looks for connections that can be handed over: those that had no backend before.
	sweepEvery = 50 * time.Millisecond
)

// clientsWithin bounds how long a relay hands over the clients that session affinity remembers, before the sockets and
// after the connections. It is longer in tests, whose machines are busy.
var clientsWithin = 3 * time.Second

// serveSuccessors hands over to a successor, again and again if that fails, until the relay ends.
func (c *crew) serveSuccessors() {
	failures, failed := loop.Failures{Repeat: time.Hour}, loop.Failures{Repeat: time.Hour}
	select {
	case <-c.settled:
	case <-c.handing.Done():
		return
	}
	if !c.lockHandOver() {
		return
	}
	defer c.lock.Close()
	for {
		conn, err := c.awaitSuccessor()
		if c.handing.Err() != nil {
			return
		}
		if failures.Log(c.deps.Log, "no successor can take over from the relay; trying again", "", err); err != nil {
			if !wait(c.handing, reopenEvery) {
				return
			}
			continue
		}
		if err = c.serveSuccessor(conn); c.handing.Err() != nil {
			return
		}
		if isClosed(c.succeeded) {
			c.deps.Log.Info("the successor has ended", "end", err)
			close(c.orphaned)
			return
		}
		failed.Log(c.deps.Log, "handing over to a successor failed: going on", "", err)
	}
}

// lockHandOver waits until no other relay of the node serves successors: after a hand-over that failed there are two.
// It returns false if the relay ends before.
func (c *crew) lockHandOver() bool {
	failures := loop.Failures{Repeat: time.Hour}
	for {
		lock, err := lockAt(c.options.HandOver)
		if err == nil {
			c.lock = lock
			return true
		}
		if !errors.Is(err, errLocked) {
			failures.Log(c.deps.Log, "no successor can take over from the relay; trying again", "", err)
		}
		if !wait(c.handing, reopenEvery) {
			return false
		}
	}
}

// awaitSuccessor returns the next one that connects. The socket is closed then: it is the successor's.
func (c *crew) awaitSuccessor() (*net.UnixConn, error) {
	l, err := listenAt(c.options.HandOver)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	stop := context.AfterFunc(c.handing, func() { l.Close() })
	defer stop()
	return l.AcceptUnix()
}

// serveSuccessor hands over what the relay has to a successor, until that ends.
func (c *crew) serveSuccessor(conn *net.UnixConn) error {
	p, err := newCourier(conn)
	if err != nil {
		return err
	}
	defer p.close()
	stop := context.AfterFunc(c.handing, p.close)
	defer stop()
	hello, _, err := p.receive(stepWithin)
	if err != nil {
		return err
	}
	if hello.Version != successionVersion {
		err := otherVersion(hello.Version)
		return errors.Join(err, p.send(letter{Version: successionVersion, Refused: versions(hello.Version)}))
	}
	if err := p.send(letter{Version: successionVersion}); err != nil {
		return err
	}
	begin, _, err := p.receive(knownWithin + stepWithin)
	if err != nil || !begin.Begin {
		return errors.Join(errors.New("the successor does not begin"), err)
	}
	p.wantsClients = begin.WantsClients
	until := time.Now().Add(clientsWithin)
	for range 2 { // many take a while, and those of that while are few
		if err := c.handClients(p, until); err != nil {
			return err
		}
	}
	if err := c.handSockets(p, begin); err != nil {
		return err
	}
	if err := c.handAll(p); err != nil {
		c.keepSockets()
		return err
	}
	return nil
}

// handAll hands over the connections, and goes on with those that can be handed over later. It returns once the
// successor ends.
func (c *crew) handAll(p *courier) error {
	began := time.Now()
	n, err := c.sweep(p)
	if err == nil {
		// Those that came until the successor accepted, and all if they have taken too long before.
		err = c.handClients(p, time.Now().Add(clientsWithin))
	}
	if err == nil {
		err = p.send(letter{Swept: true})
	}
	if err != nil {
		return err
	}
	c.deps.Log.Info("handed over to a successor", "connections", n, "took", time.Since(began))
	for ready := time.After(readyWithin); ; {
		_, _, err := p.receive(sweepEvery)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		late := false
		select {
		case <-ready:
			late = true
		default:
		}
		if (p.ready || late) && !isClosed(c.succeeded) {
			close(c.succeeded)
			c.lock.Close() // it serves the next one
			if c.deps.Succeeded != nil {
				c.deps.Succeeded()
			}
		}
		if _, err := c.sweep(p); err != nil {
			return err
		}
	}
}

// handSockets hands over the sockets that listen, if the successor wants those of this port, and does not use them any
// more.
func (c *crew) handSockets(p *courier, begin letter) error {
	s, port := &c.sockets, begin.Port
	s.handing.Lock()
	defer s.handing.Unlock()
	l, conns := letter{}, []*Conn{}
	add := func(family lb.Family, udp bool, conn *Conn) {
		l.Sockets, conns = append(l.Sockets, handedSocket{family, udp}), append(conns, conn)
	}
	for i, listening := range s.listeners() {
		if s.ending || begin.NoSockets || i == 0 && port != 0 && port != listening.port {
			break
		}
		add(listening.family, false, listening.socket)
		if udp := c.receivers.of(listening.family); udp != nil {
			add(listening.family, true, udp)
		}
	}
	if len(conns) == 0 {
		return p.send(l)
	}
	fds, err := fdsOf(conns)
	if err != nil {
		return err
	}
	if err := p.hand(l, fds); err != nil {
		return err
	}
	close(s.handed)
	for _, conn := range conns {
		_ = conn.file.SetReadDeadline(time.Unix(1, 0))
	}
	return nil
}

// keepSockets uses the sockets again of which a successor has died, unless the relay is about to end.
func (c *crew) keepSockets() {
	s := &c.sockets
	s.handing.Lock()
	defer s.handing.Unlock()
	if !isClosed(s.handed) || s.ending || isClosed(c.succeeded) {
		return
	}
	s.handed = make(chan struct{})
	for _, l := range s.listeners() {
		_ = l.socket.file.SetReadDeadline(time.Time{})
		if udp := c.receivers.of(l.family); udp != nil {
			_ = udp.file.SetReadDeadline(time.Time{})
		}
	}
	c.use(s.listeners()...)
}

// sweep hands over the connections that have a backend, and returns how many.
func (c *crew) sweep(p *courier) (n int, err error) {
	for some := range slices.Chunk(c.passing.list(), maxHanded) {
		end := c.pulses.Begin()
		handed, err := handConnections(p, some)
		end()
		if n += handed; err != nil {
			return n, err
		}
	}
	return n, nil
}

// handConnections hands over those of some connections that have not ended. They go on here if the successor does not
// take them.
func handConnections(p *courier, all []*passed) (n int, err error) {
	pausing := make([]<-chan bool, len(all))
	for i, one := range all {
		pausing[i] = one.pause()
	}
	var paused []*passed
	for i, one := range all {
		if <-pausing[i] {
			paused = append(paused, one)
		}
	}
	if len(paused) == 0 {
		return 0, nil
	}
	l := letter{}
	var fds []int
	for _, one := range paused {
		ends, failed := fdsOf([]*Conn{one.client, one.backend})
		if failed != nil {
			err = failed
			break
		}
		fds = append(fds, ends...)
		for _, m := range []*mover{one.out, one.back} {
			if m.left() > 0 {
				fds = append(fds, m.pipe.out)
			}
		}
		l.Connections = append(l.Connections, handedConnection{Service: one.service.key, Client: one.from,
			Frontend: one.to, Backend: one.at, Tried: triedOf(one.tried), Began: one.began,
			Sent: one.out.moved.Load(), Received: one.back.moved.Load(), OutEnded: one.outEnded, BackEnded: one.backEnded,
			Out: one.out.left(), Back: one.back.left()})
	}
	if err == nil {
		err = p.hand(l, fds)
	}
	for _, one := range paused {
		if err != nil {
			one.resume()
		} else {
			one.release()
		}
	}
	if err != nil {
		return 0, fmt.Errorf("hand over connections: %w", err)
	}
	return len(paused), nil
}

// fdsOf returns the descriptors of sockets that nothing closes meanwhile.
func fdsOf(conns []*Conn) (fds []int, err error) {
	for _, c := range conns {
		if err := c.control(func(fd int) error { fds = append(fds, fd); return nil }); err != nil {
			return nil, err
		}
	}
	return fds, nil
}
