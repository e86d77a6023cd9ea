package l2

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/mdlayher/packet"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Drop is why a packet gets no answer.
type Drop string

// The reasons to leave a packet without an answer; the empty one means that it is answered.
const (
	dropNone       Drop = ""
	dropMalformed  Drop = "malformed"   // not ARP for IPv4 over Ethernet, nor a solicitation or advertisement
	dropNotRequest Drop = "not-request" // a reply
	// neither broadcast nor addressed to this interface: seen because a program listens to everything
	dropNotForUs  Drop = "not-for-us"
	dropBadSender Drop = "bad-sender" // an answer would go to all, or to ourselves
	dropAnnounced Drop = "announced"  // a gratuitous request: somebody tells where an address is, and asks nothing
	dropNotOurs   Drop = "not-ours"   // this node does not answer for the address
	dropAsleep    Drop = "asleep"     // the process was frozen, and has not found out yet what is its own
	dropOverrun   Drop = "overrun"    // more came than are taken, and the kernel had no room for it
)

// responder answers for VIPs of one family on one interface.
type responder interface {
	answer(w *work) // from now on, exactly what it names is answered for or looked after
	announce(vip netip.Addr) error
	probe(vip netip.Addr) error // ask who holds the VIP
	serve() error               // until close
	close()
}

// frame is a received packet.
type frame interface {
	// answer returns the frame that answers it, and for which address, or why there is none.
	answer(own net.HardwareAddr, answers func(netip.Addr) bool) (reply []byte, asked netip.Addr, drop Drop)
	// uses returns which of the addresses that are looked after another device uses, as the packet shows.
	uses(own net.HardwareAddr, listens listening) (vip netip.Addr, mac net.HardwareAddr, ok bool)
}

// listening reports whether an address is answered for, and whether it is looked after at all.
type listening func(netip.Addr) (answered, listens bool)

// base is what the responders have in common.
type base struct {
	i    lb.Interface
	conn net.PacketConn
	around
	work atomic.Pointer[work]
}

// around is what the responders are given.
type around struct {
	stat Stats
	seen func(netip.Addr, net.HardwareAddr) // takes note of a device that uses a VIP
	// awake reports whether what this node answers for was decided since it was last frozen.
	awake  func() bool
	pulses *loop.Pulses // while it takes in a frame
}

func (b *base) answer(w *work) { b.work.Store(w) }

func (b *base) listens(vip netip.Addr) (answered, listens bool) {
	if w := b.work.Load(); w != nil {
		return w.listens(vip)
	}
	return false, false
}

func (b *base) answers(vip netip.Addr) bool {
	answered, _ := b.listens(vip)
	return answered
}

func (b *base) close() { b.conn.Close() }

// send sends a frame to the address that stands in it.
func (b *base) send(frame []byte) error {
	_, err := b.conn.WriteTo(frame, &packet.Addr{HardwareAddr: net.HardwareAddr(frame[:6])})
	return err
}

// sendProbe sends a question for a VIP, unless it could not be made.
func (b *base) sendProbe(vip netip.Addr, frame []byte, err error) error {
	if err == nil {
		err = b.send(frame)
	}
	if err != nil {
		return fmt.Errorf("probe %s: %w", vip, err)
	}
	return nil
}

// sendNews sends announcements of a VIP, unless they could not be made.
func (b *base) sendNews(vip netip.Addr, frames [][]byte, err error) error {
	for i := 0; err == nil && i < len(frames); i++ {
		if err = b.send(frames[i]); err == nil {
			b.stat.Gratuitous(b.i.Name, vip)
		}
	}
	if err != nil {
		return fmt.Errorf("announce %s: %w", vip, err)
	}
	return nil
}

// overrunInterval is how often the kernel is asked for how many packets it had no room.
const overrunInterval = time.Second

// overruns counts the packets for which the kernel had no room since it was last asked.
func (b *base) overruns() {
	conn, ok := b.conn.(interface{ Stats() (*packet.Stats, error) })
	if !ok {
		return
	}
	if stats, err := conn.Stats(); err == nil && stats.Drops > 0 {
		b.stat.Dropped(b.i.Name, dropOverrun, int(stats.Drops))
	}
}

// serve answers frames of a protocol, up to a size, that read can take apart.
func serve[F frame](b *base, protocol string, size int, read func([]byte) (F, bool)) error {
	buf := make([]byte, size)
	var counted time.Time
	for {
		n, _, err := b.conn.ReadFrom(buf)
		if err != nil {
			return fmt.Errorf("receive %s: %w", protocol, err)
		}
		if now := time.Now(); now.Sub(counted) >= overrunInterval {
			b.overruns()
			counted = now
		}
		if err := take(b, read, buf[:n]); err != nil {
			return err
		}
	}
}

// take answers a frame, if it is to be answered. The error is nil as long as others can be.
func take[F frame](b *base, read func([]byte) (F, bool), received []byte) error {
	defer b.pulses.Begin()()
	frame, ok := read(received)
	if !ok {
		b.stat.Dropped(b.i.Name, dropMalformed, 1)
		return nil
	}
	if vip, mac, ok := frame.uses(b.i.MAC, b.listens); ok {
		b.seen(vip, mac)
	}
	reply, asked, drop := frame.answer(b.i.MAC, b.answers)
	if drop == dropNone && !b.awake() {
		drop = dropAsleep
	}
	if drop != dropNone {
		b.stat.Dropped(b.i.Name, drop, 1)
		return nil
	}
	b.stat.Request(b.i.Name, asked)
	switch err := b.send(reply); {
	case errors.Is(err, net.ErrClosed):
		return err
	case err == nil: // else a full queue, say: the client asks again
		b.stat.Reply(b.i.Name, asked)
	}
	return nil
}
