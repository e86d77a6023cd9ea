package nfnetlink

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// answerWithin is how long the kernel may take for an answer.
	answerWithin = 20 * time.Second
	// sendBuffer has to hold a whole transaction. Without the right to have it, the kernel gives some
	// 400 KiB, which is enough for the transactions of the nftables dialect.
	sendBuffer    = 16 << 20
	receiveBuffer = 4 << 20
	// datagram is more than the kernel puts into one answer to a dump.
	datagram = 128 << 10
)

// Errors of a Conn.
var (
	// ErrUnanswered means that it is not known whether the request has happened.
	ErrUnanswered = errors.New("the kernel did not answer")
	// ErrInterrupted means that what was listed changed while the kernel listed it.
	ErrInterrupted = errors.New("a change interrupted the listing")
)

// Conn is a netlink socket that asks and is answered. It is not safe for concurrent use.
type Conn struct {
	fd   int
	seq  uint32
	buf  []byte
	port uint32
}

// Open opens a socket in the network namespace of the calling thread.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	c := &Conn{fd: fd, buf: make([]byte, datagram), seq: 1}
	if err := c.prepare(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("prepare a netlink socket: %w", err)
	}
	return c, nil
}

func (c *Conn) prepare() error {
	if err := unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	name, err := unix.Getsockname(c.fd)
	if err != nil {
		return err
	}
	if nl, ok := name.(*unix.SockaddrNetlink); ok {
		c.port = nl.Pid
	}
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
		_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer) // as much as one may
	}
	growReceiveBuffer(c.fd)
	// Errors shall come with a text, and without the message that they are about.
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	timeout := unix.NsecToTimeval(answerWithin.Nanoseconds())
	return errors.Join(unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout))
}

func growReceiveBuffer(fd int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
}

// Close closes the socket.
func (c *Conn) Close() { unix.Close(c.fd) }

// Port returns the socket's number, which events of what it did carry.
func (c *Conn) Port() uint32 { return c.port }

// send gives the messages numbers of their own, asks for an acknowledgement of the one at place ask
// (none if negative), and sends.
func (c *Conn) send(m *Messages, ask int) (first uint32, err error) {
	first = c.seq
	m.number(first, ask)
	c.seq += uint32(m.Len())
	if err := unix.Sendto(c.fd, m.Attributes, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, fmt.Errorf("send to netfilter: %w", err)
	}
	return first, nil
}

// receive reads one datagram and passes its messages on.
func (c *Conn) receive(each func(Message) error) error {
	var n int
	var err error
	for {
		if n, _, err = unix.Recvfrom(c.fd, c.buf, 0); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnanswered, err)
	}
	return split(c.buf[:n], each)
}

// Transact makes a transaction, which is between Begin and End, and returns when the kernel has
// confirmed or refused it. The error of a refusal says which message the kernel refused first.
func (c *Conn) Transact(m *Messages) error {
	last := m.Len() - 2 // the one before the end
	if last < 1 {
		return nil
	}
	return c.first(m, last, nil)
}

// Request makes a single request, passes on the messages that the kernel answers with (each may be
// nil), and returns when the kernel has confirmed or refused it.
func (c *Conn) Request(m *Messages, each func(Message)) error { return c.first(m, 0, each) }

// Ask makes several requests, which do not depend on each other. It passes on the messages that the
// kernel answers with, and its refusals, with the place of the request that they are for.
func (c *Conn) Ask(m *Messages, each func(place int, msg Message), refused func(place int, err error)) error {
	return c.ask(m, m.Len()-1, each, refused)
}

// first is ask for one error, the first.
func (c *Conn) first(m *Messages, last int, each func(Message)) error {
	var failure error
	err := c.ask(m, last, func(_ int, msg Message) {
		if each != nil {
			each(msg)
		}
	}, func(place int, err error) {
		if failure == nil {
			failure = fmt.Errorf("%s: %w", m.about[place], err)
		}
	})
	if err != nil {
		return errors.Join(failure, err)
	}
	return failure
}

// ask sends messages, and waits for the acknowledgement of the one at place last.
func (c *Conn) ask(m *Messages, last int, each func(int, Message), refused func(int, error)) error {
	first, err := c.send(m, last)
	if err != nil {
		return err
	}
	for {
		done := false
		err := c.receive(func(msg Message) error {
			place := int(msg.seq - first)
			switch {
			case place < 0 || place >= m.Len(): // an answer to something that was given up
			case msg.Kind != unix.NLMSG_ERROR:
				each(place, msg)
			default:
				if err := msg.failure(); err != nil {
					refused(place, err)
				}
				done = done || place == last
			}
			return nil
		})
		if err != nil || done {
			return err
		}
	}
}

// Dump makes a single request, which has the flag NLM_F_DUMP, and passes the listed messages on.
// After ErrInterrupted what was passed on is neither what was there before the change nor after.
func (c *Conn) Dump(m *Messages, each func(Message) error) error {
	first, err := c.send(m, -1)
	if err != nil {
		return err
	}
	interrupted, done := false, false
	var failure error
	for !done {
		err := c.receive(func(msg Message) error {
			switch {
			case msg.seq != first:
				return nil
			case msg.Kind == unix.NLMSG_ERROR:
				done, failure = true, msg.failure()
				return nil
			}
			interrupted = interrupted || msg.Flags&unix.NLM_F_DUMP_INTR != 0
			if msg.Kind == unix.NLMSG_DONE {
				done = true
				if len(msg.Data) >= 4 {
					failure = msg.failure()
				}
				return nil
			}
			if failure == nil && len(msg.Data) >= familyBytes {
				failure = each(msg)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if interrupted || errors.Is(failure, unix.EINTR) {
		return ErrInterrupted
	}
	return failure
}

// tries is how often a listing that was interrupted is repeated before the caller's backoff takes
// over. Every transaction on the machine interrupts.
const tries = 10

// Complete calls list, which makes one or several dumps, until no change has interrupted it.
func Complete(list func() error) error {
	var err error
	for range tries {
		if err = list(); !errors.Is(err, ErrInterrupted) {
			return err
		}
	}
	return err
}
