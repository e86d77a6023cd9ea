package l2

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Sizes and numbers of IPv6 (RFC 8200) and ICMPv6 (RFC 4443).
const (
	ethernetHeader = 14
	ipv6Header     = 40
	protocolICMPv6 = 58
	solicitation   = 135
	advertisement  = 136
	hopLimit       = 255 // what has passed no router
)

var allNodes = netip.MustParseAddr("ff02::1")

// NDPSocket sees the neighbor solicitations and advertisements of an interface, also those sent to
// an address that the kernel does not own, which it would not hand to any other kind of socket: by
// these a client that knows the way makes sure that it still leads there (RFC 4861, 7.3).
type NDPSocket interface {
	net.PacketConn
	// Join has the interface, and switches that listen to MLD, let a multicast group through until
	// leave is called.
	Join(group netip.Addr) (leave func(), err error)
}

type ndpSocket struct {
	*packet.Conn
	index int
}

// listenNDP opens a socket for the solicitations and advertisements of an interface.
func listenNDP(i lb.Interface) (NDPSocket, error) {
	conn, err := listen(i, ethernet.EtherTypeIPv6,
		bpf.LoadAbsolute{Off: ethernetHeader + 6, Size: 1}, // next header
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: protocolICMPv6, SkipTrue: 4},
		bpf.LoadAbsolute{Off: ethernetHeader + ipv6Header, Size: 1}, // type
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: solicitation, SkipTrue: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: advertisement, SkipTrue: 1},
		bpf.RetConstant{Val: 4096},
		bpf.RetConstant{Val: 0})
	if err != nil {
		return nil, err
	}
	return ndpSocket{conn, i.Index}, nil
}

// Join uses a socket for each group, as the kernel bounds the groups of one.
func (s ndpSocket) Join(group netip.Addr) (func(), error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket for %s: %w", group, err)
	}
	if err := unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP,
		&unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(s.index)}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("join %s: %w", group, err)
	}
	return func() { unix.Close(fd) }, nil
}

// ndpFrame is a received solicitation or advertisement.
type ndpFrame struct {
	ethernet.Frame
	source, destination netip.Addr
	kind                byte // solicitation or advertisement
	target              netip.Addr
	// given is the link-layer address that a solicitation gives of its sender, an advertisement of its target;
	// nil for none.
	given net.HardwareAddr
}

// What an NDP message begins with before its options, and the options that are heeded (RFC 4861, 4.3 to 4.6).
const (
	ndpHeader       = 24
	sourceLinkLayer = 1
	targetLinkLayer = 2
)

// readNDP takes a frame apart.
func readNDP(b []byte) (f ndpFrame, ok bool) {
	if f.Frame.UnmarshalBinary(b) != nil || f.EtherType != ethernet.EtherTypeIPv6 || f.VLAN != nil {
		return f, false
	}
	var body []byte
	f.source, f.destination, body, ok = icmp(f.Payload)
	if !ok || len(body) < ndpHeader || body[1] != 0 {
		return f, false
	}
	f.kind, f.target = body[0], netip.AddrFrom16([16]byte(body[8:ndpHeader]))
	switch f.kind {
	case solicitation:
		f.given, ok = linkLayer(body[ndpHeader:], sourceLinkLayer)
	case advertisement:
		f.given, ok = linkLayer(body[ndpHeader:], targetLinkLayer)
	default:
		ok = false
	}
	return f, ok
}

// answer returns the frame that answers a received solicitation (RFC 4861, 7.2.4), and for which
// address, or why there is none.
func (f ndpFrame) answer(own net.HardwareAddr,
	answers func(netip.Addr) bool) (reply []byte, asked netip.Addr, drop Drop) {
	if f.kind != solicitation {
		return nil, asked, dropNotRequest
	}
	asked = f.target
	group := f.Destination[0] == 0x33 && f.Destination[1] == 0x33
	switch {
	case asked.IsMulticast(), len(own) != 6:
		return nil, asked, dropMalformed
	case !group && !bytes.Equal(f.Destination, own):
		return nil, asked, dropNotForUs
	case bytes.Equal(f.Source, own), f.Source[0]&1 == 1, f.source.IsMulticast(), !f.destination.IsMulticast() &&
		f.destination != asked:
		return nil, asked, dropBadSender
	case !answers(asked):
		return nil, asked, dropNotOurs
	}
	to, mac, solicited := f.source, f.Source, true
	if f.source.IsUnspecified() { // somebody is about to take the address for himself (RFC 4862, 5.4)
		to, mac, solicited = allNodes, multicastMAC(allNodes), false
	} else if f.given != nil {
		mac = f.given
	}
	reply, err := advertise(own, asked, solicited, to, mac)
	if err != nil {
		return nil, asked, dropMalformed
	}
	return reply, asked, dropNone
}

// linkLayer returns the first link-layer address of a single device among the options of a kind; nil if there is
// none. It passes other options over unread (RFC 4861, 7.1.1), as a packet has room for hundreds of them. ok is
// false if an option has no length, or ends beyond the packet.
func linkLayer(options []byte, kind byte) (mac net.HardwareAddr, ok bool) {
	for len(options) > 0 {
		if len(options) < 2 || options[1] == 0 || len(options) < 8*int(options[1]) {
			return nil, false
		}
		size := 8 * int(options[1])
		if mac == nil && options[0] == kind && size == 8 && options[2]&1 == 0 {
			mac = net.HardwareAddr(options[2:8])
		}
		options = options[size:]
	}
	return mac, true
}

// uses returns which address another device uses, as the packet shows: the one that it advertises,
// or from which it sends. Also one that it is about to use counts, if this node is about to use it
// itself (RFC 4862, 5.4.3).
func (f ndpFrame) uses(own net.HardwareAddr,
	listens listening) (vip netip.Addr, mac net.HardwareAddr, ok bool) {
	mac = f.Source
	if bytes.Equal(mac, own) || mac[0]&1 == 1 {
		return vip, nil, false
	}
	switch {
	case f.kind == advertisement:
		if f.given != nil {
			mac = f.given
		}
		_, ok = listens(f.target)
		return f.target, mac, ok && !bytes.Equal(mac, own)
	case f.source.IsUnspecified():
		answered, ok := listens(f.target)
		return f.target, mac, ok && !answered
	}
	_, ok = listens(f.source)
	return f.source, mac, ok
}

// icmp takes an ICMPv6 message out of an IPv6 packet that has passed no router, has no other
// headers, and a right checksum.
func icmp(b []byte) (source, destination netip.Addr, body []byte, ok bool) {
	if len(b) < ipv6Header || b[0]>>4 != 6 || b[6] != protocolICMPv6 || b[7] != hopLimit {
		return source, destination, nil, false
	}
	size := int(binary.BigEndian.Uint16(b[4:]))
	if size < 8 || len(b) < ipv6Header+size {
		return source, destination, nil, false
	}
	body = b[ipv6Header : ipv6Header+size]
	source, destination = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	sum := uint32(size) + protocolICMPv6
	for _, part := range [][]byte{b[8:40], body} {
		for i, octet := range part {
			sum += uint32(octet) << (8 * (1 - i%2))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return source, destination, body, sum == 0xffff
}

// advertise returns a frame that says where an address is: an answer, or, if it is not solicited,
// news for all.
func advertise(own net.HardwareAddr, vip netip.Addr, solicited bool, to netip.Addr,
	mac net.HardwareAddr) ([]byte, error) {
	body, err := ndp.MarshalMessageChecksum(&ndp.NeighborAdvertisement{
		Solicited: solicited, Override: true, TargetAddress: vip,
		Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: own}},
	}, vip, to)
	if err != nil {
		return nil, err
	}
	return encodeNDP(own, mac, vip, to, body)
}

// encodeNDP wraps an ICMPv6 message.
func encodeNDP(own, mac net.HardwareAddr, source, destination netip.Addr, body []byte) ([]byte, error) {
	header := make([]byte, ipv6Header, ipv6Header+len(body))
	header[0] = 6 << 4
	binary.BigEndian.PutUint16(header[4:], uint16(len(body)))
	header[6], header[7] = protocolICMPv6, hopLimit
	copy(header[8:], source.AsSlice())
	copy(header[24:], destination.AsSlice())
	frame := ethernet.Frame{Destination: mac, Source: own, EtherType: ethernet.EtherTypeIPv6,
		Payload: append(header, body...)}
	return frame.MarshalBinary()
}

// probeNDP returns the question whether a host uses an address (RFC 4862, 5.4.2).
func probeNDP(own net.HardwareAddr, vip netip.Addr) ([]byte, error) {
	group, err := ndp.SolicitedNodeMulticast(vip)
	if err != nil {
		return nil, err
	}
	body, err := ndp.MarshalMessageChecksum(&ndp.NeighborSolicitation{TargetAddress: vip}, netip.IPv6Unspecified(), group)
	if err != nil {
		return nil, err
	}
	return encodeNDP(own, multicastMAC(group), netip.IPv6Unspecified(), group, body)
}

// multicastMAC returns the link-layer address of a multicast group (RFC 2464, section 7).
func multicastMAC(group netip.Addr) net.HardwareAddr {
	b := group.As16()
	return append(net.HardwareAddr{0x33, 0x33}, b[12:]...)
}

// ndpResponder answers NDP on one interface.
type ndpResponder struct {
	base
	join func(group netip.Addr) (leave func(), err error)

	mu     sync.Mutex
	groups map[netip.Addr]func() // those joined, with what leaves them
	failed error                 // why some could not be joined
}

func newNDPResponder(i lb.Interface, listen func(lb.Interface) (NDPSocket, error), a around) (responder, error) {
	conn, err := listen(i)
	if err != nil {
		return nil, fmt.Errorf("listen for NDP: %w", err)
	}
	return &ndpResponder{base: base{i: i, conn: conn, around: a}, join: conn.Join, groups: map[netip.Addr]func(){}}, nil
}

// answer also joins the groups in which the VIPs are asked for.
func (r *ndpResponder) answer(w *work) {
	r.base.answer(w)
	wanted := map[netip.Addr]bool{}
	for vip := range w.all() {
		if group, err := ndp.SolicitedNodeMulticast(vip); err == nil {
			wanted[group] = true
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = nil
	for group := range wanted {
		if r.groups[group] != nil {
			continue
		}
		leave, err := r.join(group)
		if err != nil {
			r.failed = err
			continue
		}
		r.groups[group] = leave
	}
	for group, leave := range r.groups {
		if !wanted[group] {
			leave()
			delete(r.groups, group)
		}
	}
}

func (r *ndpResponder) announce(vip netip.Addr) error {
	r.mu.Lock()
	err := r.failed
	r.mu.Unlock()
	if err != nil {
		return err // nobody who asks would be heard
	}
	frame, err := advertise(r.i.MAC, vip, false, allNodes, multicastMAC(allNodes))
	return r.sendNews(vip, [][]byte{frame}, err)
}

func (r *ndpResponder) probe(vip netip.Addr) error {
	frame, err := probeNDP(r.i.MAC, vip)
	return r.sendProbe(vip, frame, err)
}

func (r *ndpResponder) serve() error { return serve(&r.base, "NDP", 2048, readNDP) }

func (r *ndpResponder) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for group, leave := range r.groups {
		leave()
		delete(r.groups, group)
	}
	r.base.close()
}
