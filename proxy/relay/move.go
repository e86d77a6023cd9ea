package relay

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// maxPipes is how many pipes the relay has at most, of the default size. A node's root may have pipes
	// of 16,384 pages together (fs.pipe-user-pages-soft) before all that it opens shrink to two pages, and
	// these take 16 pages each, an eighth of that.
	maxPipes = 128
	// maxChunk is how many bytes are moved at once.
	maxChunk = 1 << 20
	// bufferSize is how many bytes are copied at once where no pipe is free, and short how many are moved rather than
	// copied: to copy fewer costs less than a pipe does.
	bufferSize, short = 32 << 10, 8 << 10
)

// mover moves what one end sends to the other.
//
// The kernel moves the bytes through a pipe (splice), without a copy. A connection has a pipe only while
// bytes are in it, so a few suffice for many connections. Those that find none copy, and so do those that have
// few bytes. Copied bytes stay in the receiving socket until the other has taken them, so neither an idle connection
// nor one whose reader is slow holds memory of the process. At most one of pipe and buffer is set.
type mover struct {
	from, to   syscall.RawConn
	take, give func(fd uintptr) bool
	pipes      *share

	pipe   *pipe
	buffer *[bufferSize]byte
	n      int // bytes that are in the pipe, or of which the buffer has a copy
	sent   int // of them
	failed error
	bulk   bool // the last bytes were many, so the next are likely to be
	// giving is set while bytes are sent, and stays set if that fails.
	giving atomic.Bool
	// moved is how many bytes the other has taken so far.
	moved atomic.Uint64
}

func newMover(to, from *Conn, pipes *share) *mover {
	m := &mover{pipes: pipes, from: from.raw, to: to.raw}
	m.take, m.give = m.receive, m.send // once, and not for each chunk
	return m
}

// errPaused is the error of a mover that a deadline of its sockets has stopped. It can run again.
var errPaused = errors.New("paused")

// run moves bytes until their end. After errPaused, what is between the ends is in the pipe, of which left tells.
func (m *mover) run() error {
	for {
		n, err := m.chunk()
		m.moved.Add(uint64(n))
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return errPaused
		case err != nil:
			return fmt.Errorf("pass on bytes: %w", err)
		}
	}
}

// left returns how many bytes are in the pipe of a paused mover.
func (m *mover) left() int {
	if m.pipe == nil {
		return 0
	}
	return m.n - m.sent
}

// chunk moves what is there, and waits for something first. What was in the pipe when it was paused comes first. The
// error is io.EOF at the end.
func (m *mover) chunk() (moved int, err error) {
	defer func() {
		if m.left() == 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			m.drop()
		}
	}()
	if m.pipe == nil {
		m.n, m.sent, m.failed = 0, 0, nil
		if err := m.from.Read(m.take); err != nil || m.failed != nil {
			return 0, cmp.Or(m.failed, err)
		}
		if m.n == 0 {
			return 0, io.EOF
		}
	}
	before := m.sent
	m.giving.Store(true)
	if err := m.to.Write(m.give); err != nil || m.failed != nil {
		return m.sent - before, cmp.Or(m.failed, err)
	}
	m.giving.Store(false)
	if m.buffer == nil {
		return m.sent - before, nil
	}
	// What was copied is still there, so this does not wait, and no deadline may stop it.
	err = m.from.Control(func(fd uintptr) { _, m.failed = receive(int(fd), m.buffer[:m.sent], unix.MSG_TRUNC) })
	return m.sent, cmp.Or(m.failed, err)
}

// receive takes what an end has sent into a pipe, or a copy of it into a buffer. It returns false if there
// is nothing.
func (m *mover) receive(fd uintptr) (done bool) {
	if !m.bulk {
		m.peek(fd, short)
		m.bulk = m.n == short // there may be more
	}
	if m.bulk {
		if !m.move(fd) {
			m.peek(fd, bufferSize)
		}
		m.bulk = m.n >= short || errors.Is(m.failed, unix.EAGAIN)
	}
	if !errors.Is(m.failed, unix.EAGAIN) {
		return true
	}
	m.failed = nil
	m.drop()
	return false
}

// peek copies up to so many bytes of what an end has sent, which stay there.
func (m *mover) peek(fd uintptr, most int) {
	if m.buffer == nil {
		m.buffer = buffers.Get().(*[bufferSize]byte)
	}
	m.n, m.failed = receive(int(fd), m.buffer[:most], unix.MSG_PEEK)
}

// move takes what an end has sent into a pipe. It returns false if there is no pipe, or nothing that could be moved: at
// the end of what is sent, or with urgent data at the front, which splice does not go past.
func (m *mover) move(fd uintptr) (moved bool) {
	one := m.pipes.get()
	if one == nil {
		return false
	}
	m.drop() // a copy of it
	m.pipe = one
	m.n, m.failed = splice(int(fd), m.pipe.in, maxChunk)
	if m.n == 0 && (m.failed == nil || errors.Is(m.failed, unix.EAGAIN)) {
		m.drop()
		return false
	}
	return true
}

// send gives the other end what receive has taken. It returns false if that end takes no more for now.
func (m *mover) send(fd uintptr) (done bool) {
	switch {
	case m.pipe != nil:
		for m.sent < m.n && m.failed == nil {
			var n int
			n, m.failed = splice(m.pipe.out, int(fd), m.n-m.sent)
			m.sent += n
		}
	case m.buffer != nil:
		m.sent, m.failed = send(int(fd), m.buffer[:m.n])
	default: // there was no room, and now is: what was copied is still with the receiver
		return true
	}
	if !errors.Is(m.failed, unix.EAGAIN) {
		return true
	}
	m.failed = nil
	if m.buffer != nil {
		m.drop()
	}
	return false
}

// drop gives the pipe or the buffer back.
func (m *mover) drop() {
	switch {
	case m.pipe == nil:
	case m.pipe.inherited:
		m.pipe.close()
	default:
		m.pipes.put(m.pipe, m.sent == m.n)
	}
	m.pipe = nil
	if m.buffer != nil {
		buffers.Put(m.buffer)
		m.buffer = nil
	}
}

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// splice does not block, and returns 0 with an error.
func splice(from, to, n int) (moved int, err error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if err != unix.EINTR {
			return max(int(n), 0), err
		}
	}
}

// pipe is a pipe of the kernel. One that is inherited is the end to read from alone, of a pipe of the relay's
// predecessor, and belongs to no share.
type pipe struct {
	out, in   int
	inherited bool
}

// pipes are those that are not in use, and how many there are. It is safe for concurrent use.
type pipes struct {
	most int
	mu   sync.Mutex
	made int
	free []*pipe
	// used are how many each namespace has, each Service, and each client of a Service.
	used map[share]int
}

// share is what one client of a Service, the Service, or its namespace has of the pipes.
type share struct {
	pipes     *pipes
	namespace string
	service   *service   // nil for the whole namespace
	client    netip.Addr // not valid for the whole Service
}

func newPipes(most int) *pipes { return &pipes{most: most, used: map[share]int{}} }

// of returns the share of a client of a Service.
func (p *pipes) of(s *service, client netip.Addr) *share {
	return &share{p, s.key.Namespace, s, clientOf(client)}
}

func (s share) ofService() share {
	return share{pipes: s.pipes, namespace: s.namespace, service: s.service}
}

func (s share) ofNamespace() share { return share{pipes: s.pipes, namespace: s.namespace} }

func (s share) levels() [3]share { return [3]share{s, s.ofService(), s.ofNamespace()} }

// get returns an empty pipe; nil if none can be made, or others shall have those that are left. A reader that
// does not read holds its pipe, so a Service gets one only as long as it has fewer than are left, a client as long
// as it has fewer than half of that, and a namespace as long as it has fewer than four times as many. So no Service
// gets them all, nor do several of a namespace.
func (s share) get() *pipe {
	p := s.pipes
	p.mu.Lock()
	defer p.mu.Unlock()
	left := p.most - (p.made - len(p.free))
	if p.used[s.ofNamespace()] >= 4*left || p.used[s.ofService()] >= left || 2*p.used[s] >= left {
		return nil
	}
	var one *pipe
	if n := len(p.free); n > 0 {
		one = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		var fds [2]int
		if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
			return nil
		}
		one = &pipe{out: fds[0], in: fds[1]}
		p.made++
	}
	for _, of := range s.levels() {
		p.used[of]++
	}
	return one
}

// put takes a pipe back, and closes it if it is not empty.
func (s share) put(one *pipe, empty bool) {
	p := s.pipes
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, of := range s.levels() {
		if p.used[of]--; p.used[of] == 0 {
			delete(p.used, of)
		}
	}
	if empty {
		p.free = append(p.free, one)
		return
	}
	p.made--
	one.close()
}

// close closes the pipes, none of which is in use.
func (p *pipes) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.free {
		one.close()
	}
	p.free, p.made = nil, 0
}

func (p *pipe) close() {
	unix.Close(p.out)
	if !p.inherited {
		unix.Close(p.in)
	}
}
