package bfd

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// cloud is a network without wires, for tests in a bubble of synctest.
type cloud struct {
	mu    sync.Mutex
	wires map[netip.Addr]*fakeWire
	// fate says when a packet arrives, or that it does not.
	fate   func(from, to netip.Addr, p Packet) (delay time.Duration, lost bool)
	random *rand.Rand
}

func newCloud() *cloud {
	return &cloud{
		wires: map[netip.Addr]*fakeWire{}, random: rand.New(rand.NewPCG(1, 2)),
		fate: func(netip.Addr, netip.Addr, Packet) (time.Duration, bool) { return ms, false },
	}
}

func (c *cloud) number() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.random.Uint32()
}

// fakeWire is one actor's end.
type fakeWire struct {
	cloud  *cloud
	addr   netip.Addr
	woken  chan struct{}
	timer  *time.Timer
	mu     sync.Mutex
	queue  []datagram
	fails  error         // what listening, dialling and sending return
	lost   bool          // the next packet comes with the word that others were lost
	asleep time.Duration // that the next wait takes longer than asked for
}

func (w *fakeWire) wake() {
	select {
	case w.woken <- struct{}{}:
	default:
	}
}

func (w *fakeWire) wait(until time.Time) {
	if until.IsZero() {
		<-w.woken
		return
	}
	w.timer.Reset(time.Until(until))
	select {
	case <-w.woken:
	case <-w.timer.C:
	}
	w.mu.Lock()
	asleep := w.asleep
	w.asleep = 0
	w.mu.Unlock()
	time.Sleep(asleep)
}

func (w *fakeWire) receive(now time.Time) ([]datagram, time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	arrived := w.queue
	w.queue = nil
	return arrived, now
}

func (w *fakeWire) failing() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fails
}

func (w *fakeWire) set(f func(*fakeWire)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(w)
}

func (w *fakeWire) listen(listener) error { return w.failing() }
func (w *fakeWire) unlisten(listener)     {}
func (w *fakeWire) close()                {}

func (w *fakeWire) dial(k Key, _ uint16, _ func() uint32) (link, error) {
	return &fakeLink{wire: w, key: k}, w.failing()
}

type fakeLink struct {
	wire *fakeWire
	key  Key
}

func (*fakeLink) sourcePort() uint16 { return minSourcePort }
func (*fakeLink) device() int        { return 0 }
func (*fakeLink) toward() []int      { return nil }
func (*fakeLink) close()             {}

func (l *fakeLink) send(b []byte) error {
	if err := l.wire.failing(); err != nil {
		return err
	}
	p, drop := decode(b)
	if drop != dropNone {
		return errors.New("sent what must be dropped: " + drop.String())
	}
	c := l.wire.cloud
	c.mu.Lock()
	defer c.mu.Unlock()
	delay, lost := c.fate(l.wire.addr, l.key.Peer, p)
	if lost {
		return nil
	}
	d := datagram{payload: slices.Clone(b), listener: l.key.listener(), from: l.wire.addr, to: l.key.Peer, ttl: 255}
	time.AfterFunc(delay, func() {
		c.mu.Lock()
		to := c.wires[l.key.Peer]
		c.mu.Unlock()
		if to != nil {
			to.arrive(d)
		}
	})
	return nil
}

// arrive has a datagram received.
func (w *fakeWire) arrive(d datagram) {
	w.set(func(w *fakeWire) {
		d.at = time.Now()
		d.lost, w.lost = w.lost, false
		w.queue = append(w.queue, d)
	})
	w.wake()
}

// node is a worker at an address of a cloud.
type node struct {
	*worker
	wire    *fakeWire
	changed atomic.Int64 // calls of Changed
	stop    func()       // ends Run and waits
	pull    func()       // cuts it off before its last word, and ends it
}

func (c *cloud) node(t *testing.T, at string) *node {
	w := &fakeWire{cloud: c, addr: addr(at), woken: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	c.mu.Lock()
	c.wires[w.addr] = w
	c.mu.Unlock()
	n := &node{wire: w}
	n.worker = newWorker(workerOptions{Options: Options{Normal: true, Changed: func() { n.changed.Add(1) }},
		random: c.number, open: func() (wire, error) { return w, nil }})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := n.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	n.stop = func() { cancel(); <-ended }
	n.pull = func() {
		w.set(func(w *fakeWire) { w.fails = errors.New("the cable was pulled") })
		n.stop()
		c.mu.Lock()
		delete(c.wires, w.addr)
		c.mu.Unlock()
	}
	t.Cleanup(n.stop)
	return n
}

// one is the outcome of a node's only session.
func (n *node) one(t *testing.T) Outcome {
	t.Helper()
	synctest.Wait()
	all := n.Outcomes()
	if len(all) != 1 {
		t.Fatalf("%d sessions", len(all))
	}
	for _, o := range all {
		return o
	}
	panic("unreachable")
}
