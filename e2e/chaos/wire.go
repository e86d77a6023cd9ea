package chaos

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"

	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	typeARP  = 0x0806
	typeIPv6 = 0x86dd
	// most is how long answers on the LAN are waited for; surplus how long after all that were expected have come.
	mostWait, surplusWait = 3 * time.Second, 200 * time.Millisecond
	// staleWait is how long it takes to read what came before.
	staleWait = 50 * time.Millisecond
)

var broadcast = net.HardwareAddr{255, 255, 255, 255, 255, 255}

// wire is the near client's end of the LAN.
type wire struct {
	arp *packet.Conn
	ndp *ndp.Conn
	mac net.HardwareAddr
	own netip.Addr
	// link is the client's link-local address.
	link netip.Addr
}

func openWire(l *lab.Lab) (*wire, error) {
	w := &wire{own: l.Cluster().LAN.Client}
	err := l.In(lab.ClientName, func() error {
		i, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		w.mac = i.HardwareAddr
		// By its number: Go remembers for a minute which number a name has, be it of the lab before.
		numbered := *i
		numbered.Name = strconv.Itoa(i.Index)
		if w.ndp, w.link, err = ndp.Listen(&numbered, ndp.LinkLocal); err != nil {
			return err
		}
		w.arp, err = packet.Listen(i, packet.Raw, typeARP, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("the client's end of the LAN: %w", err)
	}
	return w, nil
}

func (w *wire) close() error { return errors.Join(w.arp.Close(), w.ndp.Close()) }

// arpFrame returns an ARP packet of the client's to all.
func (w *wire) arpFrame(operation uint16, from, target netip.Addr) []byte {
	b := append(append([]byte{}, broadcast...), w.mac...)
	b = binary.BigEndian.AppendUint16(b, typeARP)
	b = append(b, 0, 1, 8, 0, 6, 4)
	b = binary.BigEndian.AppendUint16(b, operation)
	b = append(append(b, w.mac...), from.AsSlice()...)
	b = append(append(b, make([]byte, 6)...), target.AsSlice()...)
	return append(b, make([]byte, 60-len(b))...)
}

func (w *wire) send(frame []byte) error {
	_, err := w.arp.WriteTo(frame, &packet.Addr{HardwareAddr: net.HardwareAddr(frame[:6])})
	return err
}

// forget drops what was heard before, such as the announcements of an owner that has changed since.
func (w *wire) forget() error {
	return w.read(time.Now().Add(staleWait), func(netip.Addr, net.HardwareAddr) {})
}

// heard asks for addresses, of both families, and returns who answers for each. It waits for an answer of those in
// expected, and a moment longer for those of others.
func (w *wire) heard(addrs, expected []netip.Addr) (map[netip.Addr][]string, error) {
	answers := map[netip.Addr][]string{}
	missing := slices.Clone(expected)
	note := func(a netip.Addr, mac net.HardwareAddr) {
		if !slices.Contains(addrs, a) {
			return // its kernel asks too, for a node
		}
		if text := mac.String(); !slices.Contains(answers[a], text) {
			answers[a] = append(answers[a], text)
		}
		missing = slices.DeleteFunc(missing, func(m netip.Addr) bool { return m == a })
	}
	for deadline := time.Now().Add(mostWait); ; {
		if err := w.ask(addrs); err != nil {
			return nil, err
		}
		for until := time.Now().Add(surplusWait); time.Now().Before(until); {
			if err := w.read(until, note); err != nil {
				return nil, err
			}
		}
		if len(missing) == 0 || time.Now().After(deadline) {
			return answers, nil
		}
	}
}

func (w *wire) ask(addrs []netip.Addr) error {
	for _, a := range addrs {
		if a.Is4() {
			if err := w.send(w.arpFrame(1, w.own, a)); err != nil {
				return err
			}
			continue
		}
		frame, err := w.solicitation(a)
		if err != nil {
			return err
		}
		if err := w.send(frame); err != nil {
			return err
		}
	}
	return nil
}

// solicitation asks for an IPv6 address. It is a frame, as a socket would look for the interface in the namespace of
// the thread that it is used from.
func (w *wire) solicitation(a netip.Addr) ([]byte, error) {
	group, err := ndp.SolicitedNodeMulticast(a)
	if err != nil {
		return nil, err
	}
	link := w.link.WithZone("")
	message, err := ndp.MarshalMessageChecksum(&ndp.NeighborSolicitation{TargetAddress: a, Options: []ndp.Option{
		&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: w.mac}}}, link, group)
	if err != nil {
		return nil, err
	}
	return w.ipv6Frame(link, group, message), nil
}

// ipv6Frame returns an ICMPv6 message to a multicast group.
func (w *wire) ipv6Frame(from, group netip.Addr, message []byte) []byte {
	to := group.As16()
	b := append([]byte{0x33, 0x33, to[12], to[13], to[14], to[15]}, w.mac...)
	b = binary.BigEndian.AppendUint16(b, typeIPv6)
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(message)))
	b = append(b, 58, 255) // ICMPv6, and the hop limit that tells a neighbor
	b = append(append(b, from.AsSlice()...), group.AsSlice()...)
	return append(b, message...)
}

// read notes the answers that come until a time, ARP's first.
func (w *wire) read(until time.Time, note func(netip.Addr, net.HardwareAddr)) error {
	half := time.Now().Add(time.Until(until) / 2)
	if err := errors.Join(w.arp.SetReadDeadline(half), w.ndp.SetReadDeadline(until)); err != nil {
		return err
	}
	b := make([]byte, 256)
	for {
		n, _, err := w.arp.ReadFrom(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return err
		}
		if n >= 42 && binary.BigEndian.Uint16(b[20:]) == 2 {
			note(netip.AddrFrom4([4]byte(b[28:32])), net.HardwareAddr(slices.Clone(b[22:28])))
		}
	}
	for {
		m, _, _, err := w.ndp.ReadFrom()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		na, ok := m.(*ndp.NeighborAdvertisement)
		if err != nil || !ok {
			continue // what is no answer
		}
		for _, o := range na.Options {
			if lla, ok := o.(*ndp.LinkLayerAddress); ok {
				note(na.TargetAddress, slices.Clone(lla.Addr))
			}
		}
	}
}

// malformed sends broken ARP and NDP packets, drawn from a seed. None is one that a neighbor may believe.
func (w *wire) malformed(seed uint64, n int) error {
	r := rand.New(rand.NewPCG(seed, 1))
	for range n {
		frame := w.arpFrame(1, w.own, netip.AddrFrom4([4]byte{172, 26, 236, byte(180 + r.IntN(20))}))
		switch r.IntN(4) {
		case 0: // cut short
			frame = frame[:14+r.IntN(28)]
		case 1: // another hardware or protocol
			frame[14+r.IntN(6)] ^= byte(1 + r.IntN(255))
		case 2: // an operation that is none
			binary.BigEndian.PutUint16(frame[20:], uint16(3+r.IntN(60000)))
		default: // ICMPv6 of random bytes
			binary.BigEndian.PutUint16(frame[12:], typeIPv6)
			for i := 14; i < len(frame); i++ {
				frame[i] = byte(r.Uint32())
			}
			frame[14], frame[20] = 0x60, 58
		}
		if err := w.send(frame); err != nil {
			return err
		}
	}
	return nil
}

// spoof announces addresses as the client's own, over ARP or NDP.
func (w *wire) spoof(addrs []netip.Addr) error {
	for _, a := range addrs {
		var frame []byte
		if a.Is4() {
			frame = w.arpFrame(2, a, a)
		} else {
			var err error
			if frame, err = w.advertisement(a); err != nil {
				return err
			}
		}
		for range 3 {
			if err := w.send(frame); err != nil {
				return err
			}
		}
	}
	return nil
}

// advertisement tells all that the client has an IPv6 address.
func (w *wire) advertisement(a netip.Addr) ([]byte, error) {
	allNodes := netip.MustParseAddr("ff02::1")
	message, err := ndp.MarshalMessageChecksum(&ndp.NeighborAdvertisement{Override: true, TargetAddress: a,
		Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: w.mac}}}, a, allNodes)
	if err != nil {
		return nil, err
	}
	return w.ipv6Frame(a, allNodes, message), nil
}
