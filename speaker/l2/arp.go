package l2

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"golang.org/x/net/bpf"

	"github.com/landfall-lb/landfall/internal/lb"
)

// listenARP opens a socket that sees the ARP packets of an interface.
func listenARP(i lb.Interface) (net.PacketConn, error) {
	return listen(i, ethernet.EtherTypeARP, bpf.RetConstant{Val: 4096})
}

// arpFrame is a received packet.
type arpFrame struct {
	ethernet.Frame
	arp.Packet
}

// readARP takes a frame apart.
func readARP(b []byte) (f arpFrame, ok bool) {
	if f.Frame.UnmarshalBinary(b) != nil || f.EtherType != ethernet.EtherTypeARP || f.VLAN != nil {
		return f, false
	}
	if f.Packet.UnmarshalBinary(f.Payload) != nil || f.HardwareType != 1 ||
		f.ProtocolType != uint16(ethernet.EtherTypeIPv4) ||
		len(f.SenderHardwareAddr) != 6 || !f.SenderIP.Is4() || !f.TargetIP.Is4() {
		return f, false
	}
	return f, true
}

// answer returns the frame that answers a received one (RFC 826), and for which address, or why
// there is none. An answer carries the interface's own MAC in both headers, so that no switch port
// has to allow foreign ones.
func (f arpFrame) answer(own net.HardwareAddr,
	answers func(netip.Addr) bool) (reply []byte, asked netip.Addr, drop Drop) {
	asked = f.TargetIP
	sender := f.SenderHardwareAddr
	switch {
	case len(own) != len(sender):
		return nil, asked, dropMalformed
	case f.Operation != arp.OperationRequest:
		return nil, asked, dropNotRequest
	case !bytes.Equal(f.Destination, ethernet.Broadcast) && !bytes.Equal(f.Destination, own):
		return nil, asked, dropNotForUs
	case sender[0]&1 == 1, bytes.Equal(sender, own): // group bit (IEEE 802): also set in the broadcast address
		return nil, asked, dropBadSender
	case f.SenderIP == f.TargetIP:
		return nil, asked, dropAnnounced
	case !answers(asked):
		return nil, asked, dropNotOurs
	}
	reply, err := encodeARP(arp.OperationReply, own, asked, sender, f.SenderIP, sender)
	if err != nil {
		return nil, asked, dropMalformed
	}
	return reply, asked, dropNone
}

// uses returns which address another device uses, as the packet shows: that of its sender. Also a
// probe for an address that this node is about to use itself counts, as two who probe at a time
// must not both go on (RFC 5227, 2.1.1).
func (f arpFrame) uses(own net.HardwareAddr,
	listens listening) (vip netip.Addr, mac net.HardwareAddr, ok bool) {
	mac = f.SenderHardwareAddr
	if bytes.Equal(mac, own) || mac[0]&1 == 1 {
		return vip, nil, false
	}
	if _, ok := listens(f.SenderIP); ok {
		return f.SenderIP, mac, true
	}
	answered, ok := listens(f.TargetIP)
	return f.TargetIP, mac, ok && !answered && f.Operation == arp.OperationRequest && f.SenderIP.IsUnspecified()
}

// announceARP returns the two gratuitous forms that tell a segment where an address is now: a
// request as RFC 5227 section 2.3 wants it, and a reply, as some devices heed only one of them.
func announceARP(own net.HardwareAddr, vip netip.Addr) ([][]byte, error) {
	request, err := encodeARP(arp.OperationRequest, own, vip, make(net.HardwareAddr, len(own)), vip, ethernet.Broadcast)
	if err != nil {
		return nil, err
	}
	reply, err := encodeARP(arp.OperationReply, own, vip, ethernet.Broadcast, vip, ethernet.Broadcast)
	return [][]byte{request, reply}, err
}

// probeARP returns the question whether a host uses an address, which changes no host's memory of
// where it is (RFC 5227 section 1.1).
func probeARP(own net.HardwareAddr, vip netip.Addr) ([]byte, error) {
	return encodeARP(arp.OperationRequest, own, netip.IPv4Unspecified(), make(net.HardwareAddr, len(own)), vip,
		ethernet.Broadcast)
}

func encodeARP(op arp.Operation, own net.HardwareAddr, sender netip.Addr, targetMAC net.HardwareAddr, target netip.Addr,
	to net.HardwareAddr) ([]byte, error) {
	p, err := arp.NewPacket(op, own, sender, targetMAC, target)
	if err != nil {
		return nil, err
	}
	payload, err := p.MarshalBinary()
	if err != nil {
		return nil, err
	}
	frame := ethernet.Frame{Destination: to, Source: own, EtherType: ethernet.EtherTypeARP, Payload: payload}
	return frame.MarshalBinary()
}

// arpResponder answers ARP on one interface.
type arpResponder struct{ base }

func newARPResponder(i lb.Interface, listen func(lb.Interface) (net.PacketConn, error), a around) (responder, error) {
	conn, err := listen(i)
	if err != nil {
		return nil, fmt.Errorf("listen for ARP: %w", err)
	}
	return &arpResponder{base{i: i, conn: conn, around: a}}, nil
}

func (r *arpResponder) announce(vip netip.Addr) error {
	frames, err := announceARP(r.i.MAC, vip)
	return r.sendNews(vip, frames, err)
}

func (r *arpResponder) probe(vip netip.Addr) error {
	frame, err := probeARP(r.i.MAC, vip)
	return r.sendProbe(vip, frame, err)
}

// serve has room for the 42 bytes of an ARP packet, 60 with padding.
func (r *arpResponder) serve() error { return serve(&r.base, "ARP", 256, readARP) }
