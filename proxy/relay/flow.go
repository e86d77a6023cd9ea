package relay

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

const (
	// maxKept and maxKeptBytes are how much of a flow is kept until it is answered: another backend gets it
	// if the first refuses.
	maxKept, maxKeptBytes = 8, 8 << 10
	// streamAfter is how old a flow is that the kernel takes for a stream once both ends have sent something.
	// It waits for 2 s from its first packet on.
	streamAfter = 2 * time.Second
	// underWay is how long ago something was sent to which an answer may still come.
	underWay = time.Second
)

// flow is a flow of UDP: what one client sends from one port to one frontend, and the answers. It has a
// socket of its own, so that ICMP tells it what becomes of what it sends.
type flow struct {
	*Relay
	key    wire.Flow
	socket *Conn // where the client's datagrams come in
	ttl    int   // of the first of them
	began  time.Time

	mu sync.Mutex
	// from and to are what the client itself sees, known with way.
	from, to netip.AddrPort
	way      way
	version  uint64 // of the table that way is from
	backend  netip.AddrPort
	conn     *Conn  // to backend; nil before
	header   []byte // of the PROXY protocol, of each datagram
	// kept is what the client has sent since the last answer, and waits if there is no backend yet. It is
	// incomplete if there was too much; then others get none of it.
	kept       [][]byte
	keptBytes  int
	incomplete bool
	// tried are the backends since the last answer. all are those of the whole flow, for the log.
	tried, all []netip.AddrPort
	why        error // there is no backend any more
	moved      bool  // to another backend, as one failed
	// last is when either end has sent something, sentAt when the client has, and stream is set once the kernel
	// takes it for a stream.
	last, sentAt time.Time
	stream       bool
	closed       bool
	end          ended
	counted      ended // so much of end is counted for the Service

	answered atomic.Bool // by a backend

	// These belong to flows. service is set once the flow is admitted, the others while it is.
	service             *service
	inService, inClient *list.Element
	proven              bool // its client has sent again after an answer
}

// receiveUDP passes on the datagrams of clients, until the socket closes or handed does. Where another program has the
// port, it waits for that.
func (r *Relay) receiveUDP(ctx context.Context, l listener, handed <-chan struct{}, running *sync.WaitGroup) {
	failures := loop.Failures{Repeat: time.Hour}
	for r.receivers.of(l.family) == nil {
		select {
		case <-r.leaving:
			return
		case <-handed:
			return
		case <-time.After(reopenEvery):
		}
		if isOurs, err := r.reopenUDP(l, handed); isOurs {
			failures.Log(r.deps.Log, "cannot open the relay's port of UDP, which goes straight to endpoints; trying again",
				"opened the relay's port of UDP", err)
			r.cross()
		}
	}
	r.receiveAll(ctx, l, r.receivers.of(l.family), running)
}

// reopenUDP tries to open a port of UDP that another program had. Once handed is closed, the port is the successor's.
func (r *Relay) reopenUDP(l listener, handed <-chan struct{}) (isOurs bool, err error) {
	r.sockets.handing.Lock()
	defer r.sockets.handing.Unlock()
	if isClosed(handed) {
		return false, nil
	}
	socket, err := openUDP(l.family, l.port)
	r.receivers.set(l.family, socket, err)
	return true, err
}

// receiveAll passes on the datagrams that come in at a socket, until that closes or has a deadline.
func (r *Relay) receiveAll(ctx context.Context, l listener, socket *Conn, running *sync.WaitGroup) {
	into, control := make([]byte, maxDatagram), make([]byte, controlSize)
	pulse := r.receiving[l.family]
	for {
		d, err := socket.receiveFrom(into, control)
		if errors.Is(err, os.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) { // or a successor receives
			return
		}
		if err != nil { // of one datagram
			continue
		}
		end := pulse.Begin()
		key := wire.Flow{Client: d.from, At: netip.AddrPortFrom(d.to, l.port)}
		r.passOn(key, into[:d.n], func() *flow {
			now := r.deps.Now()
			f := &flow{Relay: r, key: key, socket: socket, ttl: d.ttl, began: now, last: now}
			running.Go(func() { f.run(ctx) })
			return f
		})
		end()
	}
}

// passOn passes on a datagram by its flow, which is made with made if there is none, or if it has just ended.
func (r *Relay) passOn(key wire.Flow, p []byte, made func() *flow) {
	for range 2 {
		f, behind := r.flows.find(key, made)
		if behind {
			r.fallBehind()
		}
		if f == nil {
			break
		}
		if f.receive(p) {
			return
		}
		r.flows.end(f)
	}
	r.refused.Add(1)
}

// run serves a flow until it ends.
func (f *flow) run(ctx context.Context) {
	defer f.flows.end(f)
	a, ok := f.questions.ask(ctx, f.key, askWithin)
	f.flows.answered(f)
	if !ok || !f.lead(ctx, a) {
		f.refused.Add(1)
		return
	}
	w := f.way
	if f.ttl == 1 {
		w.service.count(Counts{Expired: 1})
		f.log(lb.UDP, w.service, f.from, f.to, nil, ended{err: errExpired}, f.deps.Now().Sub(f.began))
		return
	}
	victim, beyond := f.flows.admit(f, w.service)
	if victim != nil {
		victim.service.count(beyond)
		victim.close(nil)
	}
	w.service.count(Counts{Open: 1, Connections: 1})
	stop := context.AfterFunc(ctx, func() { f.close(context.Cause(ctx)) })
	defer stop()
	f.serve()
	f.mu.Lock()
	f.count()
	end := f.end
	f.mu.Unlock()
	f.table.ended(w.service)
	f.log(lb.UDP, w.service, f.from, f.to, f.all, end, f.deps.Now().Sub(f.began))
}

// count counts the bytes that were passed on since it was last called.
func (f *flow) count() {
	f.way.service.count(Counts{Sent: f.end.sent - f.counted.sent, Received: f.end.received - f.counted.received})
	f.counted = f.end
}

// countSoFar does the same while the flow has a backend.
func (f *flow) countSoFar() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conn != nil {
		f.count()
	}
}

// lead finds out where the flow leads, by the proxy's answer.
func (f *flow) lead(ctx context.Context, a wire.Answer) bool {
	if !a.From.IsValid() || !a.To.IsValid() || a.To == f.key.At { // who sends to the relay itself
		return false
	}
	version := f.table.version.Load()
	w, ok := f.find(ctx, target{lb.UDP, a.To}, &f.flowsWaiting)
	if !ok {
		return false
	}
	var header []byte
	if v := byte(w.proxyProtocol); v > 0 {
		var err error
		header, err = proxyproto.HeaderProxyFromAddrs(v, net.UDPAddrFromAddrPort(a.From),
			net.UDPAddrFromAddrPort(a.To)).Format()
		if err != nil {
			return false
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.from, f.to, f.way, f.version, f.header, f.why = a.From, a.To, w, version, header, errNoBackend
	return true
}

// connect sends what is kept to the next backend that there is. Only the goroutine of the flow calls it, while
// there is none, and holds no lock while it chooses: what the client sends meanwhile is kept.
func (f *flow) connect() {
	f.mu.Lock()
	s, client, tried, why := f.way.service, f.from.Addr(), f.tried, f.why
	choose := f.table.chooser(f.way, f.from, f.to, rand.Uint64)
	f.mu.Unlock()
	backend, ok := netip.AddrPort{}, len(tried) < f.options.Tries && !errors.Is(why, errNoPort)
	if ok {
		backend, ok = s.choose(choose, tried)
	}
	if !ok {
		s.count(Counts{Failures: 1})
		f.close(fmt.Errorf("no backend answered: %w", why))
		return
	}
	conn, err := f.deps.DialUDP(backend, onward(f.ttl))
	s.count(Counts{Tries: 1})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tried = append(f.tried, backend)
	if f.all = append(f.all, backend); len(f.all) > maxLogged {
		f.all = f.all[1:]
	}
	switch {
	case err != nil:
		s.leave(backend)
		if f.why = err; failedHere(err) {
			s.count(Counts{NodeFailures: 1})
		} else {
			f.table.suspect(s, backend)
		}
		if errors.Is(err, errNoPort) { // another backend needs one too
			f.noPort.Add(1)
		}
		return
	case f.closed:
		conn.Close()
		s.leave(backend)
		return
	}
	f.backend, f.conn, f.end.backend = backend, conn, backend
	f.table.remember(f.way, client, backend)
	for _, p := range f.kept {
		if f.send(p, true); f.conn == nil {
			return
		}
	}
}

// maxLogged is how many of the backends that a flow has had are logged.
const maxLogged = 16

// lose gives up the backend, which counts against it if it has failed. The goroutine of the flow, which reads from
// its socket, connects to another.
func (f *flow) lose(failed bool) {
	if failed {
		f.end.backend = netip.AddrPort{}
		if reaches(f.ttl) {
			f.table.suspect(f.way.service, f.backend)
		}
		if !f.moved {
			f.moved = true
			f.way.service.count(Counts{Retried: 1})
		}
	}
	f.lostReceived.Add(f.conn.dropped())
	f.conn.Close()
	f.conn = nil
	f.way.service.leave(f.backend)
}

// receive takes in what the client has sent, unless the flow has ended.
func (f *flow) receive(p []byte) (ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.last = f.deps.Now()
	f.sentAt = f.last
	if f.conn != nil {
		f.stream = f.stream || f.answered.Load() && f.last.Sub(f.began) > streamAfter
		if f.follow(); f.closed {
			return false
		}
	}
	owed := f.isOwed()
	f.keep(p)
	f.end.sent += uint64(len(p))
	if f.conn != nil {
		f.send(p, owed)
	}
	return true
}

// isOwed reports whether something was sent since the last answer. Else no error of ICMP counts: that has no
// authentication, and whoever guesses the port of the flow's socket could move it, and have its backend be suspect.
func (f *flow) isOwed() bool { return len(f.kept) > 0 || f.incomplete }

// keep keeps a datagram until there is an answer.
func (f *flow) keep(p []byte) {
	if f.incomplete {
		return
	}
	if len(f.kept) < maxKept && f.keptBytes+len(p) <= maxKeptBytes {
		f.kept = append(f.kept, slices.Clone(p))
		f.keptBytes += len(p)
		return
	}
	if f.conn != nil { // else this one is lost, and those before wait for a backend
		f.kept, f.keptBytes, f.incomplete = nil, 0, true
	}
}

// follow has the flow lead where the proxy says. It moves if its endpoint is gone, and ends if its frontend
// leads elsewhere.
func (f *flow) follow() {
	version := f.table.version.Load()
	if version == f.version {
		return
	}
	w, ok, _ := f.table.find(target{lb.UDP, f.to})
	if !ok || w.service != f.way.service || w.proxyProtocol != f.way.proxyProtocol {
		f.fail(errors.New("the frontend leads elsewhere"))
		return
	}
	f.way, f.version = w, version
	if !w.keeps(f.backend) {
		f.lose(false)
		f.tried, f.kept, f.keptBytes, f.incomplete, f.why = nil, nil, 0, false, errNoBackend
	}
}

// send sends a datagram to the backend. An error that counts against that gives it up: of what was sent before if
// something was owed before, and else only one of the node's own routes, which stays when those of ICMP are dropped.
func (f *flow) send(p []byte, owed bool) {
	err := f.conn.sendParts(f.header, p)
	for tries := 0; tries < 3 && isBackends(err) && !owed; tries++ { // a flood may bring another error meanwhile
		f.conn.dropErrors()
		err = f.conn.sendParts(f.header, p)
	}
	switch {
	case isBackends(err):
		f.lose(true)
		f.why = err
	case err != nil:
		f.lostSent.Add(1)
	}
}

// isBackends reports whether an error of a socket means that its backend cannot be reached, or does not
// listen. Others concern single datagrams, which UDP may lose.
func isBackends(err error) bool {
	return err != nil && !failedHere(err) && !errors.Is(err, unix.EMSGSIZE) && !errors.Is(err, unix.EPERM) &&
		!errors.Is(err, os.ErrClosed)
}

// limit returns for how long the flow may be silent. It has to end before the kernel forgets to where it
// went, or its answers would have another source.
func (f *flow) limit() time.Duration {
	idle := f.idle.Load()
	if f.stream {
		return min(f.options.UDPIdle, idle.stream)
	}
	return min(f.options.UDPIdle, idle.flow)
}

// serve passes on answers until the flow ends, and connects each time that there is no backend.
func (f *flow) serve() {
	_, from := sockaddrOf(f.key.Client)
	control := answerFrom(f.key.At.Addr())
	for {
		conn, ok := f.wait()
		switch {
		case !ok:
			return
		case conn == nil:
			f.connect()
			continue
		}
		if err := f.answers(conn, control, from); !errors.Is(err, os.ErrDeadlineExceeded) {
			f.failed(conn, err)
		}
	}
}

// wait returns what to wait at for answers, nil if there is no backend, until a deadline: when the flow has been
// silent for too long. ok is false once it has ended, as it does then.
func (f *flow) wait() (conn *Conn, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.conn == nil {
		return nil, !f.closed
	}
	left := f.limit() - f.deps.Now().Sub(f.last)
	if left <= 0 {
		f.fail(nil)
		return nil, false
	}
	_ = f.conn.file.SetReadDeadline(time.Now().Add(left))
	return f.conn, true
}

// hurry has the flow look again for how long it may be silent.
func (f *flow) hurry() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conn != nil {
		_ = f.conn.file.SetReadDeadline(time.Unix(1, 0))
	}
}

// answers passes on what a backend sends, until there is an error.
func (f *flow) answers(conn *Conn, control []byte, to unix.Sockaddr) error {
	for {
		var buffer *[maxDatagram]byte
		var n int
		var failed error
		err := conn.raw.Read(func(fd uintptr) (done bool) {
			buffer = datagrams.Get().(*[maxDatagram]byte)
			if n, done, failed = receiveDatagram(fd, buffer[:]); !done || failed != nil {
				datagrams.Put(buffer)
			}
			return done
		})
		if err = cmp.Or(asClosed(err), failed); err != nil {
			return err
		}
		if f.answer(conn, n) && f.socket.sendTo(buffer[:n], control, to) != nil {
			f.lostReceived.Add(1)
		}
		datagrams.Put(buffer)
	}
}

// answer notes that a backend has sent so many bytes, and reports whether it is that of the flow.
func (f *flow) answer(conn *Conn, n int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conn == conn {
		f.follow()
	}
	if f.conn != conn {
		return false
	}
	f.last = f.deps.Now()
	if !f.answered.Swap(true) || len(f.tried) > 1 { // not with each
		f.way.service.trust(f.backend)
	}
	f.stream = f.stream || f.last.Sub(f.began) > streamAfter
	f.tried = append(f.tried[:0], f.backend)
	f.kept, f.keptBytes, f.incomplete = nil, 0, false
	f.sentAt = time.Time{}
	f.end.received += uint64(n)
	return true
}

// failed has the flow go on with another backend after an error of a connection, if that is still the flow's.
func (f *flow) failed(conn *Conn, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed || f.conn != conn:
	case isBackends(err) && f.isOwed():
		f.lose(true)
		f.why = err
	default:
		conn.dropErrors()
	}
}

// close ends the flow.
func (f *flow) close(why error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail(why)
}

func (f *flow) fail(why error) {
	if f.closed {
		return
	}
	f.closed, f.end.err = true, why
	if f.conn != nil {
		f.lose(false)
	}
}

// waits reports whether an answer may be under way.
func (f *flow) waits() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.deps.Now().Sub(f.sentAt) < underWay
}

var datagrams = sync.Pool{New: func() any { return new([maxDatagram]byte) }}
