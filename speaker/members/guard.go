package members

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// With encryption, two kinds of messages are kept from memberlist, each of which would end the
// program: those of encryption version 0 whose padding is wrong, and streams that are empty once
// decrypted. Whoever sends one has the key.
//
// Of the bytes on the wire, as memberlist writes them: before an encrypted message may come a label
// header, its type, the length of the label and the label. A stream then has the type of encrypted
// messages and their length; in a packet both are missing. The message begins with the version of
// the encryption, and has a nonce and a tag beside the text.
const (
	typeLabel         = 244
	typeEncrypted     = 10
	encryptionVersion = 1
	encryptedEmpty    = 1 + 12 + 16
)

var (
	errNoText = errors.New("an encrypted stream without a text, or of a version that no speaker writes")
	errNoRoom = errors.New("too much is being read of which it is not known who has sent it")
)

// memberlist reads a message, of up to 20 MiB, before the key shows who has sent it. So all of them together have a
// bound, besides those of up to smallMessage: maxOfNodes for those from addresses of nodes, as those of pods may leave
// with the address of their node, and maxUnproven for others, several times the state of 1,000 nodes with 10,000 VIPs.
const (
	maxUnproven  = 8 << 20
	maxOfNodes   = 64 << 20
	smallMessage = 64 << 10
)

// budget is what is used of the most that there may be.
type budget struct {
	most int64
	used atomic.Int64
}

// take takes so much, and reports whether there was as much.
func (b *budget) take(size int64) bool {
	if b.used.Add(size) <= b.most {
		return true
	}
	b.used.Add(-size)
	return false
}

func (b *budget) give(size int64) { b.used.Add(-size) }

// versionOf returns the version of the encryption of a packet; 0 if it is too short to have one.
func versionOf(packet []byte) byte {
	if len(packet) > 1 && packet[0] == typeLabel {
		packet = packet[min(len(packet), 2+int(packet[1])):]
	}
	if len(packet) == 0 {
		return 0
	}
	return packet[0]
}

// stream is a connection whose first message is looked at before it is read.
type stream struct {
	net.Conn
	budget  *budget // that has room for the message; nil for a client that needs none
	leave   func()  // at the end; nil for nothing
	empty   func()  // called when the other end has closed it before anything came; nil for nothing
	closed  sync.Once
	size    int64 // of the room
	begun   bool  // Read was called
	looked  bool
	refused error
	head    []byte // what was looked at, and is to be read yet
}

// Read is called by one goroutine at a time.
func (s *stream) Read(b []byte) (int, error) {
	n, err := s.read(b)
	if !s.begun && s.empty != nil && n == 0 && closedEmpty(err) {
		s.empty()
	}
	s.begun = true
	return n, err
}

func (s *stream) read(b []byte) (int, error) {
	if !s.looked {
		s.looked, s.refused = true, s.look()
	}
	if s.refused != nil {
		return 0, s.refused
	}
	if len(s.head) > 0 {
		n := copy(b, s.head)
		s.head = s.head[n:]
		return n, nil
	}
	return s.Conn.Read(b)
}

// look reads the head of the stream, as far as it comes, and returns an error if memberlist must
// not see the rest. What is missing of it, memberlist finds out.
func (s *stream) look() error {
	if !s.more(1) {
		return nil
	}
	at := 0
	if s.head[0] == typeLabel {
		if !s.more(1) || !s.more(int(s.head[1])+1) {
			return nil
		}
		at = len(s.head) - 1
	}
	if s.head[at] != typeEncrypted || !s.more(5) {
		return nil
	}
	rest := s.head[at+1:]
	size := int64(binary.BigEndian.Uint32(rest))
	if size <= encryptedEmpty || rest[4] != encryptionVersion {
		s.head = nil
		return errNoText
	}
	if s.budget != nil && size > smallMessage {
		if !s.budget.take(size) {
			s.head = nil
			return errNoRoom
		}
		s.size = size
	}
	return nil
}

// Close closes the connection. It is called after the last Read.
func (s *stream) Close() error {
	if s.leave != nil {
		s.closed.Do(s.leave)
	}
	return s.Conn.Close()
}

// more reads n more bytes of the head, and reports whether all of them came.
func (s *stream) more(n int) bool {
	b := make([]byte, n)
	read, err := io.ReadFull(s.Conn, b)
	s.head = append(s.head, b[:read]...)
	return err == nil
}
