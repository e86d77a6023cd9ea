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
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
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
	moved      bool // to another backend, as one failed
	// last is when either end has sent something, sentAt when the client has; answered is set once the
	// backend has, and stream once the kernel takes it for a stream.
	last, sentAt     time.Time
	answered, stream bool
	closed           bool
	end              ended

	// These belong to flows. service is set once the flow is admitted, the others while it is.
	service             *service
	inService, inClient *list.Element
}

// receiveAll passes on the datagrams of clients, until the socket closes.
func (r *Relay) receiveAll(ctx context.Context, l listener, running *sync.WaitGroup) {
	into, control := make([]byte, maxDatagram), make([]byte, controlSize)
	for {
		d, err := l.datagrams.receiveFrom(into, control)
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil { // of one datagram
			continue
		}
		key := wire.Flow{Client: d.from, At: netip.AddrPortFrom(d.to, l.port)}
		f := r.flows.find(key, func() *flow {
			now := r.deps.Now()
			f := &flow{Relay: r, key: key, socket: l.datagrams, began: now, last: now}
			running.Go(func() { f.run(ctx) })
			return f
		})
		if f == nil {
			r.refused.Add(1)
			continue
		}
		f.receive(into[:d.n])
	}
}

// run serves a flow until it ends.
func (f *flow) run(ctx context.Context) {
	defer f.flows.end(f)
	w, ok := f.ask(ctx)
	f.flows.answered(f)
	if !ok {
		f.refused.Add(1)
		return
	}
	victim, beyond := f.flows.admit(f, w.service)
	if victim != nil {
		f.table.count(victim.service, func(c *Counts) { c.add(beyond) })
		victim.close(nil)
	}
	f.table.count(w.service, func(c *Counts) { c.add(Counts{Open: 1, Connections: 1}) })
	stop := context.AfterFunc(ctx, func() { f.close(context.Cause(ctx)) })
	defer stop()
	f.start()
	f.pass()
	f.mu.Lock()
	end := f.end
	f.mu.Unlock()
	f.table.count(w.service, func(c *Counts) {
		c.add(Counts{Open: -1, Sent: end.sent, Received: end.received})
		f.table.forget(w.service)
	})
	f.log(lb.UDP, w, f.from, f.to, f.all, end, f.deps.Now().Sub(f.began))
}

// ask finds out where the flow leads.
func (f *flow) ask(ctx context.Context) (w way, ok bool) {
	a, ok := f.questions.ask(ctx, f.key, findWithin)
	if !ok || !a.From.IsValid() || !a.To.IsValid() || a.To == f.key.At { // who sends to the relay itself
		return w, false
	}
	version := f.table.version.Load()
	w, ok = f.find(ctx, target{lb.UDP, a.To}, nil)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.from, f.to, f.way, f.version = a.From, a.To, w, version
	return w, ok
}

// start chooses the first backend, and sends it what has come so far.
func (f *flow) start() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if version := byte(f.way.proxyProtocol); version > 0 {
		header := proxyproto.HeaderProxyFromAddrs(version, net.UDPAddrFromAddrPort(f.from),
			net.UDPAddrFromAddrPort(f.to))
		var err error
		if f.header, err = header.Format(); err != nil {
			f.fail(fmt.Errorf("write the header of the PROXY protocol: %w", err))
			return
		}
	}
	f.next(errNoBackend)
}

// next sends what is kept to the next backend that there is. why is the error of the last one.
func (f *flow) next(why error) {
	choose := f.table.chooser(f.way, f.from.Addr(), rand.Uint64)
	for !f.closed {
		backend, ok := netip.AddrPort{}, len(f.tried) < f.options.Tries
		if ok {
			backend, ok = f.table.choose(f.way.service, choose, f.tried)
		}
		if !ok {
			f.table.count(f.way.service, func(c *Counts) { c.Failures++ })
			f.fail(fmt.Errorf("no backend answered: %w", why))
			return
		}
		f.tried = append(f.tried, backend)
		if f.all = append(f.all, backend); len(f.all) > maxLogged {
			f.all = f.all[1:]
		}
		conn, err := f.deps.DialUDP(backend)
		f.table.count(f.way.service, func(c *Counts) { c.Tries++ })
		if err != nil {
			f.table.leave(f.way.service, backend)
			if why = err; failedHere(err) {
				f.table.count(f.way.service, func(c *Counts) { c.NodeFailures++ })
			} else {
				f.table.suspect(f.way.service, backend)
			}
			continue
		}
		f.backend, f.conn = backend, conn
		f.table.remember(f.way, f.from.Addr(), backend)
		for _, p := range f.kept {
			if err := f.send(p); err != nil {
				why = err
				f.lose(true)
				break
			}
		}
		if f.conn != nil {
			return
		}
	}
}

// maxLogged is how many of the backends that a flow has had are logged.
const maxLogged = 16

// lose gives up the backend, which counts against it if it has failed.
func (f *flow) lose(failed bool) {
	if failed {
		f.table.suspect(f.way.service, f.backend)
		if !f.moved {
			f.moved = true
			f.table.count(f.way.service, func(c *Counts) { c.Retried++ })
		}
	}
	f.conn.Close()
	f.conn = nil
	f.table.leave(f.way.service, f.backend)
}

// receive takes in what the client has sent.
func (f *flow) receive(p []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.last = f.deps.Now()
	f.sentAt = f.last
	if f.conn != nil {
		f.stream = f.stream || f.answered && f.last.Sub(f.began) > streamAfter
		f.follow()
	}
	f.keep(p)
	f.end.sent += uint64(len(p))
	if f.conn == nil {
		return
	}
	if err := f.send(p); err != nil { // of what was sent before
		f.lose(true)
		f.next(err)
	}
}

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
		f.tried, f.kept, f.keptBytes, f.incomplete = nil, nil, 0, false
		f.next(errNoBackend)
	}
}

// send sends a datagram to the backend. It returns only errors that count against that.
func (f *flow) send(p []byte) error {
	err := f.conn.sendParts(f.header, p)
	if isBackends(err) {
		return err
	}
	return nil
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
	if f.stream {
		return min(f.options.UDPIdle, f.streamIdle)
	}
	return min(f.options.UDPIdle, f.flowIdle)
}

// pass passes on answers until the flow ends.
func (f *flow) pass() {
	_, from := sockaddrOf(f.key.Client)
	control := answerFrom(f.key.At.Addr())
	for {
		f.mu.Lock()
		conn := f.conn
		if conn == nil || f.closed {
			f.mu.Unlock()
			return
		}
		left := f.limit() - f.deps.Now().Sub(f.last)
		if left <= 0 {
			f.fail(nil)
			f.mu.Unlock()
			return
		}
		f.mu.Unlock()
		_ = conn.file.SetReadDeadline(time.Now().Add(left))
		err := f.answers(conn, control, from)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		f.failed(conn, err)
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
		if f.answer(conn, n) {
			_ = f.socket.sendTo(buffer[:n], control, to)
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
	if !f.answered || len(f.tried) > 1 { // not with each
		f.table.trust(f.way.service, f.backend)
	}
	f.answered = true
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
	case isBackends(err):
		f.lose(true)
		f.next(err)
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
