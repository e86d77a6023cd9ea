package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a netlink socket that asks and is answered. It belongs to one goroutine.
type socket struct {
	fd   int
	seq  uint32
	buf  []byte
	port uint32
}

const (
	// answerWithin is how long the kernel may take for a transaction.
	answerWithin = 20 * time.Second
	// sendBuffer has to hold a whole transaction. Without the right to have it, the kernel gives some
	// 400 KiB, which is enough for transactions of maxOperations.
	sendBuffer    = 16 << 20
	receiveBuffer = 4 << 20
	// datagram is how much the kernel puts into one answer to a dump at most, and more.
	datagram = 128 << 10
)

// errUnanswered means that it is not known whether a transaction has happened.
var errUnanswered = errors.New("the kernel did not answer")

// open opens a socket in the network namespace of the calling thread.
func open() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	s := &socket{fd: fd, buf: make([]byte, datagram), seq: 1}
	if err := s.prepare(); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("prepare a netlink socket: %w", err)
	}
	return s, nil
}

func (s *socket) prepare() error {
	if err := unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	name, err := unix.Getsockname(s.fd)
	if err != nil {
		return err
	}
	if nl, ok := name.(*unix.SockaddrNetlink); ok {
		s.port = nl.Pid
	}
	if unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) != nil {
		_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sendBuffer) // as much as one may
	}
	if unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
	// Errors shall come with a text, and without the message that they are about.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	timeout := unix.NsecToTimeval(answerWithin.Nanoseconds())
	return unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout)
}

func (s *socket) close() { unix.Close(s.fd) }

// send gives the messages numbers of their own, asks for an acknowledgement of the one at place ask
// (none if negative), and sends.
func (s *socket) send(m *messages, ask int) (first uint32, err error) {
	first = s.seq
	at := 0
	for i := range m.about {
		binary.NativeEndian.PutUint32(m.buf[at+8:], first+uint32(i))
		if i == ask {
			flags := binary.NativeEndian.Uint16(m.buf[at+6:])
			binary.NativeEndian.PutUint16(m.buf[at+6:], flags|unix.NLM_F_ACK)
		}
		at += int(binary.NativeEndian.Uint32(m.buf[at:]))
	}
	s.seq += uint32(len(m.about))
	if err := unix.Sendto(s.fd, m.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, fmt.Errorf("send to netfilter: %w", err)
	}
	return first, nil
}

// transact sends a transaction and waits for the kernel's word on it.
func (s *socket) transact(m *messages) error {
	last := len(m.about) - 2 // the one before the end
	first, err := s.send(m, last)
	if err != nil {
		return err
	}
	var failure error
	for {
		done := false
		err := s.receive(func(msg netlinkMessage) error {
			place := int(msg.seq - first)
			if msg.kind != unix.NLMSG_ERROR || place < 0 || place >= len(m.about) {
				return nil // an answer to something that was given up
			}
			if err := msg.failure(); err != nil && failure == nil {
				failure = fmt.Errorf("%s: %w", m.about[place], err)
			}
			done = done || place == last
			return nil
		})
		switch {
		case err != nil:
			return errors.Join(failure, err)
		case done:
			return failure
		}
	}
}

// netlinkMessage is one message that was received; its data is valid only until the next one.
type netlinkMessage struct {
	kind, flags uint16
	seq, port   uint32
	data        []byte
}

// receive reads one datagram and passes its messages on.
func (s *socket) receive(each func(netlinkMessage) error) error {
	var n int
	var err error
	for {
		if n, _, err = unix.Recvfrom(s.fd, s.buf, 0); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errUnanswered, err)
	}
	return split(s.buf[:n], each)
}

// split passes on the messages of a datagram.
func split(b []byte, each func(netlinkMessage) error) error {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return fmt.Errorf("a netlink message of %d bytes in a datagram of %d", size, len(b))
		}
		m := netlinkMessage{
			kind: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]),
			seq:  binary.NativeEndian.Uint32(b[8:]),
			port: binary.NativeEndian.Uint32(b[12:]), data: b[unix.NLMSG_HDRLEN:size],
		}
		if err := each(m); err != nil {
			return err
		}
		b = b[min(len(b), (size+3)&^3):]
	}
	return nil
}

// failure reads an error or acknowledgement; nil for the latter.
func (m netlinkMessage) failure() error {
	if len(m.data) < 4 {
		return errors.New("an error without a number")
	}
	number := int32(binary.NativeEndian.Uint32(m.data))
	if number == 0 {
		return nil
	}
	errno := unix.Errno(-number)
	const hasTexts, text = 0x200, 1 // NLM_F_ACK_TLVS, NLMSGERR_ATTR_MSG
	if m.flags&hasTexts != 0 && len(m.data) > 4+unix.NLMSG_HDRLEN {
		if said := attribute(m.data[4+unix.NLMSG_HDRLEN:], text); len(said) > 1 {
			return fmt.Errorf("%w (%s)", errno, said[:len(said)-1])
		}
	}
	return errno
}

// errInterrupted means that the table changed while it was being listed.
var errInterrupted = errors.New("the listing was interrupted by a change")

// dump asks for a listing and passes its parts on, without the header of netfilter.
func (s *socket) dump(m *messages, each func(data []byte) error) error {
	first, err := s.send(m, -1)
	if err != nil {
		return err
	}
	interrupted, done := false, false
	var failure error
	for !done {
		err := s.receive(func(msg netlinkMessage) error {
			switch {
			case msg.seq != first:
				return nil
			case msg.kind == unix.NLMSG_ERROR:
				done, failure = true, msg.failure()
				return nil
			}
			interrupted = interrupted || msg.flags&unix.NLM_F_DUMP_INTR != 0
			if msg.kind == unix.NLMSG_DONE {
				done = true
				if len(msg.data) >= 4 {
					failure = msg.failure()
				}
				return nil
			}
			if failure == nil && len(msg.data) >= 4 {
				failure = each(msg.data[4:])
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if interrupted || errors.Is(failure, unix.EINTR) {
		return errInterrupted
	}
	return failure
}
