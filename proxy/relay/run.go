package relay

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// crew are the goroutines of a running relay, and what ends them.
type crew struct {
	*Relay
	serving, flowing, talking, handing context.Context
	// opening ends once no more ports are to be opened, nor anything taken over.
	opening             context.Context
	abort, abortFlows   context.CancelCauseFunc
	hangUp, stopHanding context.CancelFunc
	// hasPorts is set once sockets that listen were taken over, or are opened in their place. It belongs to takeOver.
	hasPorts bool
	// lock is what only the relay has that serves successors. It belongs to serveSuccessors.
	lock *os.File

	// accepting and receiving end with the sockets that listen, and begin anew if a successor gives these back.
	accepting, receiving                       sync.WaitGroup
	feed, connections, running, heirs, inherit sync.WaitGroup
}

// Run relays until ctx ends, and then until the connections have ended or Drain is over. Before it stops
// accepting, it waits until the rules do not lead to it any more, or a successor accepts in its place.
func (r *Relay) Run(ctx context.Context) error {
	whole, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	c := &crew{Relay: r}
	c.serving, c.abort = context.WithCancelCause(whole)
	c.flowing, c.abortFlows = context.WithCancelCause(whole)
	c.talking, c.hangUp = context.WithCancel(whole)
	c.handing, c.stopHanding = context.WithCancel(whole)
	var stopOpening context.CancelFunc
	c.opening, stopOpening = context.WithCancel(ctx)
	defer stopOpening()
	c.feed.Go(func() { _ = r.follow(c.talking) })
	c.feed.Go(func() { r.followKernel(c.talking) })
	c.feed.Go(func() { r.watchMemory(c.talking) })
	if r.predecessor != nil {
		defer func() { r.predecessor.close() }() // the last one
		c.inherit.Go(func() { c.takeOver(c.opening) })
	} else {
		c.begin()
	}
	if r.options.HandOver != "" {
		c.heirs.Go(c.serveSuccessors)
	}
	select {
	case <-ctx.Done():
	case <-r.succeeded:
	}
	stopOpening()
	c.inherit.Wait()
	c.leave()
	c.drain()
	select { // a container that ended by itself would be started again
	case <-ctx.Done():
	case <-r.orphaned:
	}
	c.stopHanding()
	c.heirs.Wait()
	r.workers.close()
	r.pipes.close()
	return nil
}

// begin accepts and receives at the sockets that listen, and opens the port of a family that has none as soon as it can
// be opened.
func (c *crew) begin() {
	ports := c.sockets.ports()
	c.deps.Log.Info("relaying", "ports", ports)
	c.sockets.handing.Lock()
	defer c.sockets.handing.Unlock()
	c.use(c.sockets.listeners()...)
	c.cross() // has the ports said
	for _, family := range families {
		if _, open := ports[family]; !open {
			c.inherit.Go(func() { c.openLater(c.opening, family) })
		}
	}
}

// use accepts and receives at sockets that listen until they are handed over; their lock handing is held.
func (c *crew) use(all ...listener) {
	handed := c.sockets.handed
	for _, l := range all {
		c.accepting.Go(func() { c.accept(c.serving, l, &c.connections) })
		if !c.options.TCPOnly {
			c.receiving.Go(func() { c.receiveUDP(c.flowing, l, handed, &c.running) })
		}
	}
}

// openLater opens the port of a family that could not be opened with the other's, unless the node has no such family.
// Another program may have it, or the relay before this one has not closed it yet.
func (c *crew) openLater(ctx context.Context, family lb.Family) {
	failures, backoff := loop.Failures{Repeat: time.Hour}, loop.Backoff{Min: reopenEvery, Max: maxReopen}
	for {
		opened, err := c.openFamily(family)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			return
		}
		if opened || err != nil {
			failures.Log(c.deps.Log, "cannot open the relay's port of a family: its connections go straight to endpoints; "+
				"trying again", "opened the relay's port of a family", err, "family", family)
		}
		if opened || !wait(ctx, backoff.Next()) {
			return
		}
	}
}

// openFamily tries to open the port of a family, unless a successor has the sockets: then it does so.
func (c *crew) openFamily(family lb.Family) (opened bool, err error) {
	s := &c.sockets
	s.handing.Lock()
	defer s.handing.Unlock()
	if s.ending || isClosed(s.handed) {
		return false, nil
	}
	l, err := c.listenAt(family)
	if err != nil {
		return false, err
	}
	s.set(append(slices.Clone(s.listeners()), l))
	c.use(l)
	c.cross() // has the ports said
	return true, nil
}

// leave has the rules not lead here any more, and ends the sockets that accept.
func (c *crew) leave() {
	close(c.leaving)
	select {
	case <-c.left:
	case <-time.After(plan.RelayLease + time.Second): // the proxy is gone, and with it the lease by now
	}
	c.sockets.end()
	c.accepting.Wait()
	c.sockets.close()
}

// drain waits for what is open, and resets what is left after Drain.
func (c *crew) drain() {
	ends := errors.New("the relay ends")
	drained := make(chan struct{})
	go func() { c.connections.Wait(); c.quiesce(c.serving); close(drained) }()
	select {
	case <-drained:
	case <-time.After(c.options.Drain):
		c.deps.Log.Warn("resetting the connections that are still open", "connections", c.open.Load())
		c.abort(ends)
		<-drained
	}
	// The proxy cuts the flows of UDP in the kernel's table once it does not hear the relay: from then on their
	// packets go straight to endpoints.
	c.hangUp()
	c.feed.Wait()
	if n := len(c.flows.list()); n > 0 {
		time.Sleep(acceptAfter)
	}
	c.receivers.close()
	c.receiving.Wait()
	c.abortFlows(ends)
	c.running.Wait()
}

// quiesce waits until no flow of UDP waits for an answer.
func (r *Relay) quiesce(ctx context.Context) {
	for slices.ContainsFunc(r.flows.list(), (*flow).waits) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// accept accepts connections until the listener's deadline, which it has once the relay ends.
func (r *Relay) accept(ctx context.Context, l listener, connections *sync.WaitGroup) {
	failures := loop.Failures{Repeat: time.Minute}
	for {
		conn, from, err := l.accept()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		end := r.pulses.Begin()
		failures.Log(r.deps.Log, "cannot accept a connection", "accepting connections again", err)
		switch {
		case err != nil: // as without free file descriptors
			r.strained.Store(r.deps.Now().UnixNano())
			r.cross()
			time.Sleep(10 * time.Millisecond)
		case !r.admit():
			r.refused.Add(1)
			abort(conn)
		default:
			connections.Add(1)
			r.workers.run(func() {
				defer connections.Done()
				defer r.release()
				r.serve(ctx, conn, from, l)
			})
		}
		end()
	}
}
