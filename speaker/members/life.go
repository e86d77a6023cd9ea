package members

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
)

// Each process of memberlist counts its incarnations from 1, and the others forget a member half a minute after it
// has left. What an earlier process of a node said, its leave above all, would then hold for the next one: whoever
// has recorded it could end a live member with it, without the key. So this process counts from the time of its
// start: memberlist refutes a suspicion by counting on from the incarnation that it names.

const (
	typeSuspect = 3 // memberlist's type of a suspicion
	// refutation begins the line that memberlist logs when it has refuted one: nothing else tells of that.
	refutation = "Refuting a suspect message"
	// ageTimeout bounds the wait for it, each of ageTries times. It takes microseconds.
	ageTimeout, ageTries = time.Second, 3
)

// transport is a network into which a packet can be put as if it had been received.
type transport interface {
	memberlist.NodeAwareTransport
	inject(*memberlist.Packet)
}

// incarnation returns the number with which a process begins that was started then, larger than that of each earlier
// one: a second has fewer refutations than it would take to reach the next.
func incarnation(born time.Time) uint32 {
	return uint32(min(max(0, born.Unix()), 1<<32-1<<16)) // which leaves room to count on
}

// ageing returns the packet that has this node's memberlist count from the time of its start: a suspicion against
// itself, in MessagePack.
func (m *Members) ageing(from netip.AddrPort, label string) (*memberlist.Packet, error) {
	text := func(b []byte, s string) []byte {
		return append(binary.BigEndian.AppendUint16(append(b, 0xda), uint16(len(s))), s...)
	}
	message := text([]byte{typeSuspect, 0x83}, "Incarnation")
	message = binary.BigEndian.AppendUint32(append(message, 0xce), incarnation(m.opts.Born))
	message = text(text(text(text(message, "Node"), m.opts.Self), "From"), m.opts.Self)
	if m.keys != nil {
		var err error
		if message, err = seal(m.keys.GetPrimaryKey(), message, []byte(label)); err != nil {
			return nil, fmt.Errorf("encrypt the first gossip message: %w", err)
		}
	}
	head := append([]byte{typeLabel, byte(len(label))}, label...)
	return &memberlist.Packet{Buf: append(head, message...), From: net.UDPAddrFromAddrPort(from), Timestamp: time.Now()},
		nil
}

// refuted notes that memberlist counts on from a suspicion.
func (m *Members) refuted() { m.ageOnce.Do(func() { close(m.aged) }) }

// age has memberlist count from the time of this process's start, and waits until it does: before that nobody may
// be told of it. memberlist drops packets when there are too many.
func (m *Members) age(over transport, packet *memberlist.Packet) {
	for range ageTries {
		over.inject(&memberlist.Packet{Buf: slices.Clone(packet.Buf), From: packet.From, Timestamp: time.Now()})
		select {
		case <-m.aged:
			return
		case <-time.After(ageTimeout):
		}
	}
	m.opts.Log.Warn("recorded gossip of earlier processes of this node may count", "waited", ageTries*ageTimeout)
}

// seal encrypts a message as memberlist does.
func seal(key, message, data []byte) ([]byte, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, gcm.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	return gcm.Seal(append([]byte{encryptionVersion}, nonce...), nonce, message, data), nil
}

// inject hands on a packet as if it had been received.
func (n *network) inject(p *memberlist.Packet) {
	select {
	case n.packets <- p:
	case <-n.done:
	}
}

// told notes that a whole state came that could be read. It may have come by a connection that another
// opened, and then be a recorded one: so this node asks a live one itself before it counts as joined.
func (m *Members) told() {
	m.mu.Lock()
	joined := m.joined
	m.wasTold = true
	m.mu.Unlock()
	if !joined {
		m.seek.Poke()
	}
}
