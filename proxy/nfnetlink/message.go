// Package nfnetlink is the way to the kernel's netfilter: nftables and connection tracking.
//
// It has the one netlink socket of the proxy that asks, the one that listens, and the one reader
// and writer of netlink attributes (RFC 3549; linux/netlink.h, linux/netfilter/nfnetlink.h). What
// the messages of a subsystem hold is for others: nft knows nftables, conntrack knows flows.
// Interfaces, addresses, routes and neighbors are in internal/links.
package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// familyBytes is the length of netfilter's header, struct nfgenmsg.
const familyBytes = 4

// Messages are messages in the form in which they are sent. The attributes of the last one are
// appended with the methods of Attributes.
type Messages struct {
	Attributes
	// about says of each message what it is for, by its place.
	about []string
}

// Len returns how many messages there are.
func (m *Messages) Len() int { return len(m.about) }

// Add appends a message. kind holds the subsystem in its high byte. body appends the message's
// attributes, and about says in errors what the message was for.
func (m *Messages) Add(kind, flags uint16, family byte, about string, body func()) {
	start := m.open(kind, flags, family, 0, about)
	body()
	m.close(start)
}

// Begin opens a transaction of a subsystem: all messages up to End happen, or none does.
func (m *Messages) Begin(subsystem uint16) { m.frame(unix.NFNL_MSG_BATCH_BEGIN, subsystem) }

// End closes what Begin has opened.
func (m *Messages) End(subsystem uint16) { m.frame(unix.NFNL_MSG_BATCH_END, subsystem) }

func (m *Messages) frame(kind, subsystem uint16) {
	m.close(m.open(kind, 0, unix.AF_UNSPEC, subsystem, "transaction"))
}

func (m *Messages) open(kind, flags uint16, family byte, resource uint16, about string) (start int) {
	start = len(m.Attributes)
	b := binary.NativeEndian.AppendUint32(m.Attributes, 0) // the length
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	b = binary.NativeEndian.AppendUint32(b, 0) // the sequence number, from the socket
	b = binary.NativeEndian.AppendUint32(b, 0) // the port, from the kernel
	b = append(b, family, unix.NFNETLINK_V0)
	m.Attributes = binary.BigEndian.AppendUint16(b, resource)
	m.about = append(m.about, about)
	return start
}

func (m *Messages) close(start int) {
	binary.NativeEndian.PutUint32(m.Attributes[start:], uint32(len(m.Attributes)-start))
}

// number gives the messages sequence numbers from first on, and sets the flag that asks for an
// acknowledgement of the one at place ask (none if negative).
func (m *Messages) number(first uint32, ask int) {
	at := 0
	for i := range m.about {
		b := m.Attributes[at:]
		binary.NativeEndian.PutUint32(b[8:], first+uint32(i))
		if i == ask {
			binary.NativeEndian.PutUint16(b[6:], binary.NativeEndian.Uint16(b[6:])|unix.NLM_F_ACK)
		}
		at += int(binary.NativeEndian.Uint32(b))
	}
}

// Message is one message that was received. Its data is valid only until the next one.
type Message struct {
	Kind, Flags uint16
	// Port is the socket number of the sender for an event, of the receiver for an answer.
	Port uint32
	// Data is what follows the header of netlink.
	Data []byte
	seq  uint32
}

// Is reports whether the message is of a subsystem of netfilter.
func (m Message) Is(subsystem uint16) bool {
	return m.Kind>>8 == subsystem && len(m.Data) >= familyBytes
}

// Family returns the protocol family; the message must be of a subsystem.
func (m Message) Family() byte { return m.Data[0] }

// Attributes returns the attributes; the message must be of a subsystem.
func (m Message) Attributes() []byte { return m.Data[familyBytes:] }

// split passes on the messages of a datagram.
func split(b []byte, each func(Message) error) error {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return fmt.Errorf("a netlink message of %d bytes in a datagram of %d", size, len(b))
		}
		m := Message{
			Kind: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
			seq: binary.NativeEndian.Uint32(b[8:]), Port: binary.NativeEndian.Uint32(b[12:]),
			Data: b[unix.NLMSG_HDRLEN:size],
		}
		if err := each(m); err != nil {
			return err
		}
		b = b[min(len(b), (size+3)&^3):]
	}
	return nil
}

// failure reads an error or an acknowledgement; it returns nil for the latter.
func (m Message) failure() error {
	if len(m.Data) < 4 {
		return errors.New("an error without a number")
	}
	number := int32(binary.NativeEndian.Uint32(m.Data))
	if number == 0 {
		return nil
	}
	errno := unix.Errno(-number)
	const hasTexts, text = 0x200, 1 // NLM_F_ACK_TLVS, NLMSGERR_ATTR_MSG
	if m.Flags&hasTexts != 0 && len(m.Data) > 4+unix.NLMSG_HDRLEN {
		if said := GetText(m.Data[4+unix.NLMSG_HDRLEN:], text); said != "" {
			return fmt.Errorf("%w (%s)", errno, said)
		}
	}
	return errno
}
